"""`/v1/events`: the changes of forks as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request

from planner.api import examples
from planner.api.openapi import ALWAYS, REQUEST_ID, ProblemDoc, problems
from planner.auth import still_authorized
from planner.event_bus import EventBus, ForkEventRecord, Subscription
from planner.plan_service import PlanService
from planner.sse import KEEP_ALIVE_S, SseResponse
from rfork.schema import ForkEvent, Identifier

RETRY_MS: Final = 2000
"""Time after which a browser reconnects when the stream has ended."""
FLUSH_INTERVAL_S: Final = 0.05
MAX_PER_FLUSH: Final = 64
"""Events per flush, one flush every `FLUSH_INTERVAL_S`: at most 1,280 per second and reader, so that other
requests are served.
"""
EXAMPLE_STREAM: Final = f"id: 1\nevent: progress\ndata: {examples.EVENT.model_dump_json()}\n\n"


def events_router(service: PlanService, events: EventBus, *, keep_alive_s: float = KEEP_ALIVE_S) -> APIRouter:
    """Return the route /v1/events."""
    router = APIRouter(prefix="/v1/events", tags=["events"])

    @router.get(
        "",
        summary="Follow forks",
        status_code=200,
        response_class=ForkEventResponse,
        responses=problems(*ALWAYS, ProblemDoc(503, "too-many-streams", "the maximum of 32 event streams is reached"))
        | {
            200: {
                "description": "server-sent events, endless",
                "headers": REQUEST_ID,
                "content": {ForkEventResponse.media_type: {"example": EXAMPLE_STREAM, "x-itemSchema": _item_schema()}},
            }
        },
    )
    async def follow(
        request: Request,
        model: Annotated[str | None, Query(description="only forks of this model")] = None,
        fork_id: Annotated[Identifier | None, Query(description="only this fork")] = None,
    ) -> ForkEventResponse:
        """Stream every running fork, and then each change of a fork, as server-sent events.

        `event` is `planned`, `progress` or `ended`. A slow reader receives only the latest state of each
        fork, and `id` has gaps. When the stream ends (the planner shuts down, or the caller's token is no
        longer valid), reconnect: the first events contain the current state of the running forks.
        """
        await service.sweep()
        subscription = events.subscribe(model=model, fork_id=fork_id)
        return ForkEventResponse(
            events, subscription, service.now, partial(still_authorized, request.scope), keep_alive_s
        )

    return router


class ForkEventResponse(SseResponse):
    """Response that streams the events of a subscription."""

    def __init__(
        self,
        events: EventBus,
        subscription: Subscription,
        now: Callable[[], float],
        still_authorized: Callable[[], bool],
        keep_alive_s: float,
    ) -> None:
        # Changes between two flushes are merged, which bounds the cost of each reader in a busy fleet.
        super().__init__(
            still_authorized,
            keep_alive_s,
            first_bytes=b"retry: %d\n\n" % RETRY_MS,
            flush_interval_s=FLUSH_INTERVAL_S,
        )
        self._events = events
        self._subscription = subscription
        self._now = now

    @property
    def closed(self) -> bool:
        """True when the event bus has ended the subscription."""
        return self._subscription.closed

    async def next_bytes(self, within_s: float) -> bytes:
        """Return the next events."""
        records = await self._subscription.next_events(MAX_PER_FLUSH, within_s)
        now = self._now()
        return b"".join(encode_event(record, now) for record in records)

    def unsubscribe(self) -> None:
        """Remove the subscription from the event bus."""
        self._events.unsubscribe(self._subscription)


def encode_event(record: ForkEventRecord, now: float) -> bytes:
    """Return an event as text. JSON contains no line breaks, so `data` is one line."""
    event = record.event(now)
    return f"id: {record.number}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode()


def _item_schema() -> dict[str, object]:
    """Return the schema of one event for OpenAPI 3.2 (`itemSchema`); 3.1 cannot describe streams."""
    data_schema = ForkEvent.model_json_schema(ref_template="#/components/schemas/{model}")
    # The models that it references are already in the document: other routes return them.
    del data_schema["$defs"]
    return {
        "type": "object",
        "required": ["id", "event", "data"],
        "properties": {
            "id": {"type": "string"},
            "event": {"enum": ["planned", "progress", "ended"]},
            "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": data_schema},
        },
    }
