"""Traces of fork requests: spans for requests, for waiting in a batch, and for planning."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.middleware import header
from planner.request_intake import PlanContext
from planner.store.records import GroupKey
from rfork.schema import Plan
from rfork.tracing import TRACEPARENT, TraceContext, Tracer, current_context

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


class TracedPlanner:
    """Wraps a planner: adds one span per plan, whose targets may belong to many traces."""

    def __init__(
        self,
        plan: Callable[[Sequence[PlanContext]], Awaitable[dict[str, Plan]]],
        members: Callable[[GroupKey], int],
        tracer: Tracer,
    ) -> None:
        """`members` returns the number of instances in a group."""
        self._plan = plan
        self._members_of = members
        self._tracer = tracer

    async def __call__(self, batch: Sequence[PlanContext]) -> dict[str, Plan]:
        """Plan the requests together. The span belongs to the first request's trace and links to the others'."""
        if not self._tracer.enabled:
            return await self._plan(batch)
        lead, *others = [each.trace for each in batch]
        group = batch[0].group
        with self._tracer.span(
            "make plan",
            parent=current_context() or lead,
            links=others,
            model=group.model,
            version=group.version,
            rank=group.rank_key,
            batch_size=len(batch),
            group_size=self._members_of(group),
        ) as span:
            plans = await self._plan(batch)
            span.set(
                routes=sum(len(plan.routes) for plan in plans.values()),
                storage_readers=sum(bool(plan.storage) for plan in plans.values()),
                reason=plans[batch[0].fork_id].reason if batch[0].fork_id in plans else None,
            )
            return plans

    async def trace_wait(self, context: PlanContext, add: Callable[[PlanContext], Awaitable[Plan]]) -> Plan:
        """Plan a request with `add`, in a span that covers the wait for its batch."""
        if not self._tracer.enabled:
            return await add(context)
        with self._tracer.span(
            "wait for plan",
            model=context.group.model,
            version=context.group.version,
            rank=context.group.rank_key,
        ) as span:
            plan = await add(replace(context, trace=span.context))
            span.set(reason=plan.reason, routes=len(plan.routes), retry_after_s=plan.retry_after_s)
            return plan


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
