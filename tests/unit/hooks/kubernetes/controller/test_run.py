from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from planner.hooks.fleet import PlannerAway
from planner.hooks.kubernetes.cluster import ClusterUnavailable, News, PodSeen
from planner.hooks.kubernetes.controller.run import run
from planner.hooks.probes import Status
from rfork.settings import HookSettings
from tests.unit.clock import Clock
from tests.unit.hooks.kubernetes.fake_cluster import FakeCluster, uid
from tests.unit.hooks.kubernetes.fake_fleet import FakeFleet

LEASE_S = 6.0
"""By the real clock: who leads is to do so still, although the machine was busy for some seconds."""


class Running:
    """Replicas of the controller that run, over one cluster and one planner."""

    def __init__(self) -> None:
        self.clock = Clock(1000.0)
        self.cluster = FakeCluster(self.clock)
        self.fleet = FakeFleet(self.clock)

    @contextlib.asynccontextmanager
    async def replica(self, name: str) -> AsyncIterator[Status]:
        """One more; it is cancelled in the end, as a process that is told to stop cancels it."""
        settings, status = (
            HookSettings(namespace="n", identity=name, look_s=0.01, lease_s=LEASE_S),
            Status("controller"),
        )
        task = asyncio.create_task(run(settings, self.cluster, self.fleet, status, clock=self.clock))
        try:
            yield status
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_a_replica_leads_and_acts() -> None:
    """It sees a scale-up by its watch, announces it, tells people, and says that it is ready and leads."""
    running = Running()
    async with running.replica("one") as status:
        running.cluster.deploy(1, 2)
        await running.cluster.until(lambda: bool(running.cluster.events))
        assert [f"announce {uid(1)} 2"] == running.fleet.calls
        while status.why_not is not None:
            await asyncio.sleep(0)
        assert (True, None) == (status.leads, status.why_not)
        assert 1 == status.registry.get_sample_value("rfork_controller_leader")


async def test_the_next_replica_goes_on_when_the_first_is_stopped() -> None:
    """The first gives up the lead as it ends; the second, which has seen everything, acts from then on."""
    running = Running()
    deployment = running.cluster.deploy(1, 2)
    async with contextlib.AsyncExitStack() as second:
        async with running.replica("one") as first:
            await running.cluster.until(lambda: bool(running.cluster.events))
            other = await second.enter_async_context(running.replica("two"))
        running.cluster.scale(deployment, 5)
        await running.cluster.until(lambda: len(running.cluster.events) == 2)
        assert (False, True) == (first.leads, other.leads)
    assert [f"announce {uid(1)} 2", f"announce {uid(1)} 5"] == running.fleet.calls


async def test_a_watch_that_ends_ends_the_controller() -> None:
    """No watch ends by itself: a controller that is blind fails, to be started again."""

    class Blind(FakeCluster):
        async def pods(self) -> AsyncIterator[News[PodSeen]]:
            for news in list[News[PodSeen]]():
                yield news

    clock = Clock()
    with pytest.raises(ExceptionGroup) as failed:
        await run(
            HookSettings(namespace="n", identity="one"), Blind(clock), FakeFleet(clock), Status("controller")
        )
    assert failed.group_contains(ClusterUnavailable, match="the watch of pods ended")


async def test_what_is_unexpected_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A planner that answers nonsense is logged once; once it answers, the controller acts."""
    running = Running()
    tries = 0

    async def nonsense(self: FakeFleet) -> tuple[()]:
        nonlocal tries
        tries += 1
        if tries == 3:
            monkeypatch.undo()
        raise KeyError("forks")

    monkeypatch.setattr(FakeFleet, "forks", nonsense)
    running.cluster.deploy(1, 2)
    async with running.replica("one"):
        await running.cluster.until(lambda: bool(running.cluster.events))
    assert [f"announce {uid(1)} 2"] == running.fleet.calls
    assert 1 == sum("reconciling failed" in record.message for record in caplog.records)


async def test_a_leader_that_is_stopped_as_the_planner_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its three questions at once the failure is told, and not that they were cancelled."""

    async def fails(self: FakeFleet) -> tuple[()]:
        (leader,) = [task for task in asyncio.all_tasks() if task.get_name() == "rfork-leader"]
        asyncio.get_running_loop().call_soon(leader.cancel)
        raise PlannerAway("no answer")

    async def silent(self: FakeFleet) -> tuple[()]:
        await asyncio.Event().wait()
        return ()

    running = Running()
    async with running.replica("one") as status:
        while not status.leads:
            await asyncio.sleep(0)
        monkeypatch.setattr(FakeFleet, "forks", fails)
        monkeypatch.setattr(FakeFleet, "scaleups", silent)
        while running.fleet.looks < 2 and status.leads:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not status.leads
