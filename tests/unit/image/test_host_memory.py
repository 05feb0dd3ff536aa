"""Copies from a block of host memory to views."""

from __future__ import annotations

import pytest

from rfork.image.host_memory import SMALL_COPY_BYTES, copy_block


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
