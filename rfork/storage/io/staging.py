"""Staging buffers and page-aligned destination memory.

Page size determines the speed of DMA from a disk: on one disk, 2.0 GB/s into pages of 4 KiB and 3.7 GB/s into
pages of 2 MiB were measured.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rfork.image.host_memory import HUGE_PAGE, advise_huge_pages

BUFFER_BYTES = 16 << 20
"""Size of most reads: larger is not faster, and smaller is slower on striped disks."""
BUFFER_ALIGNMENT = 4096
"""Sufficient alignment for direct reads on every device."""


def allocate_host(nbytes: int, like_offset: int = 0) -> torch.Tensor:
    """Allocate uninitialised memory (uint8, 1-D, CPU), backed by huge pages when it is written to.

    Its address equals `like_offset` modulo 4096, so that data at that file offset can be read directly past
    the page cache, without a copy. No page is allocated before the first write.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if nbytes < HUGE_PAGE:
        padded = torch.empty(nbytes + BUFFER_ALIGNMENT, dtype=torch.uint8)
        begin = (like_offset - padded.data_ptr()) % BUFFER_ALIGNMENT
        return padded[begin : begin + nbytes]
    mapping = mmap.mmap(-1, nbytes + 2 * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    begin = -address % HUGE_PAGE + like_offset % BUFFER_ALIGNMENT
    advise_huge_pages(address, len(mapping))
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=begin)


class BufferPool:
    """Bounded pool of equally sized buffers, allocated on first use. Thread-safe.

    A thread that uses one buffer at a time, and waits for nothing meanwhile, cannot cause a deadlock.
    """

    def __init__(
        self,
        memory: int,
        buffer_bytes: int = BUFFER_BYTES,
        make: Callable[[int], torch.Tensor] = allocate_host,
        free: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """At most `memory` bytes, but at least one buffer; `make` allocates a buffer, `free` releases it."""
        self.buffer_bytes = min(buffer_bytes, memory)
        self._make = make
        self._free = free
        self._left = memory // self.buffer_bytes
        self._spare: list[torch.Tensor] = []
        self._changed = threading.Condition()

    def acquire(self) -> torch.Tensor:
        """Return a buffer (uint8, 1-D) that must be released; waits while all are in use."""
        with self._changed:
            self._changed.wait_for(lambda: self._spare or self._left)
            return self._pop_or_allocate()

    def try_acquire(self) -> torch.Tensor | None:
        """Like `acquire`, but return None while all are in use."""
        with self._changed:
            return self._pop_or_allocate() if self._spare or self._left else None

    def release(self, buffer: torch.Tensor) -> None:
        """Return an unused buffer to the pool."""
        with self._changed:
            self._spare.append(buffer)
            self._changed.notify()

    @contextmanager
    def lease(self) -> Iterator[torch.Tensor]:
        """Yield a buffer for the duration of the block."""
        buffer = self.acquire()
        try:
            yield buffer
        finally:
            self.release(buffer)

    def close(self) -> None:
        """Free the memory of unused buffers; new ones may be allocated later."""
        with self._changed:
            spare, self._spare = self._spare, []
            self._left += len(spare)
            self._changed.notify_all()
        if self._free is not None:
            for buffer in spare:
                self._free(buffer)

    def _pop_or_allocate(self) -> torch.Tensor:
        if self._spare:
            return self._spare.pop()
        buffer = self._make(self.buffer_bytes)
        self._left -= 1
        return buffer
