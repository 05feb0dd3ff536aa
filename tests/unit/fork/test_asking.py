"""A planner that does not answer the first question: when it is asked again, and when no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import httpx
import pytest
import torch
from torch import nn

from rfork.fork import asking
from rfork.fork.report import ForkReport
from rfork.image.capture import capture
from rfork.settings import Settings
from rfork.wire import Plan
from tests.unit.fork.fleet import Fleet, Script, plan, route, settings
from tests.unit.fork.planner import FakePlanner, problem
from tests.unit.fork.sessions import ALL, TWOS, Model, session

Answer = httpx.RequestError | httpx.Response


class Planner(FakePlanner):
    """Answers the first questions as it is told, then with `rest`."""

    def __init__(self, first: Sequence[Answer], rest: Callable[[], Plan]) -> None:
        super().__init__(Script([rest]))
        self._first = list(first)
        self.asked: list[str] = []
        self.each_costs: Callable[[], None] = lambda: None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/forks":
            self.asked.append(str(httpx.Response(200, content=request.read()).json()["fork_id"]))
            self.each_costs()
            if self._first:
                answer = self._first.pop(0)
                if isinstance(answer, httpx.RequestError):
                    raise answer
                return answer
        return super().handle_request(request)


class Clock:
    """In the place of `time`: moves when somebody sleeps."""

    def __init__(self, now: float) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def load_twos(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("weight").fill_(2.0)


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two questions."""
    monkeypatch.setattr(asking, "PAUSE_S", 0.01)


def forked(fleet: Fleet, planner: FakePlanner, chosen: Settings | None = None) -> ForkReport:
    """What came of a fork that could load twos by itself."""
    report = session(fleet, Model(1.0), planner, TWOS, chosen=chosen).run()
    assert report.seed is not None
    report.seed.close()
    return report


SILENT = httpx.ReadTimeout("no word")
AWAY = httpx.ConnectError("refused")
MOMENTS = {
    "silent": [SILENT],
    "restarting": [AWAY, AWAY, AWAY],
    "restarting, then silent": [AWAY, SILENT, AWAY],
    "without its store": [problem(503, "store-unavailable"), problem(503, "store-unavailable")],
    "behind a proxy": [httpx.Response(502, text="bad gateway"), httpx.Response(504, text="timeout")],
    "too much to do": [problem(429, "too-many-requests")],
}


@pytest.mark.parametrize("first", MOMENTS.values(), ids=list(MOMENTS))
def test_a_planner_that_is_away_for_a_moment_is_asked_again(fleet: Fleet, first: Sequence[Answer]) -> None:
    """Under the same fork's id, so that it takes its own place among those that wait; and it forks."""
    seed = fleet.source("a", capture(Model(3.0)))
    planner = Planner(first, lambda: plan(route(seed, ALL)))
    report = forked(fleet, planner)
    assert ("forked", (), [report.fork_id] * (len(first) + 1)) == (
        report.outcome, report.reasons, planner.asked,
    )  # fmt: skip


GONE = {
    "silent": ([SILENT] * 9, {}, 2),
    "silent, and no patience": ([SILENT] * 9, {"patience_s": 0}, 1),
    "away, and no patience": ([AWAY] * 9, {"patience_s": 0}, 1),
    "a wrong token": ([problem(401, "unauthorized")] * 9, {}, 1),
    "broken": ([problem(500, "internal-error")] * 9, {}, 1),
}


@pytest.mark.parametrize(("first", "changed", "expected"), GONE.values(), ids=list(GONE))
def test_a_planner_that_will_not_answer_is_left(
    fleet: Fleet,
    first: Sequence[Answer],
    changed: dict[str, float],
    expected: int,
) -> None:
    """After a second call where it was silent, after the first where it refuses: twos are loaded instead."""
    planner = Planner(first, lambda: plan(reason="nobody"))
    report = forked(fleet, planner, settings(**changed))
    assert ("twos", expected) == (report.fallback, len(planner.asked))


def test_a_planner_that_is_gone_is_left_after_a_while(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked more than once until then, however patient the fork is otherwise."""
    monkeypatch.setattr(asking, "AWAY_S", 0.1)
    monkeypatch.setattr(asking, "time", Clock(time.monotonic()))
    planner = Planner([AWAY] * 1000, lambda: plan(reason="nobody"))
    report = forked(fleet, planner, settings(deadline_s=600))
    assert ("twos", True, True) == (report.fallback, len(planner.asked) > 1, len(planner.asked) < 1000)


def test_the_time_of_a_call_that_nothing_answers_counts(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting took longer than a planner may be away: it is not tried a second time."""
    clock = Clock(time.monotonic())
    monkeypatch.setattr(asking, "time", clock)
    planner = Planner([httpx.ConnectTimeout("nothing answers")] * 9, lambda: plan(reason="nobody"))
    planner.each_costs = lambda: clock.sleep(5.0)
    report = forked(fleet, planner, settings(deadline_s=600))
    assert ("twos", 1) == (report.fallback, len(planner.asked))


def test_nobody_is_asked_again_after_the_deadline(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork's own time is over before the planner's is."""
    monkeypatch.setattr(asking, "AWAY_S", 60.0)
    planner = Planner([AWAY] * 1000, lambda: plan(reason="nobody"))
    report = forked(fleet, planner, settings(deadline_s=0.2))
    assert ("twos", True) == (report.fallback, len(planner.asked) < 1000)


def test_who_reads_already_is_not_held_up(fleet: Fleet) -> None:
    """A planner that goes away in mid-fork is asked again while what there is to read is read."""
    seed = fleet.source("a", capture(Model(3.0)))
    answers = iter([lambda: plan(route(seed, (0, 2))), lambda: plan(route(seed, ALL))])

    def rest() -> Plan:
        answer = next(answers)()
        planner._first = [AWAY] if len(planner.asked) == 1 else []
        return answer

    planner = Planner([], rest)
    report = forked(fleet, planner)
    assert ("forked", 3) == (report.outcome, len(planner.asked))
