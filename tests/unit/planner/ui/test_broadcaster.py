"""Messages to the pages: the full state first, then changes, to a bounded number of pages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from planner.core.problems import ProblemError
from planner.core.records import StoreChange
from planner.plan_service import PlanService
from planner.ui import broadcaster as feeds
from planner.ui import fleet_diff
from planner.ui.broadcaster import Broadcaster
from planner.ui.rows import Row, row_diff
from planner.ui.subscriber import MAX_QUEUED, Subscriber
from rfork.asyncio_timeout import timeout
from rfork.schema import ForkProgress, ForkResult
from tests.unit.planner.builders import FakeTime, accuse, fork_request, make_service, seed_report

Messages = list[tuple[str, dict[str, object]]]


@pytest.fixture
def time() -> FakeTime:
    """A clock that tests move."""
    return FakeTime()


@pytest.fixture
def service(time: FakeTime) -> PlanService:
    """An empty service."""
    return make_service(time, heartbeat_interval_s=5, instance_ttl_s=1000, lease_ttl_s=1000)


@pytest.fixture
async def broadcaster(service: PlanService) -> AsyncIterator[Broadcaster]:
    """A broadcaster that polls on every turn of the event loop."""
    broadcaster = Broadcaster(service, heartbeat_s=5, flush_interval_s=0)
    yield broadcaster
    broadcaster.close()
    for subscriber in list(broadcaster._subscribers):
        broadcaster.unsubscribe(subscriber)


async def read_until(subscriber: Subscriber, until: str) -> Messages:
    """Return the messages up to the first that contains this text."""
    found: Messages = []
    async with timeout(10):
        while True:
            message = (await subscriber.next_messages(1)).decode()
            if not message:
                continue
            event, data = message.rstrip("\n").split("\n")
            found.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
            if until in message:
                return found


def ids(messages: Messages, part: str) -> list[str]:
    """Return the ids of one type of rows, in order."""
    rows = [row for _, data in messages for row in data.get(part, [])]  # type: ignore[attr-defined]
    return [row["id"] for row in rows]


async def test_a_page_receives_the_full_state_and_then_changes(service: PlanService, broadcaster: Broadcaster) -> None:
    """It starts with `begin`, rows and `ready`; then come the changed fields with the row's id."""
    await service.report(seed_report("s"))
    await service.plan(fork_request("a"))
    subscriber = await broadcaster.subscribe()
    beginning = await read_until(subscriber, "event: ready")
    assert "begin" == beginning[0][0]
    assert "ready" == beginning[-1][0]
    assert ["s", "a"] == ids(beginning, "instances")
    assert ["fork-a"] == ids(beginning, "forks")
    progress = ForkProgress(
        verified=((0, 6),), bytes_read=6 << 20, bytes_per_s=1e6, sources={"s": 6 << 20},
        source_bytes_per_s={"s": 9.6e5},
    )  # fmt: skip
    await service.progress("fork-a", progress)
    [(_, change)] = await read_until(subscriber, "fork-a")
    expected = {
        "id": "fork-a", "verified": 6, "read": 6 << 20, "rate": 1_000_000, "sources": {"s": 6 << 20},
        "rates": {"s": 960_000},
    }  # fmt: skip
    assert [expected] == change["forks"]
    assert [{"id": "a", "verified": 6}] == change["instances"]


async def test_removals_are_sent(service: PlanService, broadcaster: Broadcaster) -> None:
    """A removed instance is sent by id, a removed field as None, and a new row completely."""
    await service.report(seed_report("s"))
    await service.plan(fork_request("a"))
    subscriber = await broadcaster.subscribe()
    await read_until(subscriber, "event: ready")
    await service.finish("fork-a", ForkResult(outcome="forked", seconds=2, bytes_read=12 << 20))
    [(_, change)] = await read_until(subscriber, "outcome")
    assert {"outcome": "forked", "seconds": 2.0} == {
        name: value for name, value in change["forks"][0].items() if name in ("outcome", "seconds")  # type: ignore[index]
    }  # fmt: skip
    await service.remove("s")
    [(_, change)] = await read_until(subscriber, '"removed"')
    assert ["s"] == change["removed"]


