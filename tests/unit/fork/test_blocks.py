"""Reads of storage on threads that can be left behind."""

from __future__ import annotations

import threading
import time

import pytest

from rfork.errors import SourceGone, StorageError
from rfork.fork import blocks
from rfork.fork.blocks import Blocks
from rfork.image.chunks import MIB
from tests.unit.fork.fleet import CHUNKS, NEVER_S, Files, image

HELD = image(1)
SIZE = CHUNKS * MIB


def held(begin: int, end: int) -> bytes:
    with HELD.readable(begin, end) as views:
        return b"".join(views)


@pytest.mark.parametrize("block_bytes", [MIB, 5 * MIB // 2, 64 * MIB])
def test_blocks_come_in_order(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Whatever their size, they are the range, and the clock moves with them."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    reads = Blocks("files")
    before = time.monotonic()
    got = [(at, bytes(block)) for at, block in reads.read(Files(HELD), MIB, SIZE)]
    assert (held(MIB, SIZE), MIB) == (b"".join(block for _, block in got), got[0][0])
    assert (True, 0.0) == (before <= (reads.gave_at or 0.0), reads.idle_s(time.monotonic() + 9.0))


def test_what_the_storage_raises_is_raised_to_who_waits() -> None:
    """Blocks before it are given."""
    files = Files(HELD, fails_at=0)
    with pytest.raises(StorageError, match="broken"):
        list(Blocks("files").read(files, 0, SIZE))


def test_a_read_that_hangs_grows_old_and_can_be_left() -> None:
    """Whoever waits sees how long nothing came, and is told at once when the wait is over."""
    files, go_on, waits = Files(HELD), threading.Event(), threading.Event()

    def hang(chunk: int) -> bool:
        waits.set()
        return go_on.wait(NEVER_S)

    files.before_read = hang
    reads = Blocks("files")
    errors: list[type[Exception]] = []

    def read() -> None:
        try:
            list(reads.read(files, 0, MIB))
        except SourceGone as error:
            errors.append(type(error))

    thread = threading.Thread(target=read)
    thread.start()
    waits.wait(NEVER_S)
    idle_s = reads.idle_s(reads.advanced_at + 7.0)
    reads.close()
    thread.join()
    go_on.set()
    assert (7.0, [SourceGone], None) == (idle_s, errors, reads.gave_at)
