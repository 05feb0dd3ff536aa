"""The cursor over the views of a transfer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rfork.net.stream import ScatterCursor


@given(st.lists(st.integers(0, 9), max_size=12), st.data())
def test_a_cursor_visits_each_byte_once(sizes: list[int], data: st.DataObject) -> None:
    """Windows follow one another without gaps or overlaps, for any step sizes."""
    views = [memoryview(bytearray(size)) for size in sizes]
    cursor, step = ScatterCursor(views), 0
    while cursor.left:
        max_bytes = data.draw(st.integers(1, 20))
        window = cursor.window(max_bytes, 3)
        assert 0 < sum(view.nbytes for view in window) <= max_bytes
        step += 1
        done = data.draw(st.integers(1, sum(view.nbytes for view in window)))
        cursor.write_bytes(bytes([step]) * done)
    filled = b"".join(views)
    assert sorted(filled) == list(filled)
    assert cursor.done == sum(sizes)
    assert 0 not in filled
