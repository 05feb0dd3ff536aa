"""Cursor over a sequence of views."""

from __future__ import annotations

from rfork.storage.blob import ViewCursor


def test_a_cursor_splits_views() -> None:
    """Bytes are consumed in order, across the ends of views."""
    cursor = ViewCursor([memoryview(b"abc"), memoryview(b"de"), memoryview(b"f")])
    assert [[b"ab"], [b"c", b"de"], [], [b"f"]] == [
        [bytes(view) for view in cursor.next_views(count)] for count in (2, 3, 0, 1)
    ]
