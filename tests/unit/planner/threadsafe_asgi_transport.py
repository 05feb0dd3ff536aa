"""Transport of a synchronous client to an application on the test's event loop."""

from __future__ import annotations

import asyncio

import httpx
from starlette.types import ASGIApp


class ThreadsafeAsgiTransport(httpx.BaseTransport):
    """Passes requests of other threads to `app`, which runs on the event loop of the creating thread."""

    def __init__(self, app: ASGIApp) -> None:
        self._transport = httpx.ASGITransport(app)
        self._loop = asyncio.get_running_loop()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Return the complete response."""
        return asyncio.run_coroutine_threadsafe(self._handle(request), self._loop).result()

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        response = await self._transport.handle_async_request(request)
        return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())
