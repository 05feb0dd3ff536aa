"""Checkpoint folders: loading, and the error for each type of broken folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rfork.errors import CheckpointError, StorageCorrupt
from rfork.storage.checkpoint import Checkpoint
from rfork.storage.formats.detect import INDEX, SINGLE

Tensors = dict[str, torch.Tensor]


class Tied(nn.Module):
    """Model with a tied weight, a persistent buffer and a derived buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("derived", torch.ones(2), persistent=False)


def tensors(**changed: torch.Tensor | None) -> Tensors:
    complete = {
        "embed.weight": torch.arange(12.0).reshape(4, 3),
        "scale": torch.tensor([5.0, 6.0]),
        **changed,
    }
    return {name: value for name, value in complete.items() if value is not None}


def single(folder: Path, content: Tensors) -> Path:
    save_file(content, folder / SINGLE)
    return folder


def sharded(folder: Path, content: Tensors, index: dict[str, str] | None = None) -> Path:
    """Write one shard for each tensor."""
    names = {name: f"shard-{number}.safetensors" for number, name in enumerate(content)}
    for name, file in names.items():
        save_file({name: content[name]}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": names if index is None else index}))
    return folder


@pytest.mark.parametrize("write", [single, sharded])
def test_loading_fills_parameters_and_persistent_buffers(
    write: Callable[[Path, Tensors], Path], tmp_path: Path
) -> None:
    """A folder of one or more files fills parameters, tied weights and persistent buffers only."""
    module, progress_bytes = Tied(), list[int]()
    Checkpoint.open(write(tmp_path, tensors())).load_into(module, progress_bytes.append)
    assert list(range(12)) == module.head.weight.flatten().tolist()
    assert [5.0, 6.0] == module.get_buffer("scale").tolist()
    assert [1.0, 1.0] == module.get_buffer("derived").tolist()
    assert 56 == sum(progress_bytes)


def test_load_converts_the_dtype(tmp_path: Path) -> None:
    """A checkpoint with another dtype is converted to the model's dtype."""
    module = Tied()
    stored = tensors(scale=torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    Checkpoint.open(single(tmp_path, stored)).load_into(module)
    assert torch.float32 == module.get_buffer("scale").dtype
    assert [1.5, -2.0] == module.get_buffer("scale").tolist()


def test_links_to_shards_are_followed(tmp_path: Path) -> None:
    """Shards may be links to files elsewhere, as in a Hugging Face cache."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    sharded(tmp_path / "blobs", tensors())
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    module = Tied()
    Checkpoint.open(tmp_path / "snapshot").load_into(module)
    assert [5.0, 6.0] == module.get_buffer("scale").tolist()


def test_extra_state_missing_from_the_files_is_refused(tmp_path: Path) -> None:
    """A module that needs extra state beyond tensors is refused by name, as in torch's strict loading."""

    class Extra(Tied):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            raise AssertionError(state)

    with pytest.raises(CheckpointError, match="lacks _extra_state"):
        Checkpoint.open(single(tmp_path, tensors())).load_into(Extra())


def truncated(folder: Path) -> None:
    single(folder, tensors())
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:-4])


def truncated_shard(folder: Path) -> None:
    sharded(folder, tensors())
    content = (folder / "shard-0.safetensors").read_bytes()
    (folder / "shard-0.safetensors").write_bytes(content[:-4])


def missing_shard(folder: Path) -> None:
    sharded(folder, tensors())
    (folder / "shard-1.safetensors").unlink()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda folder: folder.rmdir(), "nothing to load at .*folder"),
        (lambda folder: None, ": expected model.safetensors.index.json"),
        (missing_shard, "lacks the shard shard-1.safetensors"),
        (lambda folder: (folder / INDEX).write_text("{"), "is not a safetensors index"),
        (lambda folder: (folder / INDEX).write_text("{}"), "is not a safetensors index"),
        (lambda folder: (folder / INDEX).write_text("[]"), "is not a safetensors index"),
        (lambda folder: sharded(folder, tensors(), {"scale": "../x.safetensors"}), "outside of the folder"),
        (lambda folder: sharded(folder, tensors(), {"scale": "/etc/passwd"}), "outside of the folder"),
        (lambda folder: sharded(folder, tensors(), {"scale": ".."}), "outside of the folder"),
        (
            lambda folder: sharded(
                folder, tensors(), {"scale": "shard-0.safetensors", "embed.weight": "shard-0.safetensors"}
            ),
            "shard-0.safetensors does not contain scale",
        ),
        (lambda folder: single(folder, tensors(extra=torch.zeros(1))), r"contains extra, .* \(1 in total\)"),
        (lambda folder: single(folder, tensors(scale=None)), r"lacks scale, .* \(1 in total\)"),
        (lambda folder: single(folder, tensors(scale=torch.zeros(3))), r"scale has shape \[3\], .* \[2\]"),
    ],
    ids=[
        "no folder",
        "empty folder",
        "missing shard",
        "broken index",
        "index without a map",
        "index of another type",
        "path outside",
        "absolute path",
        "parent folder",
        "shard without the tensor",
        "unknown tensor",
        "missing tensor",
        "different shape",
    ],
)
def test_a_broken_folder_raises_an_error_that_names_the_cause(
    corrupt: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    """Each type of broken folder raises an error that names the cause."""
    folder = tmp_path / "folder"
    folder.mkdir()
    corrupt(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(folder).load_into(Tied())
    assert "user" == caught.value.fault


@pytest.mark.parametrize("corrupt", [truncated, truncated_shard])
def test_a_truncated_file_is_named(corrupt: Callable[[Path], object], tmp_path: Path) -> None:
    """A truncated file is a storage error, not a user error, and is detected before a byte is read."""
    corrupt(tmp_path)
    with pytest.raises(StorageCorrupt, match=r"\.safetensors: truncated"):
        Checkpoint.open(tmp_path)


def test_a_shape_mismatch_writes_nothing(tmp_path: Path) -> None:
    """All shapes are compared before the first tensor is read."""
    module = Tied()
    before = module.embed.weight.detach().clone()
    with pytest.raises(CheckpointError):
        Checkpoint.open(single(tmp_path, tensors(scale=torch.zeros(3)))).load_into(module)
    assert torch.equal(before, module.embed.weight)
