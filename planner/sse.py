"""Responses that stream server-sent events (HTML standard, section 9.2)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rfork.asyncio_timeout import timeout
from rfork.logs import logger

KEEP_ALIVE_S: Final = 5.0
"""Idle seconds after which a comment is sent, so that proxies and readers see that the stream is alive."""
SEND_TIMEOUT_S: Final = 30.0
"""Seconds after which a reader that reads nothing is disconnected."""


class SseResponse(StreamingResponse, ABC):
    """Response that streams the events of a subscription.

    Ends when the subscription is closed, when the reader disconnects or is no longer authorized, and when it
    reads nothing for `SEND_TIMEOUT_S`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        still_authorized: Callable[[], bool],
        keep_alive_s: float,
        *,
        first_bytes: bytes = b"",
        flush_interval_s: float = 0.0,
    ) -> None:
        """`first_bytes`: sent before the events; `flush_interval_s`: seconds between two messages."""
        super().__init__((), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._still_authorized = still_authorized
        self._keep_alive_s = keep_alive_s
        self._first_bytes = first_bytes
        self._flush_interval_s = flush_interval_s

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True when the subscription has no more events."""

    @abstractmethod
    async def next_bytes(self, within_s: float) -> bytes:
        """Wait for events and return them encoded; empty if there are none within `within_s`, or at the end."""

    @abstractmethod
    def unsubscribe(self) -> None:
        """Release the subscription."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one reader."""
        try:
            await super().__call__(scope, receive, send)
        except TimeoutError:
            logger("planner.sse").warning("event stream reader stalled", path=scope["path"], stalled_s=SEND_TIMEOUT_S)
        finally:
            self.unsubscribe()

    async def stream_response(self, send: Send) -> None:
        """Send headers, events and end."""

        async def write(body: bytes, *, more: bool = True) -> None:
            async with timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._first_bytes:
            await write(self._first_bytes)
        while not self.closed:
            body = await self.next_bytes(self._keep_alive_s)
            if not self._still_authorized():
                break
            if body:
                await write(body)
                # Lets other requests proceed, also with an interval of 0.
                await asyncio.sleep(self._flush_interval_s)
            elif not self.closed:
                await write(b": still here\n\n")
        await write(b"", more=False)
