"""Tensors in the order in which their bytes arrive, for a caller that takes them one by one."""

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
"""Blocks that are read at once: while the last bytes of one come, the first of the next are asked for."""
PREFETCH_BLOCKS = 4
"""Blocks that are read, or wait for the caller."""
MIN_MEMORY = 16 << 20


class _ConsumerClosed(Exception):
    """The caller wants no more."""


class _TensorStream:
    """What several readers have read, for one who takes it; no reader is far ahead of that one."""

    def __init__(self, blocks: Iterator[TensorBlock], device: torch.device | str, settings: StorageSettings) -> None:
        self._blocks = blocks
        self._device = device
        self._settings = settings.model_copy(
            update={
                "streams": max(1, settings.concurrency // READERS),
                "memory": max(MIN_MEMORY, settings.staging_bytes // (2 * READERS)),
            }
        )
        self._changed = threading.Condition()
        self._ready: deque[tuple[TensorBlock, torch.Tensor]] = deque()
        self._error: BaseException | None = None
        self._readers = READERS
        self._stopped = False
        self._threads = [threading.Thread(target=self._run, name="rfork-stream", daemon=True) for _ in range(READERS)]

    def start(self) -> None:
        """Begin to read; whoever calls this calls `close`, also where it was interrupted."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the reads: those that hang are left behind, with the memory they write to."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        until = time.monotonic() + 2 * GRACE_S
        for thread in self._threads:
            if thread.is_alive():  # and not one whose start was interrupted
                thread.join(max(0.0, until - time.monotonic()))

    def next_block(self) -> tuple[TensorBlock, torch.Tensor] | None:
        """A block that is whole, waited for; None: there are no more. Raises what a reader raised."""
        with self._changed:
            while not self._ready and self._error is None and self._readers:
                # A signal that comes just before a wait is heard only after it.
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
        except BaseException as raised:  # raised where the tensors are taken
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
    """The tensors of blocks, in memory of their own, block by block as these are whole.

    Reads begin with the first tensor asked for; they have ended once the iterator is exhausted or closed,
    but where storage hangs. Raises what the reads raise.
    """
    with closing(_TensorStream(blocks, device, settings)) as arrivals:
        arrivals.start()
        while (arrived := arrivals.next_block()) is not None:
            with torch.no_grad():
                found = list(tensors_in(*arrived))
            del arrived  # memory is the tensors' alone
            yield from found
