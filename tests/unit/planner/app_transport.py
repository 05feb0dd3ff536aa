"""httpx transport that calls an ASGI application without sockets."""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI


class AppTransport(httpx.BaseTransport):
    """Runs each request on its own event loop."""

    def __init__(self, app: FastAPI) -> None:
        # A bug in the application must appear as callers see it: as a problem document.
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one request; its body is read completely."""
        return asyncio.run(self._respond(request))

    async def _respond(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        response = await self._transport.handle_async_request(
            httpx.Request(request.method, request.url, headers=request.headers, content=body)
        )
        return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())


def http_client(app: FastAPI) -> httpx.Client:
    """Return a plain HTTP client of the application."""
    return httpx.Client(base_url="http://planner", transport=AppTransport(app))
