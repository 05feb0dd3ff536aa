"""Measures how fast storage is read, by a short sample. Runs on the target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from rfork.errors import StorageError, StorageNotFound
from rfork.image.chunks import MIB
from rfork.image.ranges import Range
from rfork.settings import StorageSettings
from rfork.storage.base import RangeReader
from rfork.storage.io.prefetcher import StoragePrefetcher
from rfork.storage.local import LocalFile
from rfork.storage.os_errors import storage_error
from rfork.storage.versions.weight_files import select_weight_files

SAMPLE_BYTES: Final = 16 * MIB
"""Maximum size of a sample."""
SAMPLE_FRACTION: Final = 1 / 16
"""Maximum fraction of the bytes that is read as a sample."""
PARTS: Final = 4
"""Ranges of a sample, evenly spread: some of them may be in the page cache and others not."""


def sample_rate(storage: RangeReader, nbytes: int, name: str, settings: StorageSettings) -> float:
    """Return the bytes per second at which the first `nbytes` of a storage are read, measured on a few MiB of them.

    They are read as a fork reads storage: concurrently, local files from the page cache or past it. Raises the
    storage's errors.
    """
    parts = sampled_parts(nbytes)
    blocks = StoragePrefetcher(name, settings)
    began = time.perf_counter()
    try:
        for index, (begin, end) in enumerate(parts):
            left = parts[index + 1 :]
            for _ in blocks.read(storage, begin, end, lambda left=left: ((), left)):  # type: ignore[misc]
                pass
    finally:
        blocks.close()
    return sum(end - begin for begin, end in parts) / max(time.perf_counter() - began, 1e-9)


def sampled_parts(nbytes: int) -> Sequence[Range]:
    """Return the ranges of a sample."""
    size = max(1, min(SAMPLE_BYTES, int(nbytes * SAMPLE_FRACTION)) // PARTS)
    begins = {number * nbytes // PARTS + max(0, nbytes // PARTS - size) // 2 for number in range(PARTS)}
    return [(begin, begin + size) for begin in sorted(begins)]


def sample_files(path: Path, settings: StorageSettings) -> float:
    """Return the bytes per second at which a file, or the largest weight file of a folder, is read.

    Raises StorageError subclasses.
    """
    try:
        names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
        files = [path / name for name in select_weight_files(names).weights] if path.is_dir() else [path]
        sizes = {file: file.stat().st_size for file in files}
    except OSError as error:
        raise storage_error(path, error) from None
    if not sizes:
        raise StorageNotFound(f"there are no weight files in {path}")
    sampled = max(sizes, key=lambda file: sizes[file])
    with closing(LocalFile(sampled, settings)) as opened:
        if not opened.size:
            raise StorageError(f"{sampled} is empty")
        return sample_rate(_FileRanges(opened), opened.size, str(sampled), settings)


class _FileRanges:
    """A local file as a `RangeReader`."""

    def __init__(self, file: LocalFile) -> None:
        self._file = file

    def read(self, begin: int, end: int, into: Sequence[memoryview]) -> None:
        """See `RangeReader`."""
        self._file.read(begin, into)
