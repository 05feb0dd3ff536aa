"""Where the time of a fork's request goes: spans of the requests, of those who wait for others, of plans."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.asking import Asked
from planner.middleware import header
from planner.store.records import GroupKey
from rfork.tracing import TRACEPARENT, TraceContext, Tracer, here
from rfork.wire import Plan

FORKS: Final = "/v1/forks"
SCALEUPS: Final = "/v1/scaleups"
HEADER: Final = TRACEPARENT.encode()


class TracedRequests:
    """Plain ASGI: what targets say of their forks, and others of scale-ups, is a span of the trace that the
    call came with.

    Heartbeats and what people ask are none: they would be most of all spans.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        told = _told(scope) if scope["type"] == "http" else None
        if told is None:
            await self._app(scope, receive, send)
            return
        with self._tracer.span(
            f"{scope['method']} {told.route}",
            kind="server",
            parent=TraceContext.parse(header(scope, HEADER)),
            method=scope["method"],
            route=told.route,
            fork=told.fork_id or None,
            scaleup=told.scaleup_id or None,
        ) as span:

            async def send_seen(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set(status=message["status"])
                    if message["status"] >= 500:
                        span.fail(f"status {message['status']}")
                await send(message)

            await self._app(scope, receive, send_seen)


class TracedPlans:
    """Around whoever makes plans: one span for each that is made, whose targets may come from many traces."""

    def __init__(
        self,
        plan: Callable[[Sequence[Asked]], Awaitable[dict[str, Plan]]],
        members: Callable[[GroupKey], int],
        tracer: Tracer,
    ) -> None:
        """`members`: how many instances a group has."""
        self._plan = plan
        self._members = members
        self._tracer = tracer

    async def __call__(self, batch: Sequence[Asked]) -> dict[str, Plan]:
        """Plan them together. The span belongs to the first's trace, and links to the others'."""
        if not self._tracer.on:
            return await self._plan(batch)
        first, *others = [each.trace for each in batch]
        group = batch[0].group
        with self._tracer.span(
            "make plan",
            parent=here() or first,
            links=others,
            model=group.model,
            version=group.version,
            rank=group.rank_key,
            together=len(batch),
            group_size=self._members(group),
        ) as span:
            plans = await self._plan(batch)
            span.set(
                routes=sum(len(plan.routes) for plan in plans.values()),
                storage_readers=sum(bool(plan.storage) for plan in plans.values()),
                reason=plans[batch[0].fork_id].reason if batch[0].fork_id in plans else None,
            )
            return plans

    async def waiting(self, asked: Asked, add: Callable[[Asked], Awaitable[Plan]]) -> Plan:
        """Have `add` plan a request, which may wait for others that it is to be planned with."""
        if not self._tracer.on:
            return await add(asked)
        with self._tracer.span(
            "wait for the plan",
            model=asked.group.model,
            version=asked.group.version,
            rank=asked.group.rank_key,
        ) as span:
            plan = await add(replace(asked, trace=span.context))
            span.set(reason=plan.reason, routes=len(plan.routes), retry_after_s=plan.retry_after_s)
            return plan


@dataclass(frozen=True, slots=True)
class _Told:
    """A request that is traced: its route, and what its path names."""

    route: str
    fork_id: str = ""
    scaleup_id: str = ""


def _told(scope: Scope) -> _Told | None:
    """What a request is traced as; None for those that are not."""
    method, path = scope["method"], scope["path"]
    if method == "POST" and path.startswith(FORKS):
        fork_id, _, what = path.removeprefix(FORKS).strip("/").partition("/")
        route = f"{FORKS}/{{fork_id}}/{what}" if what in ("progress", "finish") else FORKS
        return _Told(route, fork_id=fork_id)
    if method == "POST" and path == SCALEUPS:
        return _Told(SCALEUPS)
    if method == "DELETE" and path.startswith(f"{SCALEUPS}/"):
        return _Told(f"{SCALEUPS}/{{scaleup_id}}", scaleup_id=path.removeprefix(f"{SCALEUPS}/"))
    return None
