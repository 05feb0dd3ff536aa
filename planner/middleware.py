"""ASGI middleware in front of the routes: request id and log, traces, authorization, rate and body limits.

Plain ASGI that reads raw headers: a fleet's heartbeats pass through thousands of times a second.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.auth import AUTHORIZATION_CHECK, CALLER, Auth, is_open
from planner.core.problems import ProblemError
from planner.http_errors import problem_response
from rfork.asyncio_timeout import timeout
from rfork.logs import logger, with_fields
from rfork.tracing import TRACEPARENT, TraceContext, Tracer

MAX_BODY_BYTES: Final = 4 << 20
"""Maximum size of a request body."""
BODY_S: Final = 10.0
"""Seconds within which the complete request body must arrive; a client's own call times out earlier."""
CLIENT_DISCONNECTED: Final = 499
"""Status logged for a request whose client disconnected before the response, as in nginx."""
REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
FORKS_PATH: Final = "/v1/forks"
SCALEUPS_PATH: Final = "/v1/scaleups"
TRACEPARENT_HEADER: Final = TRACEPARENT.encode()
BURST_S: Final = 2.0
"""An idle caller may send at once as many requests as its rate allows in this many seconds."""
CALLER_CACHE_SIZE: Final = 32_768
"""About 250 bytes each. The least recently active caller is dropped first, and restarts with a full bucket."""

CallerKey = tuple[bytes, str]
"""Digest of the token (empty without a valid one) and network address."""

RefusalListener = Callable[[str], None]
"""Called with the slug of each problem that ends a request before its route."""


