"""Restoring complete snapshots on each access path: chunks are verified, and no damaged byte is accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import rfork
from rfork.errors import CheckpointError, StorageChanged, StorageCorrupt
from rfork.storage.checkpoint import Checkpoint
from rfork.storage.formats.detect import open_source
from rfork.storage.module_io.load import open_snapshot_of
from rfork.storage.module_io.save import save
from rfork.storage.snapshots.entry import manifest_name
from tests.tensor_samples import raw_tensors, samples

FILE = "model-rank-000.safetensors"


class Model(nn.Module):
    """Model with tied weights, a computed buffer and an empty one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 30, dtype=dtype)
        self.head = nn.Linear(30, 40, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(30)
        self.register_buffer("rotary", torch.arange(9.0), persistent=False)
        self.register_buffer("nothing", torch.zeros(0, 3))


def empty(dtype: torch.dtype = torch.float32) -> Model:
    with rfork.no_init():
        return Model(dtype)


@pytest.fixture
def source() -> Model:
    torch.manual_seed(1)
    return Model()


@pytest.fixture
def folder(source: Model, tmp_path: Path) -> Path:
    """Write a snapshot of `source`."""
    save(source, tmp_path)
    return tmp_path


def damage(folder: Path, at: int = -1) -> None:
    """Flip one bit of the data."""
    path = folder / FILE
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


LOAD_CALLS: list[Callable[[Path], object]] = [
    lambda folder: rfork.load(Model(), folder),
    lambda folder: rfork.load(empty(), folder),
    lambda folder: rfork.load(empty(), folder / FILE),
    lambda folder: rfork.load_tensors(folder),
    lambda folder: rfork.load_tensors(folder / FILE),
    lambda folder: rfork.load_tensors(folder, dtype=torch.float32),
]


@pytest.mark.parametrize("load", LOAD_CALLS)
def test_a_changed_byte_is_detected(folder: Path, load: Callable[[Path], object]) -> None:
    """Loading a complete snapshot returns the saved values, or raises an error that names the chunk."""
    load(folder)
    damage(folder)
    with pytest.raises(StorageCorrupt, match=r"chunk 0 .* does not match its digest"):
        load(folder)


def test_a_module_without_memory_is_restored(source: Model, folder: Path) -> None:
    """Parameters adopt the restored memory, buffers keep theirs, tied ones stay tied, and all are verified."""
    module = empty()
    buffers = {name: buffer.data_ptr() for name, buffer in module.named_buffers() if buffer.numel()}
    progress_bytes: list[int] = []
    report = rfork.load(module, folder, progress=progress_bytes.append)
    assert report.verified
    assert () == report.missing
    assert () == report.unexpected
    assert module.head.weight is module.embed.weight
    assert raw_tensors(source.state_dict()) == raw_tensors(module.state_dict())
    assert buffers == {name: each.data_ptr() for name, each in module.named_buffers() if each.numel()}
    assert module.embed.weight.requires_grad
    assert report.bytes == sum(progress_bytes)


def test_tensors_of_all_types_are_restored(tmp_path: Path) -> None:
    """All names, dtypes, shapes and strides are restored, and tied tensors share memory again."""
    tensors = samples()
    tensors["tied"] = tensors["embed.weight"]
    line = torch.arange(16, dtype=torch.uint8)
    tensors |= {"crooked.bytes": line[1:12], "crooked.words": line.view(torch.int32)[1:2]}
    save(tensors, tmp_path)
    found = rfork.load_tensors(tmp_path)
    assert raw_tensors(tensors) == raw_tensors(found)
    assert found["tied"].data_ptr() == found["embed.weight"].data_ptr()


def test_a_shared_snapshot_is_restored(source: Model, tmp_path: Path) -> None:
    """Chunks are verified without a data file too."""
    save(source, tmp_path / "1", shared=True)
    module = empty()
    assert rfork.load(module, tmp_path / "1").verified
    assert raw_tensors(source.state_dict()) == raw_tensors(module.state_dict())
    assert {"embed.weight", "head.weight"} <= rfork.load_tensors(tmp_path / "1").keys()


def test_partial_loads_are_not_verified(source: Model, folder: Path) -> None:
    """A selection of names, another dtype or another layout is not verified, and the report states that."""
    half = empty(torch.bfloat16)
    assert not rfork.load(half, folder).verified
    assert not rfork.load(Model(torch.bfloat16), folder).verified
    assert torch.equal(source.embed.weight.bfloat16(), half.embed.weight)
    wider = empty()
    wider.more = nn.Parameter(torch.zeros(2))
    assert not rfork.load(wider, folder, strict=False).verified
    damage(folder)
    assert ["norm.bias"] == list(rfork.load_tensors(folder, ["norm.bias"]))
    assert {torch.float16} == {
        tensor.dtype
        for tensor in rfork.load_tensors(folder, dtype=torch.float16).values()
        if tensor.is_floating_point()
    }


def test_a_snapshot_without_its_manifest_is_a_plain_file(source: Model, folder: Path) -> None:
    """It is loaded, and the report states that it was not verified."""
    (folder / manifest_name(FILE)).unlink()
    module = empty()
    assert not rfork.load(module, folder).verified
    assert raw_tensors(source.state_dict()) == raw_tensors(module.state_dict())
    assert source.embed.weight.tolist() == rfork.load_tensors(folder)["head.weight"].tolist()


def test_a_snapshot_replaced_during_the_load_is_never_mixed_with_the_old_one(folder: Path) -> None:
    """The bytes of the old and the new snapshot are never mixed."""
    opened = open_source(folder)
    save({"other": torch.ones(3)}, folder)
    with pytest.raises(StorageChanged, match="replaced by a snapshot with another layout"):
        open_snapshot_of(opened, folder, rfork.StorageSettings())
    opened.close()


@pytest.mark.parametrize("name", ["", FILE])
def test_a_snapshot_is_refused_as_a_checkpoint(folder: Path, name: str) -> None:
    """A fork would otherwise serve unverified bytes."""
    with pytest.raises(CheckpointError, match="is an rfork snapshot: pass it as snapshot="):
        Checkpoint.open(folder / name)
