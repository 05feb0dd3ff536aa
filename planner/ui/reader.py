"""What one page is yet to be sent; the feed never waits for it. Used from the event loop's thread only."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Final

MOST_WAITING: Final = 64
"""Messages that wait for one page, half a minute of them: one that is further behind begins anew."""


class Reader:
    """What one page is yet to be sent."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._start: Iterator[bytes] | None = None
        self._woken = asyncio.Event()
        self.started = False
        self.behind = False
        """It took too little for too long, and is to begin anew."""
        self.closed = False

    def begin(self, start: Iterator[bytes]) -> None:
        """Send these first, and in the place of all that waits."""
        self._waiting.clear()
        self._start, self.started, self.behind = start, True, False
        self._woken.set()

    def put(self, message: bytes) -> None:
        """Send it after what waits; before the beginning it would say nothing new."""
        if not self.started or self.behind:
            return
        if len(self._waiting) >= MOST_WAITING:
            self.behind, self._start = True, None
            self._waiting.clear()
            return
        self._waiting.append(message)
        self._woken.set()

    def close(self) -> None:
        """Send no more."""
        self.closed = True
        self._woken.set()

    async def take(self, within_s: float) -> bytes:
        """What comes next; empty where it is closed, or nothing came for `within_s` seconds."""
        if not self.closed and self._start is None and not self._waiting:
            self._woken.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._woken.wait()
        if self.closed:
            return b""
        if self._start is not None:
            piece = next(self._start, None)
            if piece is not None:
                return piece
            self._start = None
        return self._waiting.popleft() if self._waiting else b""
