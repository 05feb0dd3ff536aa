from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from planner.integrations.kubernetes.cluster import ClusterUnavailable, NotFound, ResourceConflict
from planner.integrations.kubernetes.controller.actions import MAX_CONCURRENT, Action, ActionExecutor
from planner.integrations.kubernetes.controller.metrics import ControllerMetrics
from planner.integrations.planner_api import PlannerUnavailable
from tests.unit.fake_clock import FakeClock


class ExecutorHarness:
    """Actions that are counted, at a time that stands still."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.executor = ActionExecutor(self.clock, ControllerMetrics(CollectorRegistry()))
        self.started: list[str] = []

    def action(self, name: str, error: Exception | None = None) -> Action:
        """One that fails so."""

        async def call() -> None:
            self.started.append(name)
            if error is not None:
                raise error

        return Action("event", name, call)

    async def run(self, *actions: Action, allowed: Callable[[], bool] = lambda: True) -> list[str]:
        """Which of them were begun."""
        self.started = []
        await self.executor.run(actions, allowed)
        return self.started


@pytest.mark.parametrize(
    "error", [ClusterUnavailable("refused"), PlannerUnavailable("422"), KeyError("defect"), TimeoutError()]
)
async def test_a_failure_stops_no_other_and_waits(error: Exception) -> None:
    """It is tried again after 2 s, then after 4 s more, and so on up to two minutes."""
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
async def test_what_is_not_there_any_more_is_no_failure(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """The watch will say so; nothing is logged."""
    harness = ExecutorHarness()
    for _ in range(2):
        assert ["bad"] == await harness.run(harness.action("bad", error))
    assert [] == caplog.records


async def test_one_reason_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is tried: one line for each reason, until something succeeds."""
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


async def test_where_nobody_answers_the_rest_is_left() -> None:
    """A thousand Pods are not asked about one by one while the API server is away."""
    harness = ExecutorHarness()
    away = [harness.action(str(number), ClusterUnavailable("no answer")) for number in range(1000)]
    assert len(await harness.run(*away)) in range(2 * MAX_CONCURRENT, 3 * MAX_CONCURRENT)


async def test_who_leads_no_more_begins_nothing() -> None:
    """It is asked before each."""
    harness = ExecutorHarness()
    assert ["a", "b"] == await harness.run(
        *(harness.action(name) for name in "abcd"), allowed=lambda: len(harness.started) < 2
    )


async def test_few_are_under_way_at_once() -> None:
    """And all are done."""
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
    assert (MAX_CONCURRENT, 50) == (max_in_flight, done)
