"""Staging buffers."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from rfork.image.staging import BufferPool, allocate_host

MIB = 1 << 20
NEVER_S = 60.0


@pytest.mark.parametrize("nbytes", [1, 100, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3])
@pytest.mark.parametrize("offset", [0, 1, 511, 4096, 123_456_789])
def test_new_memory_is_aligned_like_the_file(nbytes: int, offset: int) -> None:
    """Its address equals the offset modulo 4096, and all of it is writable."""
    memory = allocate_host(nbytes, offset)
    memory.fill_(7)
    assert nbytes == memory.numel()
    assert torch.uint8 == memory.dtype
    assert offset % 4096 == memory.data_ptr() % 4096


def test_memory_of_zero_bytes_is_a_tensor() -> None:
    """Memory of zero bytes is a tensor too."""
    assert 0 == allocate_host(0, 77).numel()


def test_new_memory_lives_as_long_as_its_views() -> None:
    """A view of the memory keeps the mapping."""
    view = allocate_host(4 * MIB)[MIB : MIB + 3]
    view.fill_(5)
    assert [5, 5, 5] == view.tolist()


class CountingAllocator:
    """Allocator that counts its buffers."""

    def __init__(self) -> None:
        self.alive = self.max_alive = 0

    def make(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.alive += 1
        self.max_alive = max(self.max_alive, self.alive)
        weakref.finalize(buffer, self._free)
        return buffer

    def _free(self) -> None:
        self.alive -= 1


def test_the_limit_is_never_exceeded() -> None:
    """Many threads share few buffers: each gets one, and no more are allocated than fit."""
    allocator = CountingAllocator()
    staging = BufferPool(3 * MIB, MIB, allocator.make)
    at_once: list[int] = []
    lock, inside = threading.Lock(), set[int]()

    def use(number: int) -> None:
        for _ in range(50):
            with staging.lease() as buffer:
                with lock:
                    assert buffer.data_ptr() not in inside
                    inside.add(buffer.data_ptr())
                    at_once.append(len(inside))
                buffer.fill_(number)
                with lock:
                    inside.remove(buffer.data_ptr())

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NEVER_S)
    staging.close()
    assert 400 == len(at_once)
    assert max(at_once) <= 3
    assert allocator.max_alive <= 3
    assert 0 == allocator.alive


def test_a_limit_below_one_buffer_allows_one_small_buffer() -> None:
    """There is always one buffer, not larger than the limit."""
    staging = BufferPool(MIB, 16 * MIB)
    with staging.lease() as buffer:
        assert MIB == buffer.numel()
        assert staging.try_acquire() is None


def test_a_released_buffer_is_reused() -> None:
    """Memory that was touched once is reused, so that its pages are not faulted in again."""
    staging = BufferPool(4 * MIB, MIB)
    with staging.lease() as first:
        pass
    with staging.lease() as second:
        assert first.data_ptr() == second.data_ptr()


def test_a_released_buffer_wakes_a_waiting_thread() -> None:
    """A released buffer goes to a thread that waits for one."""
    staging, got = BufferPool(MIB, MIB), threading.Event()
    buffer = staging.acquire()

    def wait() -> None:
        staging.release(staging.acquire())
        got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    staging.release(buffer)
    thread.join(NEVER_S)
    assert got.is_set()


def test_a_failed_allocation_is_not_counted() -> None:
    """A buffer that could not be allocated is not counted, so the next one may succeed."""
    fails = [True]

    def make(nbytes: int) -> torch.Tensor:
        if fails.pop():
            raise RuntimeError("no memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    staging = BufferPool(MIB, MIB, make)
    with pytest.raises(RuntimeError, match="no memory"):
        staging.acquire()
    fails.append(False)
    assert MIB == staging.acquire().numel()


def test_a_closed_pool_allocates_again() -> None:
    """`close` frees the memory; a later request gets a new buffer."""
    allocator = CountingAllocator()
    staging = BufferPool(MIB, MIB, allocator.make)
    with staging.lease():
        pass
    staging.close()
    closed = allocator.alive
    with staging.lease():
        pass
    assert 0 == closed
    assert 1 == allocator.alive
