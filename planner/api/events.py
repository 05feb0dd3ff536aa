"""Events: the changes of forks as a stream."""

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
"""When a browser is to come back after the stream ended."""
KEEP_ALIVE_S: Final = 5.0
"""After so long without an event a comment is sent: proxies and readers see that the stream lives."""
FLUSH_INTERVAL_S: Final = 0.05
MAX_PER_FLUSH: Final = 64
"""Events sent at a time, once in `FLUSH_INTERVAL_S`: 1,280 a second to one reader, so that others are served too."""
SEND_TIMEOUT_S: Final = 30.0
"""A reader that takes nothing for so long is left."""
SAMPLE: Final = f"id: 1\nevent: progress\ndata: {examples.EVENT.model_dump_json()}\n\n"


class ForkEventResponse(StreamingResponse):
    """Sends what a subscription has to tell, in the form of the HTML standard, section 9.2.

    Ends when the subscription is closed, when the reader leaves or may not go on, and when it takes nothing
    for `SEND_TIMEOUT_S`.
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
            logger("planner.event_bus").warning("a reader of events takes none", stalled_s=SEND_TIMEOUT_S)
        finally:
            self._events.unsubscribe(self._subscription)

    async def stream_response(self, send: Send) -> None:
        """Send head, events and end."""

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
                # What changes meanwhile is merged: a busy fleet costs each reader no more than this.
                await asyncio.sleep(FLUSH_INTERVAL_S)
            elif not self._subscription.closed:
                await write(b": still here\n\n")
        await write(b"", more=False)


def encode_event(change: ForkEventRecord, now: float) -> bytes:
    """One event. JSON has no line break in it, so that `data` is one line."""
    event = change.event(now)
    return f"id: {change.number}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode()


def _item_schema() -> dict[str, object]:
    """What one event is, as OpenAPI 3.2 tells it (`itemSchema`); 3.1 has no word for streams."""
    data = ForkEvent.model_json_schema(ref_template="#/components/schemas/{model}")
    # The models that it refers to are in the document already: other routes answer with them.
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
    """/v1/events."""
    router = APIRouter(prefix="/v1/events", tags=["events"])

    @router.get(
        "",
        summary="Follow forks",
        status_code=200,
        response_class=ForkEventResponse,
        responses=problems(*ALWAYS, ProblemDoc(503, "too-many-streams", "32 callers read events already"))
        | {
            200: {
                "description": "server-sent events, without an end",
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
        """Each fork under way at first, and then each change of a fork, as server-sent events.

        `event` is the kind: `planned`, `progress` or `ended`. A reader that is slower than the fleet is told
        the latest state of each fork, and `id` has gaps. After the end of the stream (the planner stops, or
        the caller's token is good no more), come again: the first events tell how the forks under way stand.
        """
        await registry.sweep()
        subscription = events.subscribe(model=model, fork_id=fork_id)
        return ForkEventResponse(
            events, subscription, registry.now, partial(still_authorized, request.scope), keep_alive_s
        )

    return router
