"""Storage reads on threads that can be abandoned."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from rfork.errors import SourceUnavailable, StorageError
from rfork.image.chunks import MIB
from rfork.image.ranges import Range
from rfork.settings import StorageSettings
from rfork.storage.io import prefetcher
from rfork.storage.io.prefetcher import StoragePrefetcher
from tests.unit.receiver.fleet import CHUNKS, NEVER_S, Files, image

STORED_IMAGE = image(1)
SIZE = CHUNKS * MIB


def stored_bytes(begin: int, end: int) -> bytes:
    with STORED_IMAGE.readable(begin, end) as views:
        return b"".join(views)


def reader(streams: int = 8) -> StoragePrefetcher:
    return StoragePrefetcher("files", StorageSettings(concurrency=streams))


class ReadGate:
    """Blocks reads of the files from a chunk onward; `waiting` is the number of blocked reads."""

    def __init__(self, files: Files, blocked_from: int = 0) -> None:
        self._changed = threading.Condition()
        self._blocked_from = blocked_from
        self._waiting = 0
        files.before_read = self._wait

    def open(self) -> None:
        with self._changed:
            self._blocked_from = CHUNKS
            self._changed.notify_all()

    def wait_for(self, waiting: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting >= waiting, NEVER_S)

    def _wait(self, chunk: int) -> bool:
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            return self._changed.wait_for(lambda: chunk < self._blocked_from, NEVER_S)


@pytest.mark.parametrize("block_bytes", [MIB, 5 * MIB // 2, 64 * MIB])
def test_the_blocks_make_up_the_requested_range(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Their size and order do not matter, and each block updates the time of the last progress."""
    monkeypatch.setattr(prefetcher, "BLOCK_BYTES", block_bytes)
    reads = reader()
    before = time.monotonic()
    blocks = dict(sorted((offset, bytes(block)) for offset, block in reads.read(Files(STORED_IMAGE), MIB, SIZE)))
    assert stored_bytes(MIB, SIZE) == b"".join(blocks.values())
    assert MIB == min(blocks)
    assert before <= (reads.last_block_at or 0.0)
    assert 0.0 == reads.idle_seconds(time.monotonic() + 9.0)


def test_a_storage_error_is_raised_to_the_reader() -> None:
    """The blocks before it are returned."""
    files = Files(STORED_IMAGE, fails_at=0)
    with pytest.raises(StorageError, match="disk error"):
        list(reader().read(files, 0, SIZE))


def test_a_blocked_read_can_be_abandoned() -> None:
    """The idle time is visible to the reader, and closing ends its wait immediately."""
    files = Files(STORED_IMAGE)
    gate = ReadGate(files)
    reads = reader()
    errors: list[type[Exception]] = []

    def read() -> None:
        try:
            list(reads.read(files, 0, MIB))
        except SourceUnavailable as error:
            errors.append(type(error))

    thread = threading.Thread(target=read)
    thread.start()
    gate.wait_for(1)
    idle_s = reads.idle_seconds(reads.advanced_at + 7.0)
    reads.close()
    thread.join()
    gate.open()
    assert pytest.approx(7.0) == idle_s
    assert [SourceUnavailable] == errors
    assert reads.last_block_at is None


def test_upcoming_chunks_are_prefetched() -> None:
    """The second chunk is in flight while the first is waited for, and is read only once."""
    files = Files(STORED_IMAGE)
    gate = ReadGate(files)
    reads = reader()
    blocks: list[bytes] = []

    def read(chunk: int, coming: Sequence[Range]) -> None:
        begin, end = chunk * MIB, (chunk + 1) * MIB
        blocks.extend(bytes(block) for _, block in reads.read(files, begin, end, lambda: ([], coming)))

    thread = threading.Thread(target=read, args=(0, [(MIB, 2 * MIB)]))
    thread.start()
    both_inflight = gate.wait_for(2)
    gate.open()
    thread.join()
    read(1, [])
    assert both_inflight
    assert [stored_bytes(0, MIB), stored_bytes(MIB, 2 * MIB)] == blocks
    assert [0, 1] == sorted(files.chunks_read)


def test_obsolete_ranges_are_not_prefetched() -> None:
    """Their blocks are discarded unless another reader is about to use them, and the rest is never read."""
    files = Files(STORED_IMAGE)
    reads = reader(streams=2)
    parts = [(chunk * MIB, (chunk + 1) * MIB) for chunk in range(CHUNKS)]
    list(reads.read(files, *parts[0], lambda: ([], parts[1:3])))
    list(reads.read(files, *parts[4], lambda: ([parts[1]], [])))
    list(reads.read(files, *parts[1]))
    list(reads.read(files, *parts[2]))
    reads_by_chunk = [files.chunks_read.count(chunk) for chunk in range(5)]
    assert [1, 1] == reads_by_chunk[:2]
    assert reads_by_chunk[2] in (1, 2)
    assert [0, 1] == reads_by_chunk[3:]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for few blocks, a long range is still read completely, and so is an unexpected one."""
    monkeypatch.setattr(prefetcher, "BLOCK_BYTES", MIB // 4)
    files = Files(STORED_IMAGE)
    reads = StoragePrefetcher("files", StorageSettings(concurrency=2))
    ahead = [(MIB, SIZE)]
    stream = reads.read(files, 0, MIB, lambda: ([], ahead))
    first = [bytes(block) for _, block in stream]
    unexpected = [bytes(block) for _, block in reads.read(files, SIZE - MIB, SIZE, lambda: (ahead, []))]
    remaining = {offset: bytes(block) for offset, block in reads.read(files, *ahead[0])}
    assert MIB == sum(map(len, first))
    assert MIB == sum(map(len, unexpected))
    assert stored_bytes(MIB, SIZE) == b"".join(data for _, data in sorted(remaining.items()))


def test_a_closed_prefetcher_rejects_reads() -> None:
    """The error states that the storage was closed."""
    reads = reader()
    reads.close()
    with pytest.raises(SourceUnavailable, match="storage was closed"):
        next(reads.read(Files(STORED_IMAGE), 0, MIB))
