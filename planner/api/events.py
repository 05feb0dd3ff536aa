"""Event stream of fork changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from planner.api import examples
from planner.api.openapi import ALWAYS, REQUEST_ID, ProblemDoc, problems
from planner.auth import still_authorized
from planner.event_bus import EventBus, ForkEventRecord, Subscription
from planner.registry import Registry
from rfork.logs import logger
from rfork.schema import ForkEvent
from rfork.schema.types import Identifier

RETRY_MS: Final = 2000
"""Time after which a browser reconnects when the stream has ended."""
KEEP_ALIVE_S: Final = 5.0
"""Idle seconds after which a comment is sent, so that proxies and readers see that the stream is alive."""
FLUSH_INTERVAL_S: Final = 0.05
MAX_PER_FLUSH: Final = 64
"""Events per flush, one flush every `FLUSH_INTERVAL_S`: at most 1,280 per second and reader, so that other
requests are served.
"""
SEND_TIMEOUT_S: Final = 30.0
"""Seconds after which a reader that reads nothing is disconnected."""
SAMPLE: Final = f"id: 1\nevent: progress\ndata: {examples.EVENT.model_dump_json()}\n\n"


class ForkEventResponse(StreamingResponse):
    """Response that streams the events of a subscription (HTML standard, section 9.2).

    Ends when the subscription is closed, when the reader disconnects or is no longer authorized, and when it
    reads nothing for `SEND_TIMEOUT_S`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: EventBus,
        subscription: Subscription,
        now: Callable[[], float],
        still_authorized: Callable[[], bool],
        keep_alive_s: float,
    ) -> None:
        super().__init__((), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events = events
        self._subscription = subscription
        self._now = now
        self._still_authorized = still_authorized
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one reader."""
        try:
            await super().__call__(scope, receive, send)
        except TimeoutError:
            logger("planner.event_bus").warning("event stream reader stalled", stalled_s=SEND_TIMEOUT_S)
        finally:
            self._events.unsubscribe(self._subscription)

    async def stream_response(self, send: Send) -> None:
        """Send headers, events and end."""

        async def write(body: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await write(b"retry: %d\n\n" % RETRY_MS)
        while not self._subscription.closed:
            changes = await self._subscription.next_events(MAX_PER_FLUSH, self._keep_alive_s)
            if not self._still_authorized():
                break
            if changes:
                now = self._now()
                await write(b"".join(encode_event(change, now) for change in changes))
                # Changes meanwhile are merged: a busy fleet costs each reader no more than this.
                await asyncio.sleep(FLUSH_INTERVAL_S)
            elif not self._subscription.closed:
                await write(b": still here\n\n")
        await write(b"", more=False)


def encode_event(change: ForkEventRecord, now: float) -> bytes:
    """Return an event as text. JSON contains no line breaks, so `data` is one line."""
    event = change.event(now)
    return f"id: {change.number}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode()


def _item_schema() -> dict[str, object]:
    """Return the schema of one event for OpenAPI 3.2 (`itemSchema`); 3.1 cannot describe streams."""
    data = ForkEvent.model_json_schema(ref_template="#/components/schemas/{model}")
    # The models that it references are already in the document: other routes return them.
    del data["$defs"]
    return {
        "type": "object",
        "required": ["id", "event", "data"],
        "properties": {
            "id": {"type": "string"},
            "event": {"enum": ["planned", "progress", "ended"]},
            "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": data},
        },
    }


def events_router(registry: Registry, events: EventBus, *, keep_alive_s: float = KEEP_ALIVE_S) -> APIRouter:
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
                "content": {ForkEventResponse.media_type: {"example": SAMPLE, "x-itemSchema": _item_schema()}},
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
        await registry.sweep()
        subscription = events.subscribe(model=model, fork_id=fork_id)
        return ForkEventResponse(
            events, subscription, registry.now, partial(still_authorized, request.scope), keep_alive_s
        )

    return router