async def test_time_alone_changes_rows(service: PlanService, broadcaster: Broadcaster, time: FakeTime) -> None:
    """An expired quarantine and missing heartbeats are sent without any report."""
    await service.report(seed_report("s", max_readers=2))
    await accuse(service, "s", by="ab")
    subscriber = await broadcaster.subscribe()
    [row] = [
        row
        for _, data in await read_until(subscriber, "event: ready")
        for row in data.get("instances", [])  # type: ignore[attr-defined]
        if row["id"] == "s"
    ]
    assert "SourceCorrupt" == row["quarantine"]
    time.now += 61
    changes = await read_until(subscriber, '"silent":true')
    assert {"id": "s", "quarantine": None, "quarantined_until": None, "silent": True} in [
        row for _, data in changes for row in data.get("instances", [])  # type: ignore[attr-defined]
    ]  # fmt: skip


async def test_without_pages_nothing_runs(service: PlanService, broadcaster: Broadcaster) -> None:
    """Before the first page and after the last one there is no task, no listener and no row."""
    await service.report(seed_report("s"))
    listeners = service.state._listeners
    initial_task = broadcaster._task
    assert initial_task is None
    assert [] == listeners
    assert {} == broadcaster._fleet_diff._instances
    subscriber = await broadcaster.subscribe()
    assert 1 == len(listeners)
    assert 1 == len(broadcaster._fleet_diff._instances)
    task = broadcaster._task
    broadcaster.unsubscribe(subscriber)
    assert task is not None
    await asyncio.gather(task, return_exceptions=True)
    assert broadcaster._task is None
    assert [] == service.state._listeners
    assert {} == broadcaster._fleet_diff._instances
    assert {} == broadcaster._fleet_diff._forks


async def test_the_number_of_pages_is_limited(broadcaster: Broadcaster) -> None:
    """One page too many is rejected with Retry-After."""
    for _ in range(feeds.MAX_SUBSCRIBERS):
        await broadcaster.subscribe()
    with pytest.raises(ProblemError) as refused:
        await broadcaster.subscribe()
    assert 503 == refused.value.status
    assert "too-many-streams" == refused.value.slug


async def test_a_slow_page_restarts_from_the_full_state(service: PlanService, broadcaster: Broadcaster) -> None:
    """Its queue is bounded; on overflow it receives the full state."""
    await service.report(seed_report("s"))
    subscriber = await broadcaster.subscribe()
    await read_until(subscriber, "event: ready")
    for _ in range(MAX_QUEUED + 1):
        subscriber.put(b"event: change\ndata: {}\n\n")
    assert subscriber.needs_restart
    await service.report(seed_report("t"))
    resent = await read_until(subscriber, "event: ready")
    assert "begin" == resent[0][0]
    assert ["s", "t"] == ids(resent, "instances")


