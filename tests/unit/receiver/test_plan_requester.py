"""A planner that does not answer the first question: when it is asked again, and when no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import httpx
import pytest
import torch
from torch import nn

from rfork.image.capture import capture
from rfork.receiver import plan_requester
from rfork.receiver.report import ForkReport
from rfork.schema import Plan
from rfork.settings import InstanceSettings
from tests.unit.receiver.fake_planner import FakePlanner, problem_response
from tests.unit.receiver.fleet import Fleet, Script, plan, route, settings
from tests.unit.receiver.sessions import ALL, TWOS, Model, session

Failure = httpx.RequestError | httpx.Response


class FlakyPlanner(FakePlanner):
    """Answers the first questions as it is told, then with `next_plan`."""

    def __init__(self, failures: Sequence[Failure], next_plan: Callable[[], Plan]) -> None:
        super().__init__(Script([next_plan]))
        self._failures = list(failures)
        self.requested_fork_ids: list[str] = []
        self.on_request: Callable[[], None] = lambda: None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/forks":
            self.requested_fork_ids.append(str(httpx.Response(200, content=request.read()).json()["fork_id"]))
            self.on_request()
            if self._failures:
                response = self._failures.pop(0)
                if isinstance(response, httpx.RequestError):
                    raise response
                return response
        return super().handle_request(request)


class FakeTimeModule:
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
def short_retry_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two questions."""
    monkeypatch.setattr(plan_requester, "RETRY_INTERVAL_S", 0.01)


def run_fork(fleet: Fleet, planner: FakePlanner, chosen: InstanceSettings | None = None) -> ForkReport:
    """What came of a fork that could load twos by itself."""
    report = session(fleet, Model(1.0), planner, TWOS, chosen=chosen).run()
    assert report.seed is not None
    report.seed.close()
    return report


READ_TIMEOUT = httpx.ReadTimeout("no word")
CONNECTION_REFUSED = httpx.ConnectError("refused")
TRANSIENT_FAILURES = {
    "silent": [READ_TIMEOUT],
    "restarting": [CONNECTION_REFUSED, CONNECTION_REFUSED, CONNECTION_REFUSED],
    "restarting, then silent": [CONNECTION_REFUSED, READ_TIMEOUT, CONNECTION_REFUSED],
    "without its store": [
        problem_response(503, "store-unavailable"),
        problem_response(503, "store-unavailable"),
    ],
    "behind a proxy": [httpx.Response(502, text="bad gateway"), httpx.Response(504, text="timeout")],
    "too much to do": [problem_response(429, "too-many-requests")],
}


@pytest.mark.parametrize("failures", TRANSIENT_FAILURES.values(), ids=list(TRANSIENT_FAILURES))
def test_a_planner_that_is_away_for_a_moment_is_asked_again(fleet: Fleet, failures: Sequence[Failure]) -> None:
    """Under the same fork's id, so that it takes its own place among those that wait; and it forks."""
    seed = fleet.source("a", capture(Model(3.0)))
    planner = FlakyPlanner(failures, lambda: plan(route(seed, ALL)))
    report = run_fork(fleet, planner)
    assert ("forked", (), [report.fork_id] * (len(failures) + 1)) == (
        report.outcome, report.reasons, planner.requested_fork_ids,
    )  # fmt: skip


PERMANENT_FAILURES = {
    "silent": ([READ_TIMEOUT] * 9, {}, 2),
    "silent, and no patience": ([READ_TIMEOUT] * 9, {"no_source_timeout_s": 0}, 1),
    "away, and no patience": ([CONNECTION_REFUSED] * 9, {"no_source_timeout_s": 0}, 1),
    "a wrong token": ([problem_response(401, "unauthorized")] * 9, {}, 1),
    "broken": ([problem_response(500, "internal-error")] * 9, {}, 1),
}


@pytest.mark.parametrize(("failures", "changed", "expected"), PERMANENT_FAILURES.values(), ids=list(PERMANENT_FAILURES))
def test_a_planner_that_will_not_answer_is_left(
    fleet: Fleet,
    failures: Sequence[Failure],
    changed: dict[str, float],
    expected: int,
) -> None:
    """After a second call where it was silent, after the first where it refuses: twos are loaded instead."""
    planner = FlakyPlanner(failures, lambda: plan(reason="nobody"))
    report = run_fork(fleet, planner, settings(**changed))
    assert ("twos", expected) == (report.fallback, len(planner.requested_fork_ids))


def test_a_planner_that_is_gone_is_left_after_a_while(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked more than once until then, however patient the fork is otherwise."""
    monkeypatch.setattr(plan_requester, "MAX_PLANNER_OUTAGE_S", 0.1)
    monkeypatch.setattr(plan_requester, "time", FakeTimeModule(time.monotonic()))
    planner = FlakyPlanner([CONNECTION_REFUSED] * 1000, lambda: plan(reason="nobody"))
    report = run_fork(fleet, planner, settings(deadline_s=600))
    assert ("twos", True, True) == (
        report.fallback,
        len(planner.requested_fork_ids) > 1,
        len(planner.requested_fork_ids) < 1000,
    )


def test_the_time_of_a_call_that_nothing_answers_counts(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting took longer than a planner may be away: it is not tried a second time."""
    clock = FakeTimeModule(time.monotonic())
    monkeypatch.setattr(plan_requester, "time", clock)
    planner = FlakyPlanner([httpx.ConnectTimeout("nothing answers")] * 9, lambda: plan(reason="nobody"))
    planner.on_request = lambda: clock.sleep(5.0)
    report = run_fork(fleet, planner, settings(deadline_s=600))
    assert ("twos", 1) == (report.fallback, len(planner.requested_fork_ids))


def test_nobody_is_asked_again_after_the_deadline(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork's own time is over before the planner's is."""
    monkeypatch.setattr(plan_requester, "MAX_PLANNER_OUTAGE_S", 60.0)
    planner = FlakyPlanner([CONNECTION_REFUSED] * 1000, lambda: plan(reason="nobody"))
    report = run_fork(fleet, planner, settings(deadline_s=0.2))
    assert ("twos", True) == (report.fallback, len(planner.requested_fork_ids) < 1000)


def test_who_reads_already_is_not_held_up(fleet: Fleet) -> None:
    """A planner that goes away in mid-fork is asked again while what there is to read is read."""
    seed = fleet.source("a", capture(Model(3.0)))
    plans = iter([lambda: plan(route(seed, (0, 2))), lambda: plan(route(seed, ALL))])

    def next_plan() -> Plan:
        response = next(plans)()
        planner._failures = [CONNECTION_REFUSED] if len(planner.requested_fork_ids) == 1 else []
        return response

    planner = FlakyPlanner([], next_plan)
    report = run_fork(fleet, planner)
    assert ("forked", 3) == (report.outcome, len(planner.requested_fork_ids))