class RequestLog:
    """Assigns each request an id (the caller's `X-Request-Id`, if it sent one) and logs it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._log = logger("planner.http")
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_request_id = header(scope, b"x-request-id")
        if client_request_id is not None and REQUEST_ID.fullmatch(client_request_id):
            request_id = client_request_id.decode("ascii")
        else:
            request_id = f"{self._prefix}-{next(self._numbers)}"
        scope["request_id"] = request_id
        status = CLIENT_DISCONNECTED
        started_at = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("ascii"))]
            await send(message)

        with with_fields(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:  # answered and logged with its traceback by `http_errors`, outside this middleware
                status = 500
                raise
            finally:
                # A fleet's heartbeats are thousands of requests a second, so only failures are logged by default.
                # The level is checked first because a dropped log call costs as much as the rest of this class.
                level = logging.INFO if status >= 400 else logging.DEBUG
                if self._log.is_enabled_for(level):
                    seconds = round(time.perf_counter() - started_at, 6)
                    # Quoted as sent: decoded, it could contain terminal escape sequences.
                    path = quote(scope["path"], safe="/:")
                    self._log.log(level, "request", method=scope["method"], path=path, status=status, seconds=seconds)


class TracingMiddleware:
    """ASGI middleware that adds a span for each fork and scale-up request to the caller's trace.

    Heartbeats and queries have no spans: they would outnumber all others.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        route = _route_of(scope) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        with self._tracer.span(
            f"{scope['method']} {route.route}",
            kind="server",
            parent=TraceContext.parse(header(scope, TRACEPARENT_HEADER)),
            method=scope["method"],
            route=route.route,
            fork=route.fork_id or None,
            scaleup=route.scaleup_id or None,
        ) as span:

            async def send_seen(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set(status=message["status"])
                    if message["status"] >= 500:
                        span.fail(f"status {message['status']}")
                await send(message)

            await self._app(scope, receive, send_seen)


@dataclass(frozen=True, slots=True)
class _TracedRoute:
    """A traced request: its route, and the ids in its path."""

    route: str
    fork_id: str = ""
    scaleup_id: str = ""


def _route_of(scope: Scope) -> _TracedRoute | None:
    """Return the traced route, or None if the request is not traced."""
    method, path = scope["method"], scope["path"]
    if method == "POST" and path.startswith(FORKS_PATH):
        fork_id, _, resource = path.removeprefix(FORKS_PATH).strip("/").partition("/")
        route = f"{FORKS_PATH}/{{fork_id}}/{resource}" if resource in ("progress", "finish") else FORKS_PATH
        return _TracedRoute(route, fork_id=fork_id)
    if method == "POST" and path == SCALEUPS_PATH:
        return _TracedRoute(SCALEUPS_PATH)
    if method == "DELETE" and path.startswith(f"{SCALEUPS_PATH}/"):
        return _TracedRoute(f"{SCALEUPS_PATH}/{{scaleup_id}}", scaleup_id=path.removeprefix(f"{SCALEUPS_PATH}/"))
    return None


class AuthMiddleware:
    """Authenticates, rate-limits and authorizes each request; health checks and pages are exempt."""

    def __init__(self, app: ASGIApp, auth: Auth, rate: RateLimit | None, on_refused: RefusalListener) -> None:
        """`rate`: None disables the rate limit."""
        self._app = app
        self._on_refused = on_refused
        self._auth = auth
        self._rate = rate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        problem = self._refusal(scope)
        if problem is None:
            await self._app(scope, receive, send)
        else:
            self._on_refused(problem.slug)
            await problem_response(problem, scope["path"])(scope, receive, send)

    def _refusal(self, scope: Scope) -> ProblemError | None:
        authorization = header(scope, b"authorization")
        caller = scope[CALLER] = self._auth.caller(authorization)
        scope[AUTHORIZATION_CHECK] = lambda: self._auth.check(scope["method"], scope["path"], authorization) is None
        if self._rate is not None:
            client = scope.get("client")
            # All guessed tokens from one address count as one caller.
            wait_s = self._rate.wait_s((caller.digest if caller else b"", client[0] if client else ""))
            if wait_s > 0:
                headers = {"Retry-After": str(math.ceil(wait_s))}
                detail = f"too many requests from this caller: retry in {wait_s:.1f} s"
                return ProblemError(429, "too-many-requests", detail, headers=headers)
        return self._auth.denial_problem(scope["method"], scope["path"], authorization, caller)


class RateLimit:
    """Generic cell rate algorithm (ITU-T I.371): a token bucket without a refill timer.

    A bucket that fills at `rate` requests per second is represented by the time at which it will be full.
    """

    def __init__(
        self,
        rate: float,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        max_callers: int = CALLER_CACHE_SIZE,
    ) -> None:
        """`rate`: requests per second, above 0; at most `max_callers` callers are tracked."""
        self._interval_s = 1 / rate
        # With less than one request per burst, single requests must still pass.
        self._burst_s = max(BURST_S, self._interval_s)
        self._monotonic = monotonic
        self._max_callers = max_callers
        self._full_at: OrderedDict[CallerKey, float] = OrderedDict()

    def wait_s(self, caller: CallerKey) -> float:
        """Return 0 and consume a token if the request may pass; else the seconds until it may."""
        now = self._monotonic()
        full_at = max(now, self._full_at.get(caller, now))
        wait_s = full_at + self._interval_s - now - self._burst_s
        # Difference of two floats: tolerate a thousandth of an interval.
        allowed_at = wait_s <= self._interval_s / 1000
        self._full_at[caller] = full_at + self._interval_s if allowed_at else full_at
        self._full_at.move_to_end(caller)
        if len(self._full_at) > self._max_callers:
            self._full_at.popitem(last=False)
        return 0.0 if allowed_at else wait_s


class BodyLimit:
    """Reads each body before its route runs; rejects one that is too large or too slow.

    The routes read complete bodies in any case, so this needs no extra memory.
    """

    def __init__(self, app: ASGIApp, limit: int, on_refused: RefusalListener, within_s: float = BODY_S) -> None:
        """`limit` in bytes."""
        self._app = app
        self._on_refused = on_refused
        self._limit = limit
        self._within_s = within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = header(scope, b"content-length")
        if announced is None and header(scope, b"transfer-encoding") is None:
            # There is no body (RFC 9112, section 6.3).
            await self._app(scope, receive, send)
            return
        try:
            if announced is not None and announced.isdigit() and int(announced) > self._limit:
                raise self._too_large_error()
            async with timeout(self._within_s):
                body = await self._read_body(receive)
        except TimeoutError:
            detail = f"the body did not arrive within {self._within_s:g} s"
            late = ProblemError(408, "request-timeout", detail, headers={"Connection": "close"})
            await self._send_problem(late, scope, receive, send)
            return
        except ProblemError as problem:
            await self._send_problem(problem, scope, receive, send)
            return
        if body is None:
            return
        waiting: Message | None = body

        async def receive_buffered() -> Message:
            nonlocal waiting
            if waiting is None:
                return await receive()
            message, waiting = waiting, None
            return message

        await self._app(scope, receive_buffered, send)

    async def _send_problem(self, problem: ProblemError, scope: Scope, receive: Receive, send: Send) -> None:
        self._on_refused(problem.slug)
        await problem_response(problem, scope["path"])(scope, receive, send)

    async def _read_body(self, receive: Receive) -> Message | None:
        """Return the complete body as one message, or None if the client disconnected; ProblemError if too
        large.
        """
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if size > self._limit:
                raise self._too_large_error()
            if not message.get("more_body", False):
                return {"type": "http.request", "body": b"".join((*pieces, piece)), "more_body": False}
            pieces.append(piece)

    def _too_large_error(self) -> ProblemError:
        # Close the connection; otherwise the rest of the body would still have to be read.
        detail = f"the body is larger than {self._limit} bytes"
        return ProblemError(413, "body-too-large", detail, headers={"Connection": "close"})


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header of this name; `name` in lower case."""
    for each, value in scope["headers"]:
        if each == name:
            found: bytes = value
            return found
    return None
