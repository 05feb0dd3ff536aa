"""Many ranges of blobs into memory at once: the one engine that fills tensors from storage.

What comes in is cut into blocks of like size, whatever the size of the tensors: small ones that lie side
by side in their blob are read together, large ones in parts, in the order of the blob, by several threads.
Bytes for the CPU are read straight into their places, those for a GPU by way of `landing`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rfork.errors import StorageError
from rfork.settings import StorageSettings
from rfork.storage.io.cuda import CudaBlockCopier, pinned_staging
from rfork.storage.io.device_writer import DeviceWriter
from rfork.storage.io.extents import Extent, ReadBlock, ReadPlan, block_bytes
from rfork.storage.io.prefetch import POLL_INTERVAL_S

__all__ = ["Extent", "fill"]

GRACE_S = 1.0
"""Seconds that reads under way have to end by themselves, after an error or an interrupt."""


def fill(
    extents: Sequence[Extent],
    settings: StorageSettings,
    *,
    on_filled: Callable[[int], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill all extents; returns once every byte is there (of a GPU's memory too).

    `on_filled` is told the index of each extent that is whole, on the engine's threads, several at once:
    what it does (digesting, giving onwards) overlaps with the reads of others. `progress` is told the bytes
    of each block, one call at a time. What comes to the CPU takes no memory here, what comes to a GPU at most
    `settings.memory` bytes of staging; what stores take of their own (a folder as much again, for reads past
    the page cache) is besides.

    Raises what the blobs raise, or what a callback raises; reads under way have ended by then. Where those of
    other blocks go on for long after a StorageError (they try again, or hang), their blobs are closed, which
    ends them but for a disk that hangs: that is waited for until somebody interrupts. An interrupt is raised
    within seconds, even so: a read that hangs then keeps the memory that it writes to, nobody is told of
    it any more, and the blobs are closed.
    """
    _FillJob(extents, settings, on_filled, progress).run()


class _FillJob:
    """One call of `fill`."""

    def __init__(
        self,
        extents: Sequence[Extent],
        settings: StorageSettings,
        on_filled: Callable[[int], None] | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._extents = extents
        self._on_filled = on_filled
        self._progress = progress
        total = sum(extent.into.nbytes for extent in extents)
        devices = {extent.into.device for extent in extents if not extent.into.is_cpu}
        size = block_bytes(total, settings.concurrency, settings.staging_bytes)
        self._streams = min(settings.concurrency, max(1, total // size + len(extents)))
        self._staging = pinned_staging(settings.staging_bytes, size) if devices else None
        self._copier = CudaBlockCopier(devices, settings) if devices else None
        self._plan = ReadPlan(extents, size)
        self._blocks = self._plan.blocks()
        self._planning = threading.Lock()
        self._progress_lock = threading.Lock()
        self._left: dict[int, int] = {}
        """Bytes that still lack, of extents that are in several blocks."""
        self._changed = threading.Condition()
        self._running = self._ended = 0
        self._stopping = self._abandoned_reads = self._released = False
        self._errors: list[BaseException] = []

    def run(self) -> None:
        for index, extent in enumerate(self._extents):
            if not extent.into.nbytes and self._on_filled is not None:
                self._on_filled(index)
        try:
            for _ in range(self._streams):
                # Daemons: a disk that hangs must not keep a process that was interrupted from ending.
                threading.Thread(target=self._serve, name="rfork-read", daemon=True).start()
            self._wait(lambda: self._stopping or self._ended == self._streams)
            self._stop(None)
        except BaseException:  # what a signal raised: it waits for nothing that may hang
            self._stop(GRACE_S)
            raise
        finally:
            with self._changed:
                self._abandoned_reads = True
            self._release()
        if self._errors:
            raise self._errors[0]

    def _stop(self, timeout_s: float | None) -> None:
        """Begin no more reads, and wait for those under way: for ever, or for so many seconds."""
        with self._changed:
            self._stopping = True
        # Not joined: an interrupt may have come while one was started. It ends before it begins.
        if self._wait(self._is_idle, GRACE_S):
            return
        if timeout_s is not None or any(isinstance(error, StorageError) for error in self._errors):
            for blob in {id(extent.blob): extent.blob for extent in self._extents}.values():
                blob.close()
        self._wait(self._is_idle, timeout_s)

    def _is_idle(self) -> bool:
        return self._running == 0

    def _wait(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `done`, for so many seconds at most; whether it is."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not done():
                # A signal that comes just before a wait is heard only after it.
                left = POLL_INTERVAL_S if until is None else until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, POLL_INTERVAL_S))
        return True

    def _release(self) -> None:
        """Give back what reads needed, once, when none is under way."""
        with self._changed:
            if self._running or self._released:
                return
            self._released = True
        if self._staging is not None:
            self._staging.close()
        if self._copier is not None:
            self._copier.close()

    def _serve(self) -> None:
        with self._changed:
            if self._stopping:
                return
            self._running += 1
        error: BaseException | None = None
        try:
            self._work()
        except BaseException as raised:  # raised again by `run`
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
            landing = DeviceWriter(self._plan, self._extents, self._staging, self._copier, self._filled)
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
        """The extents that are whole with this block."""
        complete, parts = self._plan.pieces_in(block)
        for index, arrived_bytes, length in parts:
            with self._progress_lock:
                left = self._left[index] = self._left.get(index, length) - arrived_bytes
            if not left:
                complete.append(index)
        return complete
