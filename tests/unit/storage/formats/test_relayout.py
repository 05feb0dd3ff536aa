"""Conversion of stored tensors: memory, reads of local files, and interrupts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from rfork.image.staging import BUFFER_ALIGNMENT, BufferPool, allocate_host
from rfork.settings import StorageSettings
from rfork.storage.formats import relayout
from rfork.storage.formats.safetensors_file import TensorLocation, read_shard
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.local import LocalFile
from tests.unit.storage.recording_store import RecordingBlob

SETTINGS = StorageSettings(staging_bytes=16 << 20, concurrency=3)


def test_conversion_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than the allowed memory is converted in parts, with few buffers."""
    stored = {"large": torch.randn(3, 5 << 20), "line": torch.randn(2 << 20)}
    into = {name: torch.empty_like(tensor, dtype=torch.bfloat16) for name, tensor in stored.items()}
    allocated: list[int] = []

    def counted(nbytes: int) -> torch.Tensor:
        allocated.append(nbytes)
        return allocate_host(nbytes)

    monkeypatch.setattr(relayout, "BufferPool", partial(BufferPool, make=counted))
    monkeypatch.setattr(relayout, "allocate_host", counted)
    blob = RecordingBlob("file:///f/0", save(stored))
    with closing(SafetensorsSource("file:///f/", [read_shard("0", blob)], SETTINGS)) as source:
        blob.read_ranges.clear()
        source.read_into(into)
    assert [True, True] == [torch.equal(stored[name].bfloat16(), into[name]) for name in stored]
    assert 0 < sum(allocated) <= SETTINGS.staging_bytes
    assert 68 << 20 == blob.read_bytes


def test_a_stored_tensor_with_gaps_gets_memory_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be split, and may be larger than the buffers."""
    monkeypatch.setattr(relayout, "RUN_BYTES", 1 << 10)
    base = torch.arange(1 << 10, dtype=torch.float32).reshape(32, 32)
    blob = RecordingBlob("file:///f/0", base.numpy().tobytes())
    target = torch.empty(32, 32, dtype=torch.float64)
    location = TensorLocation("w", blob, 0, base.nbytes, torch.float32, (32, 32), (1, 32))
    relayout.fill_converted([(location, target)], 0, SETTINGS)
    assert torch.equal(base.t().double(), target)


def test_overlapping_tensors_are_converted_from_their_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied tensors, or one that is a part of another, may begin before the last run of the larger one."""
    monkeypatch.setattr(relayout, "RUN_BYTES", 1 << 10)
    base = torch.arange(1 << 10, dtype=torch.float32).reshape(32, 32)
    blob = RecordingBlob("file:///f/0", base.numpy().tobytes())
    parts = {"all": slice(0, 32), "tied": slice(0, 32), "part": slice(22, 24)}
    into = {name: torch.zeros(len(base[rows]), 32, dtype=torch.float64) for name, rows in parts.items()}
    locations = [
        TensorLocation(name, blob, rows.start * 128, len(base[rows]) * 128, torch.float32, (len(base[rows]), 32))
        for name, rows in parts.items()
    ]
    relayout.fill_converted([(location, into[location.name]) for location in locations], 0, SETTINGS)
    assert torch.equal(base.double(), into["all"])
    assert torch.equal(base.double(), into["tied"])
    assert torch.equal(base[22:24].double(), into["part"])


def test_local_files_are_read_in_complete_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A direct read of a part of a page would need a second one; the last page may be incomplete."""
    stored = {name: torch.randn(700 + 999 * index) for index, name in enumerate("abc")}
    save_file(stored, tmp_path / "file")
    reads: list[tuple[int, int]] = []
    read = LocalFile.read

    def recorded(self: LocalFile, offset: int, into: Sequence[memoryview]) -> None:
        reads.append((offset, offset + sum(view.nbytes for view in into)))
        read(self, offset, into)

    into = {name: torch.empty_like(stored[name], dtype=torch.float64) for name in ("b", "c")}
    with closing(LocalFile(tmp_path / "file", SETTINGS)) as file:
        source = SafetensorsSource("file:///f/", [read_shard("file", file)], SETTINGS)
        monkeypatch.setattr(LocalFile, "read", recorded)
        source.read_into({"b": into["b"]})
        source.read_into({"c": into["c"]})
        size = file.size
    assert [True, True] == [torch.equal(stored[name].double(), tensor) for name, tensor in into.items()]
    assert [0, 0] == [begin % BUFFER_ALIGNMENT for begin, _ in reads]
    assert all(end % BUFFER_ALIGNMENT == 0 or end == size for _, end in reads)
