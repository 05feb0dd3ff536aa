"""Parallel reader that fills tensors from ranges of blobs.

The ranges are split into blocks of similar size, independent of the size of the tensors: adjacent small ones
are read together, large ones in parts, in the order of the blob, by several threads. Bytes for the CPU are
read in place, those for a GPU go through a `DeviceWriter`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from rfork.image.staging import CPU, BufferPool, CudaCopier
from rfork.settings import StorageSettings
from rfork.storage.io.device_writer import DeviceWriter
from rfork.storage.io.extents import Extent, ExtentTable, ReadBlock, ReadPlan, block_bytes
from rfork.storage.io.gds import DirectStorage
from rfork.storage.io.reader_threads import ReaderThreads
from rfork.storage.local import LocalFile

__all__ = ["Extent", "fill"]

MIN_STREAMS = 2
SAMPLE_BYTES = 64 << 10
"""Bytes at the beginning, middle and end of a file's ranges that are looked up in the page cache."""


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

    Raises the errors of the blobs and callbacks, after the reads in progress have ended; see `ReaderThreads` for reads
    that hang, and for interrupts. No callback is called for a read that still runs when an interrupt is raised.
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
        self._threads = ReaderThreads(self._plan.blocks(), table.blobs)
        self._progress_lock = threading.Lock()
        self._left: dict[int, int] = {}
        """Missing bytes of extents that span several blocks."""

    def run(self) -> None:
        if self._on_filled is not None:
            for index in (self._extents.lengths == 0).nonzero()[0].tolist():
                self._on_filled(index)
        self._threads.run(self._streams, self._work, self._release)

    def _release(self) -> None:
        """Release the resources of the reads."""
        if self._staging is not None:
            self._staging.close()
        if self._direct_storage is not None:
            self._direct_storage.close()

    def _work(self) -> None:
        landing = None
        if self._staging is not None and self._copier is not None:
            landing = DeviceWriter(
                self._plan, self._extents, self._staging, self._copier, self._direct_storage, self._filled
            )
        try:
            while (block := self._threads.next()) is not None:
                if landing is not None and block.device.type != "cpu":
                    landing.load(block)
                else:
                    block.blob.read(block.begin, self._plan.host_views(block))
                    self._filled(block)
            if landing is not None and not self._threads.stopping:
                landing.flush()
        finally:
            if landing is not None:
                landing.cancel()

    def _filled(self, block: ReadBlock) -> None:
        if self._threads.abandoned:
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
