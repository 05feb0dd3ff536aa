"""Parallel reader that fills tensors from ranges of blobs.

The ranges are split into blocks of similar size, independent of the size of the tensors: adjacent small ones
are read together, large ones in parts, in the order of the blob, by several threads. Bytes for the CPU are
read in place, those for a GPU go through a `DeviceWriter`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from rfork.errors import StorageError
from rfork.image.staging import CPU, BufferPool, CudaCopier
from rfork.settings import StorageSettings
from rfork.storage.io.device_writer import DeviceWriter
from rfork.storage.io.extents import Extent, ExtentTable, ReadBlock, ReadPlan, block_bytes
from rfork.storage.io.gds import DirectStorage
from rfork.storage.io.prefetch import POLL_INTERVAL_S
from rfork.storage.local import LocalFile

__all__ = ["Extent", "fill"]

MIN_STREAMS = 2
SAMPLE_BYTES = 64 << 10
"""Bytes at the beginning, middle and end of a file's ranges that are looked up in the page cache."""
GRACE_S = 1.0
"""Seconds that reads in progress have to end after an error or an interrupt, before their blobs are closed."""


def fill(
    extents: Sequence[Extent],
    settings: StorageSettings,
    *,
    on_filled: Callable[[int], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill all extents; returns when every byte has arrived (also in GPU memory).

    `on_filled` is called with the index of each complete extent, concurrently on the reader threads: its work
    (digesting, forwarding) overlaps with the reads of others. `progress` is called with the bytes of each
    block, one call at a time. Data for the CPU needs no memory here, data for a GPU at most
    `settings.staging_bytes` bytes of staging, plus what stores allocate themselves (a local folder the same
    amount again, for direct reads).

    Raises the errors of the blobs and callbacks, after the reads in progress have ended. If, after a
    StorageError, reads of other blocks continue for long (they retry or hang), their blobs are closed, which
    ends all but reads from a disk that hangs: those are waited for until an interrupt. An interrupt is always
    raised within seconds: a read that hangs then keeps its memory, no callback is called for it, and the
    blobs are closed.
    """
    _FillJob(extents, settings, on_filled, progress).run()


def _max_streams(extents: ExtentTable, concurrency: int) -> int:
    """Return the number of threads to read with: no more than processors if all data seem to be in the page cache, from
    which reads are copies.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else concurrency
    if processors >= concurrency:
        return concurrency
    for number, blob in enumerate(extents.blobs):
        if not isinstance(blob, LocalFile):
            return concurrency
        requested = (extents.blob_of == number) & (extents.lengths > 0)
        if not requested.any():
            continue
        begin = int(extents.offsets[requested].min())
        end = int((extents.offsets + extents.lengths)[requested].max())
        length = min(SAMPLE_BYTES, end - begin)
        # The beginning alone proves nothing: reading a file's header also caches what follows it.
        for offset in (begin, (begin + end - length) // 2, end - length):
            if not blob.cached(offset, length):
                return concurrency
    return max(processors, MIN_STREAMS)


class _FillJob:
    """State of one `fill` call."""

    def __init__(
        self,
        extents: Sequence[Extent],
        settings: StorageSettings,
        on_filled: Callable[[int], None] | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        table = extents if isinstance(extents, ExtentTable) else ExtentTable.of(extents)
        self._extents = table
        self._on_filled = on_filled
        self._progress = progress
        total = int(table.lengths.sum())
        devices = set(table.devices) - {CPU}
        streams = _max_streams(table, settings.concurrency)
        size = block_bytes(total, streams, settings.staging_bytes)
        self._streams = min(streams, max(1, total // size + len(table)))
        self._copier = CudaCopier(devices) if devices else None
        self._staging = None if self._copier is None else BufferPool(settings.staging_bytes, size, self._copier.pinned)
        self._direct_storage = DirectStorage.find(settings) if devices else None
        if self._copier is not None and self._direct_storage is not None:
            self._copier.finish_earlier_work()  # GPUDirect Storage does not synchronise with streams
        self._plan = ReadPlan(table, size)
        self._blocks = self._plan.blocks()
        self._planning = threading.Lock()
        self._progress_lock = threading.Lock()
        self._left: dict[int, int] = {}
        """Missing bytes of extents that span several blocks."""
        self._changed = threading.Condition()
        self._running = self._ended = 0
        self._stopping = self._abandoned_reads = self._released = False
        self._errors: list[BaseException] = []

    def run(self) -> None:
        if self._on_filled is not None:
            for index in (self._extents.lengths == 0).nonzero()[0].tolist():
                self._on_filled(index)
        try:
            for _ in range(self._streams):
                # Daemon threads: a disk that hangs must not prevent an interrupted process from exiting.
                threading.Thread(target=self._serve, name="rfork-read", daemon=True).start()
            self._wait(lambda: self._stopping or self._ended == self._streams)
            self._stop(None)
        except BaseException:  # raised by a signal handler: wait for nothing that may hang
            self._stop(GRACE_S)
            raise
        finally:
            with self._changed:
                self._abandoned_reads = True
            self._release()
        if self._errors:
            raise self._errors[0]

    def _stop(self, timeout_s: float | None) -> None:
        """Start no more reads, and wait for those in progress, at most `timeout_s` seconds (None: forever)."""
        with self._changed:
            self._stopping = True
        # Threads are not joined, because an interrupt may come while one is being started. A thread like that
        # exits immediately.
        if self._wait(self._is_idle, GRACE_S):
            return
        if timeout_s is not None or any(isinstance(error, StorageError) for error in self._errors):
            for blob in self._extents.blobs:
                blob.close()
        self._wait(self._is_idle, timeout_s)

    def _is_idle(self) -> bool:
        return self._running == 0

    def _wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `done`, at most `timeout_s` seconds; return whether it is."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not done():
                # A signal that arrives just before an unbounded wait would not be handled.
                left = POLL_INTERVAL_S if until is None else until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, POLL_INTERVAL_S))
        return True

    def _release(self) -> None:
        """Release the resources of the reads, once, when none is in progress."""
        with self._changed:
            if self._running or self._released:
                return
            self._released = True
        if self._staging is not None:
            self._staging.close()
        if self._direct_storage is not None:
            self._direct_storage.close()

    def _serve(self) -> None:
        with self._changed:
            if self._stopping:
                return
            self._running += 1
        error: BaseException | None = None
        try:
            self._work()
        except BaseException as raised:  # re-raised by `run`
            error = raised
        with self._changed:
            if error is not None:
                self._errors.append(error)
                self._stopping = True
            self._running -= 1
            self._ended += 1
            self._changed.notify_all()
            abandoned_reads = self._abandoned_reads
        if abandoned_reads:
            self._release()

    def _work(self) -> None:
        landing = None
        if self._staging is not None and self._copier is not None:
            landing = DeviceWriter(
                self._plan, self._extents, self._staging, self._copier, self._direct_storage, self._filled
            )
        try:
            while (block := self._next()) is not None:
                if landing is not None and block.device.type != "cpu":
                    landing.load(block)
                else:
                    block.blob.read(block.begin, self._plan.host_views(block))
                    self._filled(block)
            if landing is not None and not self._stopping:
                landing.flush()
        finally:
            if landing is not None:
                landing.cancel()

    def _next(self) -> ReadBlock | None:
        with self._planning:
            return None if self._stopping else next(self._blocks, None)

    def _filled(self, block: ReadBlock) -> None:
        if self._abandoned_reads:
            return
        if self._progress is not None:
            with self._progress_lock:
                self._progress(block.wanted)
        if self._on_filled is not None:
            for index in self._mark_complete(block):
                self._on_filled(index)

    def _mark_complete(self, block: ReadBlock) -> list[int]:
        """Return the extents that this block completes."""
        complete, parts = self._plan.pieces_in(block)
        for index, arrived_bytes, length in parts:
            with self._progress_lock:
                left = self._left[index] = self._left.get(index, length) - arrived_bytes
            if not left:
                complete.append(index)
        return complete
