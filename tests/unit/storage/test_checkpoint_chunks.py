"""Checkpoint folders as sources of chunks: they return the bytes that a loader would write, or raise an
error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rfork.errors import CheckpointError, StorageError
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.receiver.clean_module import DerivedTensors
from rfork.storage.checkpoint import Checkpoint, CheckpointChunks, NotBytewiseLoadable
from rfork.storage.formats.detect import INDEX, SINGLE

LAYER_BYTES = 400_000


class Model(nn.Module):
    """Model with tied weights, two layers larger than a chunk together, and tensors that no checkpoint
    contains.
    """

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 30, dtype=dtype)
        self.head = nn.Linear(30, 40, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(LAYER_BYTES // 8, 2, dtype=dtype) for _ in range(12))
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("rotary", torch.arange(9.0), persistent=False)
        self.stray = torch.tensor([1, 2, 3])


def state(seed: int = 1) -> dict[str, torch.Tensor]:
    """Return the content of a checkpoint of the model: tied weights once."""
    torch.manual_seed(seed)
    content = {name: torch.randn_like(value) for name, value in Model().state_dict().items()}
    del content["head.weight"]
    return content


def single(folder: Path, content: dict[str, torch.Tensor]) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    save_file(content, folder / SINGLE)
    return Checkpoint.open(folder)


def sharded(folder: Path, content: dict[str, torch.Tensor]) -> Checkpoint:
    """Write three shards whose tensors are in a different order than in the image."""
    folder.mkdir(exist_ok=True)
    names = {name: f"shard-{number % 3}.safetensors" for number, name in enumerate(sorted(content))}
    for file in set(names.values()):
        save_file({name: content[name] for name in names if names[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return Checkpoint.open(folder)


def opened(checkpoint: Checkpoint, model: nn.Module) -> tuple[Image, CheckpointChunks]:
    image = capture(model)
    return image, CheckpointChunks.open(checkpoint, model, image, DerivedTensors(model, image).kept)


def bytes_of(chunks: CheckpointChunks, begin: int, end: int) -> bytes:
    data = bytearray(end - begin)
    chunks.read(begin, end, [memoryview(data)])
    return bytes(data)


def read_image(image: Image) -> bytes:
    with image.readable(0, image.layout.image_bytes) as views:
        return b"".join(bytes(view) for view in views)


@pytest.mark.parametrize("write", [single, sharded])
def test_the_chunks_equal_the_result_of_a_loader(
    tmp_path: Path, write: Callable[[Path, dict[str, torch.Tensor]], Checkpoint]
) -> None:
    """Read by chunks or by odd ranges, the image equals that of a loaded model."""
    checkpoint = write(tmp_path, state())
    loaded = Model()
    checkpoint.load_into(loaded)
    expected = read_image(capture(loaded))
    image, chunks = opened(checkpoint, Model())
    cuts = [0, 1, 5000, 5001, 1 << 20, 3_000_001, len(expected)]
    by_ranges = b"".join(bytes_of(chunks, a, b) for a, b in pairwise(cuts))
    by_chunks = b"".join(bytes_of(chunks, a, b) for a, b in image.layout.chunks)
    chunks.close()
    assert expected == by_chunks
    assert expected == by_ranges


def test_computed_tensors_are_served_as_built(tmp_path: Path) -> None:
    """A transfer that overwrote the rotary table does not change what the checkpoint returns."""
    checkpoint, model = single(tmp_path, state()), Model()
    image, chunks = opened(checkpoint, model)
    expected = bytes_of(chunks, 0, image.layout.image_bytes)
    for region in image.regions:
        region.fill_(0xAB)
    assert expected == bytes_of(chunks, 0, image.layout.image_bytes)
    chunks.close()


def test_excluded_tensors_are_not_read(tmp_path: Path) -> None:
    """Tensors that the image excludes stay excluded."""
    checkpoint, model = single(tmp_path, state()), Model()
    image = capture(model, exclude=["layers.*"])
    chunks = CheckpointChunks.open(checkpoint, model, image, DerivedTensors(model, image).kept)
    chunks.close()
    checkpoint.load_into(model)
    assert read_image(image) == bytes_of_open(checkpoint, image)


def bytes_of_open(checkpoint: Checkpoint, image: Image) -> bytes:
    """Open a checkpoint for an image and return all bytes of it."""
    model = Model()
    fresh = capture(model, exclude=["layers.*"])
    chunks = CheckpointChunks.open(checkpoint, model, fresh, DerivedTensors(model, fresh).kept)
    data = bytes_of(chunks, 0, image.layout.image_bytes)
    chunks.close()
    return data


def test_of_two_stored_names_of_a_tied_weight_the_last_counts(tmp_path: Path) -> None:
    """As with a loader, the tensor that is loaded last counts."""
    content = state()
    checkpoint = single(tmp_path, {**content, "head.weight": content["embed.weight"] + 1})
    loaded = Model()
    checkpoint.load_into(loaded)
    image, chunks = opened(checkpoint, Model())
    assert read_image(capture(loaded)) == bytes_of(chunks, 0, image.layout.image_bytes)
    chunks.close()


class Transposed(Model):
    """Model that stores one weight transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight = nn.Parameter(torch.zeros(LAYER_BYTES // 8, 2).t(), requires_grad=False)


@pytest.mark.parametrize(
    ("model", "message"),
    [(lambda: Model(dtype=torch.bfloat16), "torch.bfloat16 in the model"), (Transposed, "not contiguous")],
    ids=["another dtype", "another memory order"],
)
def test_a_checkpoint_that_needs_conversion_has_no_chunks(
    tmp_path: Path, model: Callable[[], nn.Module], message: str
) -> None:
    """A checkpoint that does not match byte for byte has no chunks and is loaded tensor by tensor."""
    with pytest.raises(NotBytewiseLoadable, match=message):
        opened(single(tmp_path, state()), model())


def test_a_tensor_with_another_shape_is_refused(tmp_path: Path) -> None:
    """A checkpoint of another model is reported as a mismatch, not as one that needs conversion."""
    content = {**state(), "scale": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"scale has shape \[3\]") as caught:
        opened(single(tmp_path, content), Model())
    assert CheckpointError is caught.type


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    """A truncated file is refused before a byte is read."""
    checkpoint = single(tmp_path, state())
    path = tmp_path / SINGLE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises((CheckpointError, StorageError), match="truncated"):
        opened(checkpoint, Model())


def fingerprint(folder: Path, content: dict[str, torch.Tensor], model: nn.Module | None = None) -> str:
    _, chunks = opened(single(folder, content), model or Model())
    chunks.close()
    return chunks.origin


def test_copies_have_the_same_origin(tmp_path: Path) -> None:
    """The same files in two folders have one origin, so that another instance can continue with the chunks."""
    assert fingerprint(tmp_path / "one", state()) == fingerprint(tmp_path / "two", state())


def other_values() -> tuple[dict[str, torch.Tensor], nn.Module]:
    return state(2), Model()


def other_table() -> tuple[dict[str, torch.Tensor], nn.Module]:
    model = Model()
    model.get_buffer("rotary").add_(1)
    return state(), model


def changed_norm() -> tuple[dict[str, torch.Tensor], nn.Module]:
    content = state()
    content["scale"][1] += 1
    return content, Model()


def changed_matrix(index: int) -> Callable[[], tuple[dict[str, torch.Tensor], nn.Module]]:
    def changed() -> tuple[dict[str, torch.Tensor], nn.Module]:
        content = state()
        content["layers.7.weight"].view(-1)[index] += 1
        return content, Model()

    return changed


@pytest.mark.parametrize(
    "changed",
    [
        other_values,
        other_table,
        changed_norm,
        changed_matrix(0),
        changed_matrix(LAYER_BYTES // 8),
        changed_matrix(-1),
    ],
    ids=["all values", "a computed table", "a norm", "a matrix's begin", "a byte in the middle", "the last byte"],
)
def test_different_bytes_have_different_origins(
    tmp_path: Path, changed: Callable[[], tuple[dict[str, torch.Tensor], nn.Module]]
) -> None:
    """Stored values and computed ones both count."""
    assert fingerprint(tmp_path / "one", state()) != fingerprint(tmp_path / "two", *changed())
