"""Cursor over a sequence of views, for filling them with several reads."""

from __future__ import annotations

from collections.abc import Sequence


class ViewCursor:
    """Sequence of views that is consumed from the front, any number of bytes at a time."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._used = 0

    def next_views(self, count: int) -> list[memoryview]:
        """Consume and return views of the next `count` bytes."""
        result: list[memoryview] = []
        while count > 0:
            view = self._views[self._index]
            piece = view[self._used : self._used + count]
            result.append(piece)
            count -= piece.nbytes
            self._used += piece.nbytes
            if self._used == view.nbytes:
                self._index, self._used = self._index + 1, 0
        return result
