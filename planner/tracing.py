"""Traces of requests: spans for fork and scale-up requests, in the traces of their callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.middleware import header
from rfork.tracing import TRACEPARENT, TraceContext, Tracer

FORKS: Final = "/v1/forks"
SCALEUPS: Final = "/v1/scaleups"
HEADER: Final = TRACEPARENT.encode()


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
            parent=TraceContext.parse(header(scope, HEADER)),
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
    if method == "POST" and path.startswith(FORKS):
        fork_id, _, resource = path.removeprefix(FORKS).strip("/").partition("/")
        route = f"{FORKS}/{{fork_id}}/{resource}" if resource in ("progress", "finish") else FORKS
        return _TracedRoute(route, fork_id=fork_id)
    if method == "POST" and path == SCALEUPS:
        return _TracedRoute(SCALEUPS)
    if method == "DELETE" and path.startswith(f"{SCALEUPS}/"):
        return _TracedRoute(f"{SCALEUPS}/{{scaleup_id}}", scaleup_id=path.removeprefix(f"{SCALEUPS}/"))
    return None
