"""Samples of storage, which show how fast it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from rfork.errors import StorageError, StorageNotFound
from rfork.image.chunks import MIB
from rfork.settings import StorageSettings
from rfork.storage.io.sample import PARTS, SAMPLE_BYTES, sample_files, sample_rate, sampled_parts


class RecordedRanges:
    """Storage that records the ranges that are read."""

    def __init__(self, error: StorageError | None = None) -> None:
        self.read_bytes = 0
        self._error = error

    def read(self, begin: int, end: int, into: Sequence[memoryview]) -> None:
        self.read_bytes += end - begin
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("nbytes", [1, 7, 100, MIB, 100 * MIB, 100_000 * MIB])
def test_the_parts_of_a_sample_are_inside(nbytes: int) -> None:
    """Of any size, without overlaps."""
    parts = sampled_parts(nbytes)
    assert all(0 <= begin < end <= nbytes for begin, end in parts)
    assert all(one[1] <= other[0] for one, other in pairwise(parts))
    assert parts


def test_a_sample_is_small() -> None:
    """At most a sixteenth of the bytes, and some MiB."""
    assert MIB == sum(end - begin for begin, end in sampled_parts(16 * MIB))
    assert SAMPLE_BYTES == sum(end - begin for begin, end in sampled_parts(100_000 * MIB))


def test_a_sample_is_spread() -> None:
    """A part of the storage may be in the page cache."""
    quarters = [begin * PARTS // (64 * MIB) for begin, _ in sampled_parts(64 * MIB)]
    assert [0, 1, 2, 3] == quarters


def test_each_byte_of_a_sample_is_read_once() -> None:
    """Bytes that are read ahead count once."""
    storage = RecordedRanges()
    assert sample_rate(storage, 64 * MIB, "storage", StorageSettings()) > 0
    assert 4 * MIB == storage.read_bytes


def test_a_sample_raises_the_errors_of_the_storage() -> None:
    """So that another one is measured."""
    with pytest.raises(StorageError, match="disk error"):
        sample_rate(RecordedRanges(StorageError("disk error")), 64 * MIB, "storage", StorageSettings())


def test_the_weight_files_of_a_folder_are_sampled(tmp_path: Path) -> None:
    """As a loader would read them."""
    (tmp_path / "model.safetensors").write_bytes(bytes(MIB))
    (tmp_path / "config.json").write_bytes(b"{}")
    assert sample_files(tmp_path, StorageSettings()) > 0


def test_a_file_is_sampled(tmp_path: Path) -> None:
    """A checkpoint may be one file."""
    (tmp_path / "model.safetensors").write_bytes(bytes(MIB))
    assert sample_files(tmp_path / "model.safetensors", StorageSettings()) > 0


def test_a_missing_file_has_no_rate(tmp_path: Path) -> None:
    """Nor does a missing folder."""
    with pytest.raises(StorageNotFound):
        sample_files(tmp_path / "nothing", StorageSettings())


def test_a_folder_without_weight_files_has_no_rate(tmp_path: Path) -> None:
    """Other files are no weights."""
    (tmp_path / "config.json").write_bytes(b"{}")
    with pytest.raises(StorageNotFound):
        sample_files(tmp_path, StorageSettings())


def test_an_empty_file_has_no_rate(tmp_path: Path) -> None:
    """Nothing can be read."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(StorageError):
        sample_files(tmp_path, StorageSettings())