async def test_the_number_of_rows_per_turn_is_limited(
    service: PlanService, broadcaster: Broadcaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further changes are sent in later turns, and none is lost."""
    monkeypatch.setattr(fleet_diff, "MAX_ROWS", 3)
    subscriber = await broadcaster.subscribe()
    await read_until(subscriber, "event: ready")
    for index in range(10):
        await service.report(seed_report(f"s{index}"))
    messages = await read_until(subscriber, '"id":"s9"')
    assert 4 == len([data for _, data in messages if "instances" in data])
    assert [f"s{index}" for index in range(10)] == ids(messages, "instances")


async def test_a_store_reload_restarts_every_page(service: PlanService, broadcaster: Broadcaster) -> None:
    """The reload may have removed what was sent."""
    await service.report(seed_report("s"))
    subscriber = await broadcaster.subscribe()
    await read_until(subscriber, "event: ready")
    state = service.state
    record = state.instance("s")
    assert record is not None
    state.clear()
    state.apply(StoreChange(instances=(replace(record, report=seed_report("t")),)))
    state.notify_reloaded()
    resent = await read_until(subscriber, "event: ready")
    assert "begin" == resent[0][0]
    assert ["t"] == ids(resent, "instances")


async def test_the_oldest_finished_forks_are_dropped(
    service: PlanService, broadcaster: Broadcaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page keeps the last finished forks, and receives the ids to drop."""
    monkeypatch.setattr(fleet_diff, "MAX_ENDED", 2)
    subscriber = await broadcaster.subscribe()
    await read_until(subscriber, "event: ready")
    for name in "abc":
        await service.plan(fork_request(name))
        await service.finish(f"fork-{name}", ForkResult(outcome="failed", seconds=1, bytes_read=0))
    messages = await read_until(subscriber, "dropped")
    assert ["fork-a"] == messages[-1][1]["dropped"]


async def test_a_planner_shutdown_ends_page_streams(broadcaster: Broadcaster) -> None:
    """Waiting pages are woken, and new ones are rejected."""
    subscriber = await broadcaster.subscribe()
    await read_until(subscriber, "event: ready")
    broadcaster.close()
    assert b"" == await subscriber.next_messages(60)
    with pytest.raises(ProblemError, match="shutting down"):
        await broadcaster.subscribe()


def test_a_row_is_sent_as_its_changes() -> None:
    """Changed fields are included, removed ones are None, and unchanged ones are omitted."""
    old: Row = {"id": "s", "verified": 3, "slow": True, "host": "h"}
    assert old == row_diff(None, old)
    assert {} == row_diff(old, {**old})
    expected = {"id": "s", "verified": 4, "slow": None, "rate": 1}
    assert expected == row_diff(old, {"id": "s", "verified": 4, "host": "h", "rate": 1})


async def test_a_finished_and_forgotten_fork_is_dropped() -> None:
    """If this happens between two polls, it must not stay on the page."""
    small = make_service(FakeTime(), heartbeat_interval_s=5, max_finished_forks=1)
    broadcaster = Broadcaster(small, heartbeat_s=5, flush_interval_s=0)
    await small.report(seed_report("s", max_readers=4))
    for name in "ab":
        await small.plan(fork_request(name))
    subscriber = await broadcaster.subscribe()
    await read_until(subscriber, "event: ready")
    for name in "ab":
        await small.finish(f"fork-{name}", ForkResult(outcome="forked", seconds=1, bytes_read=1))
    [(_, change)] = await read_until(subscriber, "dropped")
    assert ["fork-b"] == ids([("", change)], "forks")
    assert ["fork-a"] == change["dropped"]
    assert ["fork-b"] == list(broadcaster._fleet_diff._forks)
    broadcaster.close()
    broadcaster.unsubscribe(subscriber)


async def test_a_failed_feed_rejects_pages(
    service: PlanService, broadcaster: Broadcaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting pages are rejected too, and their slots are released."""

    def broken(*_: object) -> Row:
        raise ValueError("a row that cannot be built")

    await service.report(seed_report("s"))
    with monkeypatch.context() as patch:
        patch.setattr(fleet_diff, "instance_row", broken)
        async with timeout(10):
            both = await asyncio.gather(broadcaster.subscribe(), broadcaster.subscribe(), return_exceptions=True)
    assert [(503, "not-ready")] * 2 == [(each.status, each.slug) for each in both if isinstance(each, ProblemError)]
    assert {} == broadcaster._subscribers
    assert ["s"] == ids(await read_until(await broadcaster.subscribe(), "event: ready"), "instances")


async def test_time_saved_includes_removed_models(service: PlanService, broadcaster: Broadcaster) -> None:
    """It is sent with the first totals, or omitted while unknown."""
    size = seed_report("s").image_bytes
    await service.report(seed_report("s"))
    before = await read_until(await broadcaster.subscribe(), "event: ready")
    for name, source, seconds in (("a", "snapshot:file:///x", 9.0), ("b", "s", 2.0)):
        await service.plan(fork_request(name))
        end = ForkResult(outcome="forked", seconds=seconds, bytes_read=size, sources={source: size})
        await service.finish(f"fork-{name}", end)
    for name in ("s", "a", "b"):
        await service.remove(name)
    for subscriber in list(broadcaster._subscribers):
        broadcaster.unsubscribe(subscriber)
    after = await read_until(await broadcaster.subscribe(), "event: ready")
    assert [None] == [data["seconds_saved"] for _, data in before if "seconds_saved" in data]
    assert [7.0] == [data["seconds_saved"] for _, data in after if "seconds_saved" in data]
