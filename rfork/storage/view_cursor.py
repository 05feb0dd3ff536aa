"""A line of views that is taken from its front: what one read fills by way of several others."""

from __future__ import annotations

from collections.abc import Sequence


class ViewCursor:
    """A line of views, taken from its front a number of bytes at a time."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._used = 0

    def next_views(self, count: int) -> list[memoryview]:
        """Views of the next `count` bytes."""
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
