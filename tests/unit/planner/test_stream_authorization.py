"""Streams end when their caller's token is no longer valid."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.types import Message

from planner.api.events import events_router
from planner.auth import CHECK_S, Auth, still_authorized
from planner.event_bus import EventBus
from planner.middleware import AuthMiddleware
from planner.ui.broadcaster import Broadcaster
from planner.ui.feed import feed_router
from rfork.asyncio_timeout import timeout
from rfork.settings import PlannerSettings
from tests.unit.planner.builders import FakeTime, make_service

TOKENS = "reader read\noperator rule\n"
STREAMS = ("/v1/events", "/ui/feed")
SOON_S = 0.001
"""Interval between comments of an idle stream."""


class GuardedStreams:
    """A planner's streams with authorization, called like an ASGI server calls them."""

    def __init__(self, path: Path) -> None:
        self.time = FakeTime()
        self.tokens = path
        path.write_text(TOKENS)
        service = make_service(self.time)
        self.broadcaster, self.events = (
            Broadcaster(service, heartbeat_s=5, flush_interval_s=SOON_S),
            EventBus(service.state),
        )
        app = FastAPI()
        app.include_router(events_router(service, self.events, keep_alive_s=SOON_S))
        app.include_router(feed_router(self.broadcaster, keep_alive_s=SOON_S))
        auth = Auth(PlannerSettings(tokens_file=path), self.time.clock.monotonic)
        self.app = AuthMiddleware(app, auth, None, lambda slug: None)
        self.sent: asyncio.Queue[Message] = asyncio.Queue()

    async def serve(self, path: str, token: str) -> None:
        """Serve one reader, which never disconnects."""
        scope = {
            "type": "http", "method": "GET", "path": path, "query_string": b"",
            "headers": [(b"authorization", f"Bearer {token}".encode())],
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }  # fmt: skip
        await self.app(scope, asyncio.Event().wait, self.sent.put)  # type: ignore[arg-type]

    def rewrite(self, text: str) -> None:
        """Replace the tokens."""
        self.tokens.write_text(text)
        self.time.now += CHECK_S

    async def until(self, text: bytes) -> int:
        """Receive parts until one contains the text; return the status if it was sent."""
        status = 0
        while True:
            message = await self.sent.get()
            status = int(message.get("status", status))
            if text in message.get("body", b""):
                return status


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("left", ["operator rule\n", "reader read-2\noperator rule\n"])
async def test_a_stream_ends_when_its_token_is_revoked(tmp_path: Path, path: str, left: str) -> None:
    """It ends at the next send, and its last part marks the body as complete."""
    planner = GuardedStreams(tmp_path / "tokens")
    async with timeout(10):
        serving = asyncio.create_task(planner.serve(path, "read"))
        status = await planner.until(b": still here")
        planner.rewrite(left)
        await serving
    last = [planner.sent.get_nowait() for _ in range(planner.sent.qsize())][-1]
    assert 200 == status
    assert b"" == last["body"]
    assert last["more_body"] is False


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_survives_changes_of_other_tokens(tmp_path: Path, path: str) -> None:
    """It also survives a greater role of its own token."""
    planner = GuardedStreams(tmp_path / "tokens")
    async with timeout(10):
        serving = asyncio.create_task(planner.serve(path, "read"))
        await planner.until(b": still here")
        planner.rewrite("operator read\n")
        for _ in range(3):
            await planner.until(b": still here")
        planner.events.close()
        planner.broadcaster.close()
        await serving
    assert not planner.broadcaster._subscribers


def test_without_tokens_every_stream_continues() -> None:
    """No middleware has stored a check in the scope."""
    assert still_authorized({"type": "http"})
