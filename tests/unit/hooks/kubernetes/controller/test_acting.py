from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from planner.hooks.fleet import PlannerAway
from planner.hooks.kubernetes.cluster import ClusterUnavailable, Conflict, Gone
from planner.hooks.kubernetes.controller.acting import AT_ONCE, Acting, Action
from planner.hooks.kubernetes.controller.metrics import Metrics
from tests.unit.clock import Clock


class Bench:
    """Actions that are counted, at a time that stands still."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.acting = Acting(self.clock, Metrics(CollectorRegistry()))
        self.begun: list[str] = []

    def action(self, name: str, error: Exception | None = None) -> Action:
        """One that fails so."""

        async def call() -> None:
            self.begun.append(name)
            if error is not None:
                raise error

        return Action("event", name, call)

    async def do(self, *actions: Action, allowed: Callable[[], bool] = lambda: True) -> list[str]:
        """Which of them were begun."""
        self.begun = []
        await self.acting.do(actions, allowed)
        return self.begun


@pytest.mark.parametrize(
    "error", [ClusterUnavailable("refused"), PlannerAway("422"), KeyError("defect"), TimeoutError()]
)
async def test_a_failure_stops_no_other_and_waits(error: Exception) -> None:
    """It is tried again after 2 s, then after 4 s more, and so on up to two minutes."""
    bench = Bench()
    actions = bench.action("bad", error), bench.action("good")
    begun = []
    for second in range(600):
        bench.clock.now = float(second)
        if "bad" in await bench.do(*actions):
            begun.append(second)
        assert "good" in bench.begun
    assert [0, 2, 6, 14, 30, 62, 126, 246, 366, 486] == begun


@pytest.mark.parametrize("error", [Gone("pod"), Conflict("pod")])
async def test_what_is_not_there_any_more_is_no_failure(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch will say so; nothing is logged."""
    bench = Bench()
    for _ in range(2):
        assert ["bad"] == await bench.do(bench.action("bad", error))
    assert [] == caplog.records


async def test_one_reason_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is tried: one line for each reason, until something succeeds."""
    bench = Bench()
    lines = []
    for error in (
        PlannerAway("away"),
        PlannerAway("away"),
        PlannerAway("refused"),
        None,
        PlannerAway("away"),
    ):
        bench.clock.now += 1000
        await bench.do(*(bench.action(name, error) for name in "abc"))
        lines.append(len(caplog.records))
    assert [1, 1, 2, 2, 3] == lines


async def test_where_nobody_answers_the_rest_is_left() -> None:
    """A thousand Pods are not asked about one by one while the API server is away."""
    bench = Bench()
    away = [bench.action(str(number), ClusterUnavailable("no answer")) for number in range(1000)]
    assert len(await bench.do(*away)) in range(2 * AT_ONCE, 3 * AT_ONCE)


async def test_who_leads_no_more_begins_nothing() -> None:
    """It is asked before each."""
    bench = Bench()
    assert ["a", "b"] == await bench.do(
        *(bench.action(name) for name in "abcd"), allowed=lambda: len(bench.begun) < 2
    )


async def test_few_are_under_way_at_once() -> None:
    """And all are done."""
    under_way = most = done = 0

    async def call() -> None:
        nonlocal under_way, most, done
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        done += 1

    calls: list[Callable[[], Awaitable[None]]] = [call] * 50
    acting = Acting(Clock(), Metrics(CollectorRegistry()))
    await acting.do([Action("event", str(number), one) for number, one in enumerate(calls)], lambda: True)
    assert (AT_ONCE, 50) == (most, done)
