"""What tells one checkpoint's bytes from another's, without reading them all. Runs on the target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rfork.errors import StorageError
from rfork.image import ranges
from rfork.storage.attempt import Attempt
from rfork.storage.checkpoint import INDEX
from rfork.storage.files import DataFile

ORIGIN_DOMAIN = b"rfork-origin-v2\n"
WHOLE_BYTES = 64 << 10
"""A tensor up to this size is covered whole: norms and biases are what small edits change."""
SAMPLE_BYTES = 4096
READ_BYTES = 1 << 20
THREADS = 16


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a checkpoint: its header's bytes, and the data ranges of its tensors behind that."""

    name: str
    file: DataFile
    head: bytes
    tensors: tuple[ranges.Range, ...]


def origin_of(folder: Path, shards: Sequence[Shard], computed: Iterable[tuple[int, memoryview]]) -> str:
    """A hash, as 32 hex digits, over

    - the index file;
    - of each shard its name, its size, its header, and of each tensor in it all bytes up to 64 KiB, of a
      larger one the first, the middle and the last 4 KiB;
    - `computed`: image offsets and bytes of what the module computed for itself.

    Files that agree in it may still differ inside a large tensor: whoever goes on with chunks of another
    reader compares digests of those first. Raises StorageError.
    """
    state = hashlib.sha256(ORIGIN_DOMAIN)

    def cover(part: bytes | memoryview) -> None:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)

    try:
        cover((folder / INDEX).read_bytes() if (folder / INDEX).is_file() else b"")
    except OSError as error:
        raise StorageError(f"{folder / INDEX}: {error.strerror or error}") from None
    for shard in (ordered := sorted(shards, key=lambda shard: shard.name)):
        cover(b"%s\n%d" % (shard.name.encode(), shard.file.size))
        cover(shard.head)
    # Side by side: on a network's disk each of these small reads costs a round trip.
    # On threads that do not hold up the end of the process, should the disk hang.
    pieces = [piece for shard in ordered for piece in _samples(shard)]
    attempts = [
        Attempt(str(folder), partial(_digests, pieces[turn::THREADS]), _forget) for turn in range(THREADS)
    ]
    for attempt in attempts:
        for digest in attempt.result():
            cover(digest)
    for begin, memory in computed:
        cover(begin.to_bytes(8, "little"))
        cover(memory)
    return state.hexdigest()[:32]


def _samples(shard: Shard) -> Iterator[tuple[DataFile, int, int]]:
    """What is read of a shard: file ranges, those that touch as one."""
    parts: list[ranges.Range] = []
    for begin, end in shard.tensors:
        if end - begin <= WHOLE_BYTES:
            parts.append((begin, end))
        else:
            middle = (begin + end - SAMPLE_BYTES) // 2
            parts += [
                (begin, begin + SAMPLE_BYTES),
                (middle, middle + SAMPLE_BYTES),
                (end - SAMPLE_BYTES, end),
            ]
    for begin, end in ranges.normalise(parts):
        for at in range(begin, end, READ_BYTES):
            yield shard.file, len(shard.head) + at, min(READ_BYTES, end - at)


def _digests(pieces: Sequence[tuple[DataFile, int, int]]) -> list[bytes]:
    return [hashlib.sha256(file.part(offset, length)).digest() for file, offset, length in pieces]


def _forget(digests: Sequence[bytes]) -> None:
    """Nobody waits for them any more."""
