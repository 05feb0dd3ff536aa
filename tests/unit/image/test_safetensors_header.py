"""An image behind a safetensors header is a file that safetensors itself reads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load, load_file
from torch import nn

from rfork.errors import CheckpointError, RforkError, StorageCorrupt, StorageError
from rfork.image import safetensors_header
from rfork.image.capture import capture, image_from_tensors
from rfork.image.memory import Image
from rfork.image.safetensors_header import header, header_length, layout_of, live_header, weights_id_of
from tests.unit.image.random_modules import Recipe, build, recipes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


def file_of(image: Image, weights_id: str | None = None) -> bytes:
    with image.readable(0, image.layout.image_bytes) as views:
        return header(image.layout, weights_id) + b"".join(views)


@settings(max_examples=100, deadline=None)
@given(recipes)
def test_every_image_is_a_valid_file_with_its_layout(recipe: Recipe) -> None:
    """safetensors reads the file, and the layout read back equals the one written."""
    image = capture(build(recipe, 1))
    snapshot = file_of(image)
    assert image.layout.image_bytes == sum(tensor.nbytes for tensor in load(snapshot).values())
    assert image.layout == layout_of(snapshot)


def test_plain_tensors_keep_name_type_shape_and_values(tmp_path: Path) -> None:
    """Contiguous tensors of common types are read back unchanged, including empty and 0-dim ones."""
    tensors = {
        "wide": torch.randn(3, 4, dtype=torch.float64),
        "half": torch.randn(5).to(torch.bfloat16),
        "small": torch.randn(4, 3).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 7),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(image_from_tensors(tensors)))
    loaded = load_file(path)
    assert sorted(tensors) == sorted(loaded)
    for name, tensor in tensors.items():
        assert tensor.dtype == loaded[name].dtype
        assert tensor.shape == loaded[name].shape
        assert torch.equal(tensor.view(torch.uint8) if tensor.dim() else tensor,
                           loaded[name].view(torch.uint8) if tensor.dim() else loaded[name])  # fmt: skip


def test_tensors_that_safetensors_cannot_express_are_bytes() -> None:
    """Strided tensors and unusual types are U8 entries under their names."""
    packed = torch.zeros(3, dtype=torch.uint8).view(torch.bits8)
    loaded = load(file_of(image_from_tensors({"columns": torch.arange(6.0).view(2, 3).t(), "packed": packed})))
    assert {"columns": (torch.uint8, (24,)), "packed": (torch.uint8, (3,))} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in loaded.items()
    }


def test_aliases_are_named_as_safetensors_save_model_names_them(tmp_path: Path) -> None:
    """A tied weight is one entry, and its other names refer to it in the metadata."""
    module = nn.Module()
    module.embed, module.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    module.head.weight = module.embed.weight
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(capture(module)))
    with safe_open(path, "pt") as opened:
        assert ["embed.weight"] == list(opened.keys())
        assert "embed.weight" == opened.metadata()["head.weight"]


def test_a_fused_tensor_and_its_parts_are_the_fused_tensor() -> None:
    """The overlapping tensor that covers the region keeps its type and shape."""
    fused = torch.randn(6, 2)
    loaded = load(file_of(image_from_tensors({"k": fused[2:4], "q": fused[:2], "qkv": fused, "v": fused[4:]})))
    assert ["qkv"] == list(loaded)
    assert torch.equal(fused, loaded["qkv"])


@pytest.mark.parametrize("count", [0, 1, 30, 100])
def test_data_starts_on_a_page(count: int) -> None:
    """The header is a multiple of the page size, so chunks are page-aligned in the file."""
    prefix = header(image_from_tensors({f"t{index}": torch.zeros(1) for index in range(count)}).layout)
    assert 0 == len(prefix) % 4096
    assert len(prefix) == header_length(prefix[:8])


def test_weights_id_is_kept() -> None:
    """The header contains the weights_id it was written with, or none."""
    layout = image_from_tensors({"a": torch.zeros(1)}).layout
    assert "ab" * 16 == weights_id_of(header(layout, "ab" * 16))
    assert weights_id_of(header(layout)) is None


def test_attributes_are_kept() -> None:
    """A snapshot contains the plain values of its module."""
    layout = image_from_tensors({"a": torch.zeros(1)}, ("eps=1e-05 at norm",)).layout
    assert layout == layout_of(header(layout))


def wrapped(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("data", "error_type", "reason"),
    [
        (b"", StorageCorrupt, "it has 0 bytes"),
        (b"\xff" * 16, StorageCorrupt, "a header of 18446744073709551615 bytes"),
        (struct.pack("<Q", 50) + b"{}", StorageCorrupt, "truncated safetensors header: 10 of 58"),
        (wrapped(b"not json"), StorageCorrupt, "invalid safetensors header"),
        (wrapped(b"[1, 2]"), StorageCorrupt, "invalid safetensors header"),
        (wrapped(b"{}"), CheckpointError, "has no rfork.layout"),
        (wrapped(b'{"__metadata__": 3}'), CheckpointError, "has no rfork.layout"),
        (
            wrapped(json.dumps({"__metadata__": {"rfork.layout": "[3]"}}).encode()),
            StorageCorrupt,
            "invalid layout of the snapshot",
        ),
    ],
    ids=["empty", "noise", "cut", "text", "list", "foreign", "metadata", "layout"],
)
def test_an_invalid_snapshot_is_one_clear_error(data: bytes, error_type: type[RforkError], reason: str) -> None:
    """A damaged file is a fault of the storage, a foreign one of the user; both errors contain the reason."""
    with pytest.raises(error_type, match=reason):
        layout_of(data)


def test_a_header_that_readers_reject_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header longer than readers accept is rejected when it is created."""
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(StorageError, match="readers accept at most 1000"):
        header(image_from_tensors({"a": torch.zeros(1)}).layout)


def test_a_live_image_lists_its_tensors() -> None:
    """A seed serves a file whose tensors safetensors can open by name."""
    layout = image_from_tensors({"a": torch.zeros(3), "b": torch.zeros(2)}).layout
    assert header(layout) == live_header(layout)


def test_a_live_image_of_too_many_tensors_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is still a valid safetensors file, with one tensor that contains all bytes."""
    monkeypatch.setattr(safetensors_header, "MAX_NAMED_TENSORS", 1)
    layout = image_from_tensors({"a": torch.zeros(3), "b": torch.zeros(2)}).layout
    data = bytes(range(layout.image_bytes))
    tensors = load(live_header(layout) + data)
    assert {"image": data} == {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
