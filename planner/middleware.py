"""What every request passes before it reaches a route: its id and log line, the token, the size limit."""

from __future__ import annotations

import hmac
import re
import secrets
import time
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.problems import ProblemError, problem_response
from rfork.logs import logger

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
MAX_BODY: Final = 4 << 20
"""Bytes; a report of an image of 512 chunks is below 20 KB."""
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestLog:
    """Gives each request an id (the caller's `X-Request-Id`, if it sent one) and a log line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._log = logger("planner.http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        scope["request_id"] = request_id
        status = 500
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                # A fleet's heartbeats are thousands of lines a second: only what went wrong is worth one.
                log = self._log.info if status >= 400 else self._log.debug
                seconds = round(time.perf_counter() - began, 6)
                log("request", method=scope["method"], path=scope["path"], status=status, seconds=seconds)


class BearerToken:
    """Refuses whoever does not show the token; the health checks are open to all."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization")
        if given is not None and hmac.compare_digest(given.encode("latin-1"), self._expected):
            await self._app(scope, receive, send)
            return
        why = "the bearer token is wrong" if given else "this planner wants a bearer token"
        problem = ProblemError(401, "unauthorized", why, headers={"WWW-Authenticate": "Bearer"})
        await problem_response(problem, scope["path"])(scope, receive, send)


class BodyLimit:
    """Refuses bodies above a size, before they are in memory whole."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = f"the body is larger than {self._limit} bytes"
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._limit:
            problem = ProblemError(413, "body-too-large", too_large)
            await problem_response(problem, scope["path"])(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise HTTPException(413, too_large)
            return message

        await self._app(scope, receive_counted, send)
