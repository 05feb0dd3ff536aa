"""Queue of messages for one page; the broadcaster never waits for it. Use from the event loop's thread only."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Final

from rfork.asyncio_timeout import timeout

MAX_QUEUED: Final = 64
"""Maximum number of queued messages per page, half a minute of them: a slower page restarts from the full
state.
"""


class Subscriber:
    """Messages that one page has not received yet."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._start_messages: Iterator[bytes] | None = None
        self._woken = asyncio.Event()
        self.started = False
        self.needs_restart = False
        """The queue overflowed: restart from the full state."""
        self.closed = False

    def reset(self, start_messages: Iterator[bytes]) -> None:
        """Replace the queue by these messages."""
        self._waiting.clear()
        self._start_messages, self.started, self.needs_restart = start_messages, True, False
        self._woken.set()

    def put(self, message: bytes) -> None:
        """Append a message; ignored before the initial state, which includes it."""
        if not self.started or self.needs_restart:
            return
        if len(self._waiting) >= MAX_QUEUED:
            self.needs_restart, self._start_messages = True, None
            self._waiting.clear()
            return
        self._waiting.append(message)
        self._woken.set()

    def close(self) -> None:
        """Stop delivering messages."""
        self.closed = True
        self._woken.set()

    async def next_messages(self, within_s: float) -> bytes:
        """Return the next message; empty if closed, or if none arrived within `within_s` seconds."""
        if not self.closed and self._start_messages is None and not self._waiting:
            self._woken.clear()
            with contextlib.suppress(TimeoutError):
                async with timeout(within_s):
                    await self._woken.wait()
        if self.closed:
            return b""
        if self._start_messages is not None:
            piece = next(self._start_messages, None)
            if piece is not None:
                return piece
            self._start_messages = None
        return self._waiting.popleft() if self._waiting else b""
