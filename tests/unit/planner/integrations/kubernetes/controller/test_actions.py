"""Execution of actions: concurrency, retries and logs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from planner.integrations.kubernetes.api_server import ClusterUnavailable, NotFound, ResourceConflict
from planner.integrations.kubernetes.controller.actions import MAX_CONCURRENT, Action, ActionExecutor, ControllerMetrics
from planner.integrations.planner_api import PlannerUnavailable
from tests.unit.fake_clock import FakeClock


class ExecutorHarness:
    """An executor with recorded actions and a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.executor = ActionExecutor(self.clock, ControllerMetrics(CollectorRegistry()))
        self.started: list[str] = []

    def action(self, name: str, error: Exception | None = None) -> Action:
        """Return an action that raises `error`."""

        async def call() -> None:
            self.started.append(name)
            if error is not None:
                raise error

        return Action("event", name, call)

    async def run(self, *actions: Action, allowed: Callable[[], bool] = lambda: True) -> list[str]:
        """Run the actions and return those that started."""
        self.started = []
        await self.executor.run(actions, allowed)
        return self.started


@pytest.mark.parametrize(
    "error", [ClusterUnavailable("refused"), PlannerUnavailable("422"), KeyError("defect"), TimeoutError()]
)
async def test_a_failed_action_backs_off_and_others_run(error: Exception) -> None:
    """It is retried after 2 s, then 4 s, and so on up to two minutes."""
    harness = ExecutorHarness()
    actions = harness.action("bad", error), harness.action("good")
    started = []
    for second in range(600):
        harness.clock.now = float(second)
        if "bad" in await harness.run(*actions):
            started.append(second)
        assert "good" in harness.started
    assert [0, 2, 6, 14, 30, 62, 126, 246, 366, 486] == started


@pytest.mark.parametrize("error", [NotFound("pod"), ResourceConflict("pod")])
async def test_a_changed_or_deleted_object_is_no_failure(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """A watch event will follow, so nothing is logged."""
    harness = ExecutorHarness()
    for _ in range(2):
        assert ["bad"] == await harness.run(harness.action("bad", error))
    assert [] == caplog.records


async def test_each_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line per reason until an action succeeds."""
    harness = ExecutorHarness()
    lines = []
    for error in (
        PlannerUnavailable("away"),
        PlannerUnavailable("away"),
        PlannerUnavailable("refused"),
        None,
        PlannerUnavailable("away"),
    ):
        harness.clock.now += 1000
        await harness.run(*(harness.action(name, error) for name in "abc"))
        lines.append(len(caplog.records))
    assert [1, 1, 2, 2, 3] == lines


async def test_many_failures_in_a_row_stop_the_run() -> None:
    """While the API server is down, a thousand Pods are not tried one by one."""
    harness = ExecutorHarness()
    away = [harness.action(str(number), ClusterUnavailable("no response")) for number in range(1000)]
    assert len(await harness.run(*away)) in range(2 * MAX_CONCURRENT, 3 * MAX_CONCURRENT)


async def test_nothing_starts_after_leadership_is_lost() -> None:
    """Leadership is checked before each action."""
    harness = ExecutorHarness()
    assert ["a", "b"] == await harness.run(
        *(harness.action(name) for name in "abcd"), allowed=lambda: len(harness.started) < 2
    )


async def test_concurrency_is_limited() -> None:
    """All actions run, a limited number at a time."""
    in_flight = max_in_flight = done = 0

    async def call() -> None:
        nonlocal in_flight, max_in_flight, done
        in_flight += 1
        max_in_flight = max(max_in_flight, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1
        done += 1

    calls: list[Callable[[], Awaitable[None]]] = [call] * 50
    executor = ActionExecutor(FakeClock(), ControllerMetrics(CollectorRegistry()))
    await executor.run([Action("event", str(number), one) for number, one in enumerate(calls)], lambda: True)
    assert MAX_CONCURRENT == max_in_flight
    assert 50 == done
