"""End of a `fill` whose reads do not end, after an interrupt or an error."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from rfork.errors import StorageChanged, StorageError
from rfork.settings import StorageSettings
from rfork.storage.formats import tensor_blocks
from rfork.storage.formats.relayout import fill_converted
from rfork.storage.formats.safetensors_file import TensorLocation
from rfork.storage.formats.tensor_blocks import TensorBlock
from rfork.storage.io import reader_threads
from rfork.storage.io.extents import MAX_GAP_BYTES
from rfork.storage.io.reader import Extent, fill

NEVER_S = 60.0
SIZE = 100
SETTINGS = StorageSettings(concurrency=2)


class HangingBlob:
    """Blob whose reads hang until they are released or, with `ends_closed`, until it is closed."""

    version = None
    size = 4 * MAX_GAP_BYTES

    def __init__(self, *, ends_closed: bool = False, before: Callable[[int], None] | None = None) -> None:
        self.uri = "s3://bucket/hanging"
        self.resumed, self.closed, self.reads = threading.Event(), threading.Event(), threading.Semaphore(0)
        self._ends_closed = ends_closed
        self.before = before

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        self.reads.release()
        if self.before is not None:
            self.before(offset)
        assert self.resumed.wait(NEVER_S)
        if self.closed.is_set() and self._ends_closed:
            raise StorageError("closed")
        for view in into:
            view[:] = b"\x07" * view.nbytes

    def close(self) -> None:
        self.closed.set()
        if self._ends_closed:
            self.resumed.set()


@contextmanager
def interrupted_in(blob: HangingBlob) -> Iterator[None]:
    """Send Ctrl-C once a read of the blob is running."""

    def on_signal(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt() -> None:
        if blob.reads.acquire(timeout=NEVER_S):
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, on_signal)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, handler)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no read that does not end immediately."""
    monkeypatch.setattr(reader_threads, "GRACE_S", 0.01)


def read_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.is_alive() and thread.name == "rfork-read"]


def all_ended(threads: Sequence[threading.Thread]) -> bool:
    """Join the threads; return True if all have ended."""
    for thread in threads:
        thread.join(NEVER_S)
    return not any(thread.is_alive() for thread in threads)


def test_an_interrupt_does_not_wait_for_a_hanging_disk() -> None:
    """It is raised immediately; the read keeps its memory until it ends, and is not reported then."""
    blob, reported = HangingBlob(), list[int]()
    into = torch.zeros(SIZE, dtype=torch.uint8)
    kept = weakref.ref(into.untyped_storage())
    with interrupted_in(blob), pytest.raises(KeyboardInterrupt):
        fill([Extent(blob, 0, into)], SETTINGS, on_filled=reported.append, progress=reported.append)
    threads = read_threads()
    del into
    gc.collect()
    assert blob.closed.is_set()
    assert 1 == len(threads)
    assert kept() is not None
    blob.resumed.set()
    assert all_ended(threads)
    assert [] == reported


def test_an_interrupt_ends_abortable_reads() -> None:
    """If closing a blob ends its reads, none runs when the interrupt is raised."""
    blob = HangingBlob(ends_closed=True)
    extents = [Extent(blob, at * 2 * MAX_GAP_BYTES, torch.empty(SIZE, dtype=torch.uint8)) for at in range(2)]
    with interrupted_in(blob), pytest.raises(KeyboardInterrupt):
        fill(extents, SETTINGS)
    assert all_ended(read_threads())
    assert blob.closed.is_set()


def failing_first(other_read: threading.Event, error: Exception) -> Callable[[int], None]:
    """Return a blob whose first read fails once another one is running."""

    def before(offset: int) -> None:
        if offset == 0:
            assert other_read.wait(NEVER_S)
            raise error
        other_read.set()

    return before


def test_an_error_ends_retrying_reads() -> None:
    """The first error does not wait until other streams have used all their attempts."""
    blob = HangingBlob(ends_closed=True, before=failing_first(threading.Event(), StorageChanged("replaced")))
    extents = [Extent(blob, at * 2 * MAX_GAP_BYTES, torch.empty(SIZE, dtype=torch.uint8)) for at in range(2)]
    with pytest.raises(StorageChanged, match="replaced"):
        fill(extents, SETTINGS)
    assert blob.closed.is_set()
    assert all_ended(read_threads())


def test_an_error_of_a_callback_closes_nothing() -> None:
    """The blobs are intact, so their owner may continue to read; running reads end normally."""
    blob, failed, both = HangingBlob(), threading.Event(), threading.Barrier(2)

    def linger(offset: int) -> None:
        both.wait(NEVER_S)
        if offset:
            assert failed.wait(NEVER_S)
            blob.closed.wait(0.2)  # much longer than the other reads are waited for

    def fail(_: int) -> None:
        failed.set()
        raise ZeroDivisionError

    blob.resumed.set()
    blob.before = linger
    extents = [Extent(blob, at * 2 * MAX_GAP_BYTES, torch.empty(SIZE, dtype=torch.uint8)) for at in range(2)]
    with pytest.raises(ZeroDivisionError):
        fill(extents, SETTINGS, progress=fail)
    assert not blob.closed.is_set()


def test_an_interrupt_ends_a_hanging_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer of the next tensor gets the interrupt, and the reads are abandoned."""
    monkeypatch.setattr(tensor_blocks, "GRACE_S", 0.01)
    blob = HangingBlob()
    location = TensorLocation("a", blob, 0, SIZE, torch.uint8, (SIZE,))
    stream = tensor_blocks.stream_tensors(iter([TensorBlock(0, SIZE, [location])]), "cpu", SETTINGS)
    with interrupted_in(blob), pytest.raises(KeyboardInterrupt):
        next(stream)
    threads = [
        thread
        for thread in threading.enumerate()
        if thread.is_alive() and thread.name in ("rfork-read", "rfork-stream")
    ]
    blob.resumed.set()
    assert all_ended(threads)


def test_an_interrupt_ends_a_conversion() -> None:
    """Bytes that arrive after the interrupt are not converted into the tensor, which belongs to the caller."""
    blob, target = HangingBlob(), torch.zeros(SIZE)
    location = TensorLocation("a", blob, 0, SIZE, torch.uint8, (SIZE,))
    with interrupted_in(blob), pytest.raises(KeyboardInterrupt):
        fill_converted([(location, target)], 0, SETTINGS)
    threads = read_threads()
    blob.resumed.set()
    assert all_ended(threads)
    assert blob.closed.is_set()
    assert not target.any()
