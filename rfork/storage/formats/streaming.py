"""Streams tensors in the order in which their bytes arrive, for a caller that consumes them one by one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing

import torch

from rfork.settings import StorageSettings
from rfork.storage.formats.tensor_blocks import TensorBlock, tensors_in
from rfork.storage.io.prefetch import POLL_INTERVAL_S
from rfork.storage.io.reader import GRACE_S, fill

READERS = 2
"""Blocks read concurrently: the first requests of the next block overlap with the last of the current one."""
PREFETCH_BLOCKS = 4
"""Blocks that are being read or wait for the caller."""
MIN_MEMORY = 16 << 20


class _ConsumerClosed(Exception):
    """The caller closed the stream."""


class _TensorStream:
    """Queue between reader threads and one consumer; bounds how far the readers are ahead."""

    def __init__(self, blocks: Iterator[TensorBlock], device: torch.device | str, settings: StorageSettings) -> None:
        self._blocks = blocks
        self._device = device
        self._settings = settings.model_copy(
            update={
                "concurrency": max(1, settings.concurrency // READERS),
                "staging_bytes": max(MIN_MEMORY, settings.staging_bytes // (2 * READERS)),
            }
        )
        self._changed = threading.Condition()
        self._ready: deque[tuple[TensorBlock, torch.Tensor]] = deque()
        self._error: BaseException | None = None
        self._readers = READERS
        self._stopped = False
        self._threads = [threading.Thread(target=self._run, name="rfork-stream", daemon=True) for _ in range(READERS)]

    def start(self) -> None:
        """Start reading. The caller must call `close`, even if this call is interrupted."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop reading. Reads that hang are abandoned together with their memory."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        until = time.monotonic() + 2 * GRACE_S
        for thread in self._threads:
            if thread.is_alive():  # not if its start was interrupted
                thread.join(max(0.0, until - time.monotonic()))

    def next_block(self) -> tuple[TensorBlock, torch.Tensor] | None:
        """Wait for a complete block; None at the end. Raises a reader's error."""
        with self._changed:
            while not self._ready and self._error is None and self._readers:
                # A signal that arrives just before an unbounded wait would not be handled.
                self._changed.wait(POLL_INTERVAL_S)
            if self._error is not None:
                raise self._error
            if not self._ready:
                return None
            self._changed.notify_all()
            return self._ready.popleft()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while (block := self._next()) is not None:
                extent = block.extent(self._device)
                fill([extent], self._settings, progress=self._check)
                with self._changed:
                    self._ready.append((block, extent.into))
                    self._changed.notify_all()
        except _ConsumerClosed:
            pass
        except BaseException as raised:  # re-raised in next_block()
            error = raised
        with self._changed:
            self._error = self._error or error
            self._readers -= 1
            self._changed.notify_all()

    def _next(self) -> TensorBlock | None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) <= PREFETCH_BLOCKS - READERS - 1 or self._stopped)
            if self._stopped or self._error is not None:
                return None
            return next(self._blocks, None)

    def _check(self, _: int) -> None:
        if self._stopped:
            raise _ConsumerClosed


def stream_tensors(
    blocks: Iterator[TensorBlock], device: torch.device | str, settings: StorageSettings
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors of blocks, each block in its own memory, as blocks complete.

    Reading begins with the first tensor requested and has ended when the iterator is exhausted or closed,
    unless storage hangs. Raises the errors of the reads.
    """
    with closing(_TensorStream(blocks, device, settings)) as arrivals:
        arrivals.start()
        while (arrived := arrivals.next_block()) is not None:
            with torch.no_grad():
                found = list(tensors_in(*arrived))
            del arrived  # only the tensors keep the memory alive
            yield from found
