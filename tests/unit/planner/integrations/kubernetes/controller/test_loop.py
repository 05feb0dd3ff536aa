"""The loop of the controller: leadership, watches and errors."""

from __future__ import annotations

import asyncio
import contextlib
from builtins import ExceptionGroup  # type: ignore[attr-defined]  # Python 3.11
from collections.abc import AsyncIterator

import pytest

from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes.api_server import ClusterUnavailable, WatchEvent
from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.kubernetes.controller.controller import run
from planner.integrations.planner_api import PlannerUnavailable
from rfork.settings import KubernetesSettings
from tests.unit.fake_clock import FakeClock
from tests.unit.planner.integrations.kubernetes.fake_cluster import FakeCluster, uid
from tests.unit.planner.integrations.kubernetes.fake_planner_api import FakePlannerApi

LEASE_S = 6.0
"""By the real clock: long enough that a busy machine does not lose the Lease."""


class RunningReplicas:
    """Running replicas of the controller, over one cluster and one planner."""

    def __init__(self) -> None:
        self.clock = FakeClock(1000.0)
        self.cluster = FakeCluster(self.clock)
        self.planner_api = FakePlannerApi(self.clock)

    @contextlib.asynccontextmanager
    async def replica(self, name: str) -> AsyncIterator[IntegrationStatus]:
        """Start another replica; it is cancelled at the end, as a stopping process does."""
        settings, status = (
            KubernetesSettings(namespace="n", identity=name, poll_interval_s=0.01, lease_duration_s=LEASE_S),
            IntegrationStatus("controller"),
        )
        task = asyncio.create_task(run(settings, self.cluster, self.planner_api, status, clock=self.clock))
        try:
            yield status
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_a_replica_becomes_the_leader_and_acts() -> None:
    """It sees a scale-up in its watch, announces it, writes an Event, and reports ready and leader."""
    replicas = RunningReplicas()
    async with replicas.replica("one") as status:
        replicas.cluster.deploy(1, 2)
        await replicas.cluster.wait_until(lambda: bool(replicas.cluster.events))
        assert [f"announce {uid(1)} 2"] == replicas.planner_api.calls
        while status.not_ready_reason is not None:
            await asyncio.sleep(0)
        assert status.is_leader
        assert status.not_ready_reason is None
        assert 1 == status.registry.get_sample_value("rfork_controller_leader")


async def test_the_next_replica_takes_over_when_the_first_stops() -> None:
    """The first releases leadership at its end; the second, which has seen everything, acts from then on."""
    replicas = RunningReplicas()
    deployment = replicas.cluster.deploy(1, 2)
    async with contextlib.AsyncExitStack() as second:
        async with replicas.replica("one") as first:
            await replicas.cluster.wait_until(lambda: bool(replicas.cluster.events))
            other = await second.enter_async_context(replicas.replica("two"))
        replicas.cluster.scale(deployment, 5)
        await replicas.cluster.wait_until(lambda: len(replicas.cluster.events) == 2)
        assert not first.is_leader
        assert other.is_leader
    assert [f"announce {uid(1)} 2", f"announce {uid(1)} 5"] == replicas.planner_api.calls


async def test_the_end_of_a_watch_ends_the_controller() -> None:
    """Watches never end normally: a controller without one fails and is restarted."""

    class EndingWatchCluster(FakeCluster):
        async def pods(self) -> AsyncIterator[WatchEvent[ObservedPod]]:
            for update in list[WatchEvent[ObservedPod]]():
                yield update

    clock = FakeClock()
    with pytest.raises(ExceptionGroup) as failed:
        await run(
            KubernetesSettings(namespace="n", identity="one"),
            EndingWatchCluster(clock),
            FakePlannerApi(clock),
            IntegrationStatus("controller"),
        )
    assert failed.group_contains(ClusterUnavailable, match="the watch of pods ended")


async def test_an_unexpected_error_does_not_end_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error is logged once; once it is fixed, the controller acts."""
    replicas = RunningReplicas()
    tries = 0

    async def nonsense(self: FakePlannerApi) -> tuple[()]:
        nonlocal tries
        tries += 1
        if tries == 3:
            monkeypatch.undo()
        raise KeyError("forks")

    monkeypatch.setattr(FakePlannerApi, "forks", nonsense)
    replicas.cluster.deploy(1, 2)
    async with replicas.replica("one"):
        await replicas.cluster.wait_until(lambda: bool(replicas.cluster.events))
    assert [f"announce {uid(1)} 2"] == replicas.planner_api.calls
    assert 1 == sum("controller failed to reconcile" in record.message for record in caplog.records)


async def test_a_leader_that_is_cancelled_during_a_planner_error_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three concurrent requests the error is raised, not their cancellation; the loop stops anyway."""

    async def fails(self: FakePlannerApi) -> tuple[()]:
        (leader,) = [task for task in asyncio.all_tasks() if task.get_name() == "rfork-leader"]
        asyncio.get_running_loop().call_soon(leader.cancel)
        raise PlannerUnavailable("no response")

    async def never_returns(self: FakePlannerApi) -> tuple[()]:
        await asyncio.Event().wait()
        return ()

    replicas = RunningReplicas()
    async with replicas.replica("one") as status:
        while not status.is_leader:
            await asyncio.sleep(0)
        monkeypatch.setattr(FakePlannerApi, "forks", fails)
        monkeypatch.setattr(FakePlannerApi, "scaleups", never_returns)
        while replicas.planner_api.poll_count < 2 and status.is_leader:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not status.is_leader
