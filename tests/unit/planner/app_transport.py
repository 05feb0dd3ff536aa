"""Lets a synchronous httpx client talk to an ASGI application without sockets."""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI


class AppTransport(httpx.BaseTransport):
    """Runs one request through the application on an event loop of its own."""

    def __init__(self, app: FastAPI) -> None:
        # A bug in the application is to be seen as callers see it: as a problem document.
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one request, its body read whole."""
        return asyncio.run(self._respond(request))

    async def _respond(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        response = await self._transport.handle_async_request(
            httpx.Request(request.method, request.url, headers=request.headers, content=body)
        )
        return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())


def http_client(app: FastAPI) -> httpx.Client:
    """A plain HTTP client of the application."""
    return httpx.Client(base_url="http://planner", transport=AppTransport(app))
