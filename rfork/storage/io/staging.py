"""Memory that bytes pass through, and memory that they come to.

Huge pages decide the speed of a disk that writes into memory by itself: 2.0 GB/s into pages of 4 KiB and
3.7 GB/s into those of 2 MiB were measured on one disk.
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
"""The size of most reads: more is no faster, and less is slower on disks that stripe."""
BUFFER_ALIGNMENT = 4096
"""What every device's reads past the page cache may be aligned to."""


def allocate_host(nbytes: int, like_offset: int = 0) -> torch.Tensor:
    """New memory of undefined content (uint8, 1-D, CPU), in huge pages once it is written to.

    Its address is `like_offset` modulo 4096: what lies there in a file can be read into it past the page
    cache, without a copy. No page of it is there before the first write.
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
    """A bounded pool of buffers of one size, each made when it is first wanted. Thread-safe.

    Who takes one buffer at a time, and waits for nothing while holding it, never waits for ever.
    """

    def __init__(
        self,
        memory: int,
        buffer_bytes: int = BUFFER_BYTES,
        make: Callable[[int], torch.Tensor] = allocate_host,
        free: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """At most `memory` bytes, but one buffer at least; `make` gives the memory of one, `free` ends it."""
        self.buffer_bytes = min(buffer_bytes, memory)
        self._make = make
        self._free = free
        self._left = memory // self.buffer_bytes
        self._spare: list[torch.Tensor] = []
        self._changed = threading.Condition()

    def acquire(self) -> torch.Tensor:
        """A buffer (uint8, 1-D), to be given back; waits while all are in use."""
        with self._changed:
            self._changed.wait_for(lambda: self._spare or self._left)
            return self._pop_or_allocate()

    def try_acquire(self) -> torch.Tensor | None:
        """The same, but None where all are in use."""
        with self._changed:
            return self._pop_or_allocate() if self._spare or self._left else None

    def release(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that nobody uses any more."""
        with self._changed:
            self._spare.append(buffer)
            self._changed.notify()

    @contextmanager
    def lease(self) -> Iterator[torch.Tensor]:
        """A buffer for the length of the block."""
        buffer = self.acquire()
        try:
            yield buffer
        finally:
            self.release(buffer)

    def close(self) -> None:
        """Give the memory of buffers that are not in use back to the system; others may be made again."""
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
