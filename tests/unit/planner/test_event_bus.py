"""Events of forks: one queue per subscriber, and the stream over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

from planner import http_errors
from planner.api.events import events_router
from planner.core.problems import ProblemError
from planner.core.records import ForkRecord, StoreChange
from planner.core.state import PlannerState
from planner.event_bus import EventBus, Subscription
from planner.metrics import Metrics
from planner.plan_service import PlanService
from planner.store.memory import MemoryStore
from rfork.schema import ForkResult, Rank
from rfork.settings import PlannerSettings
from tests.unit.planner.app_transport import AppTransport
from tests.unit.planner.builders import FakeTime

SOON_S = 0.001
DONE = ForkResult(outcome="forked", seconds=1, bytes_read=1)


def planned(name: str, *, at: float = 0.0, model: str = "m") -> ForkRecord:
    """Return a fork that has just been planned."""
    return ForkRecord(
        fork_id=name, instance_id=f"i-{name}", model=model, rank=Rank(), chunk_count=1, image_bytes=1,
        requested_at=0.0, planned_at=at, seen_at=at,
    )  # fmt: skip


def progress(name: str, *, at: float = 1.0, reason: str = "") -> ForkRecord:
    """Return a fork with progress since it was planned."""
    return replace(planned(name), seen_at=at, reason=reason)


def ended(name: str) -> ForkRecord:
    """Return a finished fork."""
    return replace(progress(name), finish=DONE)


async def pending_events(subscription: Subscription, max_events: int = 100) -> list[tuple[str, str]]:
    """Return the queued events as fork and type."""
    return [(change.fork.fork_id, change.event_type) for change in await subscription.next_events(max_events, SOON_S)]


def subscribe_all(max_events: int = 100) -> Subscription:
    """Return a subscription to all forks."""
    return Subscription(lambda fork: True, max_events)


MERGED: list[tuple[Sequence[ForkRecord], list[tuple[str, str]]]] = [
    ([planned("a")], [("a", "planned")]),
    ([planned("a"), planned("b"), progress("c")], [("a", "planned"), ("b", "planned"), ("c", "progress")]),
    ([progress("a"), progress("b"), progress("a", at=2.0)], [("a", "progress"), ("b", "progress")]),
    # Progress does not replace a planned or ended event.
    ([planned("a"), progress("a")], [("a", "planned")]),
    ([progress("a"), ended("a")], [("a", "ended")]),
    ([planned("a"), ended("a")], [("a", "ended")]),
    ([ended("a"), planned("a", at=5.0)], [("a", "planned")]),
    ([progress("a"), progress("b"), ended("a")], [("b", "progress"), ("a", "ended")]),
]


@pytest.mark.parametrize(("records", "expected"), MERGED)
async def test_a_fork_is_queued_once_with_its_latest_state(
    records: Sequence[ForkRecord], expected: list[tuple[str, str]]
) -> None:
    """Events are ordered by fork."""
    subscription = subscribe_all()
    for record in records:
        subscription.put(record)
    assert expected == await pending_events(subscription)


async def test_an_event_has_the_latest_state() -> None:
    """This holds even if its type is that of an earlier change."""
    subscription = subscribe_all()
    subscription.put(planned("a"))
    subscription.put(progress("a", reason="newer"))
    [change] = await subscription.next_events(9, SOON_S)
    assert "newer" == change.event(now=3.0).fork.reason


async def test_a_slow_reader_loses_the_oldest_progress_first() -> None:
    """Planned and ended events are dropped only if there is no progress; the queue stays bounded."""
    subscription = subscribe_all(max_events=3)
    for record in (planned("a"), progress("b"), progress("c"), ended("d")):
        subscription.put(record)
    assert [("a", "planned"), ("c", "progress"), ("d", "ended")] == await pending_events(subscription)
    for name in "abcd":
        subscription.put(planned(name))
    assert [("b", "planned"), ("c", "planned"), ("d", "planned")] == await pending_events(subscription)


async def test_numbers_increase_and_show_gaps() -> None:
    """A gap is an event that was merged or dropped."""
    subscription = subscribe_all(max_events=2)
    for name in "abc":
        subscription.put(progress(name))
    subscription.put(ended("b"))
    assert [3, 4] == [change.number for change in await subscription.next_events(9, SOON_S)]


async def test_events_are_read_in_batches() -> None:
    """A timeout returns an empty list; a change wakes a waiting reader."""
    subscription = subscribe_all()
    assert [] == await pending_events(subscription)
    for name in "abc":
        subscription.put(planned(name))
    assert [["a", "b"], ["c"]] == [[name for name, _ in await pending_events(subscription, 2)] for _ in range(2)]
    waiting = asyncio.create_task(subscription.next_events(9, 60.0))
    await asyncio.sleep(0)
    subscription.put(ended("d"))
    assert ["ended"] == [change.event_type for change in await waiting]


async def test_closing_wakes_waiting_readers() -> None:
    """They receive nothing, now and later."""
    subscription = subscribe_all()
    waiting = asyncio.create_task(subscription.next_events(9, 60.0))
    await asyncio.sleep(0)
    subscription.close()
    subscription.put(planned("a"))
    assert [] == await waiting
    assert [] == await subscription.next_events(9, 60.0)


async def test_a_subscription_starts_with_the_running_forks() -> None:
    """Finished forks are omitted; then each matching change follows."""
    state = PlannerState(max_finished_forks=10)
    state.apply(StoreChange(forks=(planned("a"), progress("b"), ended("c"), planned("d", model="other"))))
    events = EventBus(state)
    of_all, of_model, of_fork = events.subscribe(), events.subscribe(model="m"), events.subscribe(fork_id="b")
    state.apply(StoreChange(forks=(ended("b"), planned("e"))))
    assert [
        [("a", "planned"), ("d", "planned"), ("b", "ended"), ("e", "planned")],
        [("a", "planned"), ("b", "ended"), ("e", "planned")],
        [("b", "ended")],
    ] == [await pending_events(each) for each in (of_all, of_model, of_fork)]


def test_the_number_of_subscribers_is_limited() -> None:
    """One more is rejected (503) until one leaves; a planner that shuts down accepts none."""
    events = EventBus(PlannerState(max_finished_forks=1), max_subscribers=2)
    first, second = events.subscribe(), events.subscribe()
    with pytest.raises(ProblemError) as many:
        events.subscribe()
    events.unsubscribe(first)
    third = events.subscribe()
    events.close()
    events.unsubscribe(third)
    with pytest.raises(ProblemError) as stopping:
        events.subscribe()
    assert 503 == many.value.status
    assert "too-many-streams" == many.value.slug
    assert 503 == stopping.value.status
    assert "not-ready" == stopping.value.slug
    assert second.closed


def test_an_unsubscribed_reader_receives_nothing() -> None:
    """After the last one, the bus unsubscribes from the state."""
    state = PlannerState(max_finished_forks=1)
    events = EventBus(state)
    subscription = events.subscribe()
    events.unsubscribe(subscription)
    events.unsubscribe(subscription)
    state.apply(StoreChange(forks=(planned("a"),)))
    assert subscription.closed


# -- the stream -------------------------------------------------------------------------------------


class EventStreamServer:
    """A planner with only the event stream, called like an ASGI server calls it."""

    def __init__(self, *, keep_alive_s: float = 60.0, max_subscribers: int = 1) -> None:
        clock = FakeTime(now=1.0).clock
        store = MemoryStore(clock, max_finished_forks=9)
        service = PlanService(PlannerSettings(), store, clock, Metrics())
        self.state = store.state
        self.events = EventBus(self.state, max_subscribers)
        self.app = FastAPI()
        http_errors.register_handlers(self.app, lambda: None)
        self.app.include_router(events_router(service, self.events, keep_alive_s=keep_alive_s))
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.disconnected = asyncio.Event()

    async def serve(self) -> None:
        """Serve one reader, which disconnects when `disconnected` is set."""
        scope = {
            "type": "http", "method": "GET", "path": "/v1/events", "query_string": b"", "headers": [],
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }  # fmt: skip
        await self.app(scope, self._receive, self.sent.put)

    async def body(self, pieces: int) -> list[str]:
        """Return body parts as they arrive."""
        return [(await self.sent.get())["body"].decode() for _ in range(pieces)]

    async def _receive(self) -> Message:
        await self.disconnected.wait()
        return {"type": "http.disconnect"}


async def test_the_stream_uses_the_server_sent_events_format() -> None:
    """It has headers, retry time, running forks and changes, each part ending with a blank line."""
    planner = EventStreamServer()
    planner.state.apply(StoreChange(forks=(planned("a"),)))
    serving = asyncio.create_task(planner.serve())
    head = await planner.sent.get()
    headers = dict(head["headers"])
    retry, first = await planner.body(2)
    planner.state.apply(StoreChange(forks=(ended("a"),)))
    [second] = await planner.body(1)
    planner.events.close()
    await serving
    assert 200 == head["status"]
    assert b"text/event-stream; charset=utf-8" == headers[b"content-type"]
    assert b"no-store" == headers[b"cache-control"]
    assert "retry: 2000\n\n" == retry
    for number, event_type, text in ((1, "planned", first), (2, "ended", second)):
        id_line, event_line, data_line, *rest = text.split("\n")
        data = json.loads(data_line.removeprefix("data: "))
        assert f"id: {number}" == id_line
        assert f"event: {event_type}" == event_line
        assert event_type == data["kind"]
        assert "a" == data["fork"]["fork_id"]
        assert ["", ""] == rest


async def test_an_idle_stream_sends_comments() -> None:
    """They keep proxies and readers from closing it."""
    planner = EventStreamServer(keep_alive_s=SOON_S)
    serving = asyncio.create_task(planner.serve())
    await planner.sent.get()
    assert [": still here\n\n"] * 2 == (await planner.body(3))[1:]
    planner.events.close()
    await serving


async def test_a_planner_shutdown_ends_its_streams() -> None:
    """The last part marks the body as complete."""
    planner = EventStreamServer()
    serving = asyncio.create_task(planner.serve())
    await planner.sent.get()
    await planner.sent.get()
    planner.events.close()
    await serving
    assert b"" == (last := await planner.sent.get())["body"]
    assert last["more_body"] is False


async def test_a_disconnected_reader_frees_its_slot() -> None:
    """Its stream ends immediately, though no event occurs."""
    planner = EventStreamServer(max_subscribers=1)
    serving = asyncio.create_task(planner.serve())
    await planner.sent.get()
    planner.disconnected.set()
    await serving
    planner.disconnected.clear()
    another = asyncio.create_task(planner.serve())
    while (message := await planner.sent.get())["type"] != "http.response.start":
        pass
    planner.events.close()
    await another
    assert 200 == message["status"]


def test_one_reader_too_many_must_retry() -> None:
    """The response is a problem with `Retry-After`."""
    planner = EventStreamServer(max_subscribers=0)
    response = httpx.Client(base_url="http://planner", transport=AppTransport(planner.app)).get("/v1/events")
    assert 503 == response.status_code
    assert "https://rfork.dev/problems/too-many-streams" == response.json()["type"]
    assert "10" == response.headers["retry-after"]
