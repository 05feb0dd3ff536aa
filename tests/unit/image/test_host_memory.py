"""Copies from a block of host memory to views, and allocation of the pages of new memory."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from rfork.image.capture import image_from_tensors
from rfork.image.host_memory import (
    MADV_POPULATE_WRITE,
    MIN_POPULATED_BYTES,
    SMALL_COPY_BYTES,
    copy_block,
    populate,
)


@pytest.mark.parametrize(
    "sizes",
    [
        (5, 0, 7),
        (SMALL_COPY_BYTES, 3),
        (SMALL_COPY_BYTES + 1, SMALL_COPY_BYTES - 1, 2 * SMALL_COPY_BYTES),
        (0,),
        (),
    ],
)
def test_views_receive_the_bytes_of_a_block_in_order(sizes: tuple[int, ...]) -> None:
    """This holds for small, large and empty views."""
    block = bytearray(number % 251 for number in range(sum(sizes)))
    views = [bytearray(size) for size in sizes]
    copy_block(memoryview(block), [memoryview(view) for view in views])
    assert bytes(block) == b"".join(views)


@pytest.mark.parametrize("size", [10, 2 * SMALL_COPY_BYTES])
def test_a_short_block_fills_no_view_partially(size: int) -> None:
    """Old bytes in a partially filled view would pass for bytes that were read."""
    view = bytearray(size)
    with pytest.raises(ValueError, match="too short"):
        copy_block(memoryview(bytearray(b"x" * (size - 1))), [memoryview(view)])
    assert bytes(size) == view


def resident_pages(memory: mmap.mmap) -> list[bool]:
    """Return which pages of a mapping have memory."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    found = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), found)
    return [bool(page & 1) for page in found]


@pytest.fixture
def new_memory() -> mmap.mmap:
    """Return twice the minimum size of memory without pages; skips if this kernel does not populate on request."""
    if sys.platform != "linux":
        pytest.skip("only Linux populates memory on request")
    with mmap.mmap(-1, mmap.PAGESIZE) as probe:
        try:
            probe.madvise(MADV_POPULATE_WRITE)
        except OSError:
            pytest.skip("this kernel does not populate memory on request")
    return mmap.mmap(-1, 2 * MIN_POPULATED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def test_the_complete_pages_of_large_views_are_populated_and_nothing_is_written(new_memory: mmap.mmap) -> None:
    """A page that a view shares with its neighbours, and views of small tensors, wait for their first write."""
    page, large, view = mmap.PAGESIZE, MIN_POPULATED_BYTES, memoryview(new_memory)
    populate([view[100 : 100 + large], view[large + page : large + 2 * page]])
    pages = large // page
    assert [False, *[True] * (pages - 1), *[False] * pages] == resident_pages(new_memory)
    assert bytes(2 * large) == bytes(view)


def test_a_chunk_has_its_pages_before_it_is_written(new_memory: mmap.mmap) -> None:
    """Otherwise each of them would be a page fault while the chunk is received."""
    image = image_from_tensors({"a": torch.frombuffer(new_memory, dtype=torch.uint8)})
    with image.writing(0, len(new_memory)):
        assert all(resident_pages(new_memory))


def test_memory_that_cannot_be_populated_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems, and older kernels, populate it with the first write."""
    view = bytearray(b"x" * 2 * MIN_POPULATED_BYTES)
    monkeypatch.setattr("rfork.image.host_memory.MADV_POPULATE_WRITE", -1)
    populate([memoryview(view)])
    monkeypatch.setattr("sys.platform", "darwin")
    populate([memoryview(view)])
    assert b"x" * 2 * MIN_POPULATED_BYTES == view
