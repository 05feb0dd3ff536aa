"""Reads of storage on threads that can be left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from rfork.errors import SourceUnavailable, StorageError
from rfork.image.chunks import MIB
from rfork.image.ranges import Range
from rfork.receiver import storage_prefetch
from rfork.receiver.storage_prefetch import StoragePrefetcher
from rfork.settings import StorageSettings
from tests.unit.receiver.fleet import CHUNKS, NEVER_S, Files, image

STORED_IMAGE = image(1)
SIZE = CHUNKS * MIB


def stored_bytes(begin: int, end: int) -> bytes:
    with STORED_IMAGE.readable(begin, end) as views:
        return b"".join(views)


def reader(streams: int = 8) -> StoragePrefetcher:
    return StoragePrefetcher("files", StorageSettings(concurrency=streams))


class ReadGate:
    """Holds reads of the files up, from some chunk on; `waiting` says how many do."""

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
def test_the_blocks_are_the_range(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Whatever their size, and the order in which they come; and the clock moves with them."""
    monkeypatch.setattr(storage_prefetch, "BLOCK_BYTES", block_bytes)
    reads = reader()
    before = time.monotonic()
    got = dict(sorted((at, bytes(block)) for at, block in reads.read(Files(STORED_IMAGE), MIB, SIZE)))
    assert (stored_bytes(MIB, SIZE), MIB) == (b"".join(got.values()), min(got))
    assert (True, 0.0) == (before <= (reads.last_block_at or 0.0), reads.idle_seconds(time.monotonic() + 9.0))


def test_what_the_storage_raises_is_raised_to_who_waits() -> None:
    """Blocks before it are given."""
    files = Files(STORED_IMAGE, fails_at=0)
    with pytest.raises(StorageError, match="broken"):
        list(reader().read(files, 0, SIZE))


def test_a_read_that_hangs_grows_old_and_can_be_left() -> None:
    """Whoever waits sees how long nothing came, and is told at once when the wait is over."""
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
    assert ([SourceUnavailable], None) == (errors, reads.last_block_at)


def test_what_comes_next_is_read_meanwhile() -> None:
    """While the first chunk is waited for the second is under way, and it is read but once."""
    files = Files(STORED_IMAGE)
    gate = ReadGate(files)
    reads = reader()
    got: list[bytes] = []

    def read(chunk: int, coming: Sequence[Range]) -> None:
        begin, end = chunk * MIB, (chunk + 1) * MIB
        got.extend(bytes(block) for _, block in reads.read(files, begin, end, lambda: ([], coming)))

    thread = threading.Thread(target=read, args=(0, [(MIB, 2 * MIB)]))
    thread.start()
    both_inflight = gate.wait_for(2)
    gate.open()
    thread.join()
    read(1, [])
    assert (True, [stored_bytes(0, MIB), stored_bytes(MIB, 2 * MIB)], [0, 1]) == (
        both_inflight,
        got,
        sorted(files.chunks_read),
    )


def test_what_is_not_wanted_any_more_is_not_read_ahead() -> None:
    """What was read of it is thrown away, but for what somebody is about to take; the rest is never read."""
    files = Files(STORED_IMAGE)
    reads = reader(streams=2)
    parts = [(chunk * MIB, (chunk + 1) * MIB) for chunk in range(CHUNKS)]
    list(reads.read(files, *parts[0], lambda: ([], parts[1:3])))
    list(reads.read(files, *parts[4], lambda: ([parts[1]], [])))
    list(reads.read(files, *parts[1]))
    list(reads.read(files, *parts[2]))
    counts = [files.chunks_read.count(chunk) for chunk in range(5)]
    assert ([1, 1, 0, 1], True) == ([*counts[:2], counts[3], counts[4]], counts[2] in (1, 2))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few blocks, all of a long range come through it, and so does what nobody expected."""
    monkeypatch.setattr(storage_prefetch, "BLOCK_BYTES", MIB // 4)
    files = Files(STORED_IMAGE)
    reads = StoragePrefetcher("files", StorageSettings(concurrency=2))
    ahead = [(MIB, SIZE)]
    stream = reads.read(files, 0, MIB, lambda: ([], ahead))
    first = [bytes(block) for _, block in stream]
    unexpected = [bytes(block) for _, block in reads.read(files, SIZE - MIB, SIZE, lambda: (ahead, []))]
    rest = {at: bytes(block) for at, block in reads.read(files, *ahead[0])}
    assert (MIB, MIB, stored_bytes(MIB, SIZE)) == (
        sum(map(len, first)),
        sum(map(len, unexpected)),
        b"".join(data for _, data in sorted(rest.items())),
    )


def test_nothing_is_given_after_the_end() -> None:
    """Who reads once it was closed is told so."""
    reads = reader()
    reads.close()
    with pytest.raises(SourceUnavailable, match="read no more"):
        next(reads.read(Files(STORED_IMAGE), 0, MIB))
