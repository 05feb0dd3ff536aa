"""Memory that bytes pass through."""

from __future__ import annotations

import threading

import pytest
import torch

from rfork.storage.io.staging import BufferPool, allocate_host

MIB = 1 << 20
NEVER_S = 60.0


@pytest.mark.parametrize("nbytes", [1, 100, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3])
@pytest.mark.parametrize("offset", [0, 1, 511, 4096, 123_456_789])
def test_fresh_memory_lies_like_the_file(nbytes: int, offset: int) -> None:
    """Its address and the offset are the same modulo 4096, and all of it can be written."""
    memory = allocate_host(nbytes, offset)
    memory.fill_(7)
    assert (nbytes, torch.uint8, offset % 4096) == (memory.numel(), memory.dtype, memory.data_ptr() % 4096)


def test_no_memory() -> None:
    """Nothing is a tensor too."""
    assert 0 == allocate_host(0, 77).numel()


def test_fresh_memory_lives_as_long_as_its_views() -> None:
    """A view of it keeps the mapping."""
    view = allocate_host(4 * MIB)[MIB : MIB + 3]
    view.fill_(5)
    assert [5, 5, 5] == view.tolist()


class CountingAllocator:
    """Makes buffers, and knows how many there are."""

    def __init__(self) -> None:
        self.alive = self.max_alive = 0

    def make(self, nbytes: int) -> torch.Tensor:
        self.alive += 1
        self.max_alive = max(self.max_alive, self.alive)
        return torch.empty(nbytes, dtype=torch.uint8)

    def free(self, _: torch.Tensor) -> None:
        self.alive -= 1


def test_the_bound_is_never_passed() -> None:
    """Many threads share few buffers: each gets one in the end, and no more are made than fit."""
    allocator = CountingAllocator()
    staging = BufferPool(3 * MIB, MIB, allocator.make, allocator.free)
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
    assert (400, True, True, 0) == (
        len(at_once),
        max(at_once) <= 3,
        allocator.max_alive <= 3,
        allocator.alive,
    )


def test_a_bound_below_one_buffer() -> None:
    """There is always one, and it is no larger than the bound."""
    staging = BufferPool(MIB, 16 * MIB)
    with staging.lease() as buffer:
        assert (MIB, None) == (buffer.numel(), staging.try_acquire())


def test_a_buffer_given_back_is_used_again() -> None:
    """Memory that was touched once is not touched for the first time again."""
    staging = BufferPool(4 * MIB, MIB)
    with staging.lease() as first:
        pass
    with staging.lease() as second:
        assert first.data_ptr() == second.data_ptr()


def test_who_waits_is_woken() -> None:
    """A buffer that is given back goes to a thread that waits for one."""
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


def test_memory_that_cannot_be_had() -> None:
    """A buffer that could not be made is not counted: the next one may succeed."""
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


def test_a_closed_pool_makes_buffers_anew() -> None:
    """`close` gives memory back; whoever comes later gets some all the same."""
    allocator = CountingAllocator()
    staging = BufferPool(MIB, MIB, allocator.make, allocator.free)
    with staging.lease():
        pass
    staging.close()
    closed = allocator.alive
    with staging.lease():
        pass
    assert (0, 1) == (closed, allocator.alive)
