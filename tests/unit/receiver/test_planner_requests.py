"""Plan requests to a planner that fails, and the explanation of layout mismatches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import httpx
import pytest
import torch
from torch import nn

from rfork.image.capture import capture, image_from_tensors
from rfork.image.layout import tag_tensors
from rfork.receiver import planner_requests
from rfork.receiver.planner_requests import explain_layout_mismatch
from rfork.receiver.report import ForkReport
from rfork.schema import Plan
from rfork.settings import InstanceSettings
from tests.unit.receiver.fake_planner import FakePlanner, problem_response
from tests.unit.receiver.fleet import NEVER_S, Fleet, Script, plan, route, settings
from tests.unit.receiver.sessions import ALL, TWOS, Model, session

Failure = httpx.RequestError | httpx.Response


class FlakyPlanner(FakePlanner):
    """Fails the first requests as scripted, then responds with `next_plan`."""

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
    """Replacement of `time` whose clock advances only by `sleep`."""

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
    """Shorten the interval between two requests."""
    monkeypatch.setattr(planner_requests, "RETRY_INTERVAL_S", 0.01)


def run_fork(fleet: Fleet, planner: FakePlanner, chosen: InstanceSettings | None = None) -> ForkReport:
    """Return the report of a fork whose fallback loads twos."""
    report = session(fleet, Model(1.0), planner, TWOS, chosen=chosen).run()
    assert report.seed is not None
    report.seed.close()
    return report


READ_TIMEOUT = httpx.ReadTimeout("no response")
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
    "rate limited": [problem_response(429, "too-many-requests")],
}


@pytest.mark.parametrize("failures", TRANSIENT_FAILURES.values(), ids=list(TRANSIENT_FAILURES))
def test_a_temporary_planner_failure_is_retried(fleet: Fleet, failures: Sequence[Failure]) -> None:
    """The retry has the same fork id, so the fork keeps its position in the planner's queue."""
    seed = fleet.source("a", capture(Model(3.0)))
    planner = FlakyPlanner(failures, lambda: plan(route(seed, ALL)))
    report = run_fork(fleet, planner)
    assert "forked" == report.outcome
    assert () == report.reasons
    assert [report.fork_id] * (len(failures) + 1) == planner.requested_fork_ids


PERMANENT_FAILURES = {
    "silent": ([READ_TIMEOUT] * 9, {}, 2),
    "silent, no timeout left": ([READ_TIMEOUT] * 9, {"no_source_timeout_s": 0}, 1),
    "unreachable, no timeout left": ([CONNECTION_REFUSED] * 9, {"no_source_timeout_s": 0}, 1),
    "invalid token": ([problem_response(401, "unauthorized")] * 9, {}, 1),
    "broken": ([problem_response(500, "internal-error")] * 9, {}, 1),
}


@pytest.mark.parametrize(("failures", "changed", "expected"), PERMANENT_FAILURES.values(), ids=list(PERMANENT_FAILURES))
def test_a_permanent_planner_failure_ends_in_the_fallback(
    fleet: Fleet,
    failures: Sequence[Failure],
    changed: dict[str, float],
    expected: int,
) -> None:
    """A silent planner receives a second request, one that rejects the first does not."""
    planner = FlakyPlanner(failures, lambda: plan(reason="no source"))
    report = run_fork(fleet, planner, settings(**changed))
    assert "twos" == report.fallback
    assert expected == len(planner.requested_fork_ids)


def test_an_unreachable_planner_is_abandoned_after_the_outage_limit(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is retried until then, even if the fork's own deadline is later."""
    monkeypatch.setattr(planner_requests, "MAX_PLANNER_OUTAGE_S", 0.1)
    monkeypatch.setattr(planner_requests, "time", FakeTimeModule(time.monotonic()))
    planner = FlakyPlanner([CONNECTION_REFUSED] * 1000, lambda: plan(reason="no source"))
    report = run_fork(fleet, planner, settings(deadline_s=600))
    assert "twos" == report.fallback
    assert len(planner.requested_fork_ids) > 1
    assert len(planner.requested_fork_ids) < 1000


def test_the_duration_of_a_failed_request_counts_towards_the_outage(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting took longer than the outage limit, so there is no second attempt."""
    clock = FakeTimeModule(time.monotonic())
    monkeypatch.setattr(planner_requests, "time", clock)
    planner = FlakyPlanner([httpx.ConnectTimeout("connect timed out")] * 9, lambda: plan(reason="no source"))
    planner.on_request = lambda: clock.sleep(5.0)
    report = run_fork(fleet, planner, settings(deadline_s=600))
    assert "twos" == report.fallback
    assert 1 == len(planner.requested_fork_ids)


def test_no_request_is_retried_after_the_deadline(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork's deadline comes before the planner's outage limit."""
    monkeypatch.setattr(planner_requests, "MAX_PLANNER_OUTAGE_S", 60.0)
    planner = FlakyPlanner([CONNECTION_REFUSED] * 1000, lambda: plan(reason="no source"))
    report = run_fork(fleet, planner, settings(deadline_s=0.2))
    assert "twos" == report.fallback
    assert len(planner.requested_fork_ids) < 1000


def test_reads_continue_while_the_planner_is_unreachable(fleet: Fleet) -> None:
    """The request is retried while the planned chunks are being read."""
    seed = fleet.source("a", capture(Model(3.0)))
    plans = iter([lambda: plan(route(seed, (0, 2))), lambda: plan(route(seed, ALL))])

    def next_plan() -> Plan:
        response = next(plans)()
        planner._failures = [CONNECTION_REFUSED] if len(planner.requested_fork_ids) == 1 else []
        return response

    planner = FlakyPlanner([], next_plan)
    report = run_fork(fleet, planner)
    assert "forked" == report.outcome
    assert 3 == len(planner.requested_fork_ids)


def explain(fleet: Fleet, *, unreachable: bool = False) -> str:
    seed = fleet.source("a", image_from_tensors({"first": torch.zeros(4), "second": torch.zeros(2, 3)}))
    target_image = image_from_tensors({"first": torch.zeros(4), "second": torch.zeros(2, 5, dtype=torch.bfloat16)})
    source_route = route(seed)
    if unreachable:
        fleet.peers.kill(source_route.address)
    return str(explain_layout_mismatch(source_route, target_image.layout, fleet.peers.dial, NEVER_S))


def test_the_first_tensor_that_differs_is_named_on_both_sides(fleet: Fleet) -> None:
    """The message contains name, dtype and shape of both."""
    message = explain(fleet)
    assert [] == [
        part for part in ("second: here bfloat16[2, 5]", "there float32[2, 3]", "another layout") if part not in message
    ]


def test_an_unreachable_source_of_another_layout_is_named(fleet: Fleet) -> None:
    """If the comparison fails, the message names the source and the reason."""
    message = explain(fleet, unreachable=True)
    assert "another layout" in message
    assert "not compared: memory:1: connection refused" in message


def test_a_different_attribute_is_named(fleet: Fleet) -> None:
    """If all tensors are equal, the message contains the attribute's name, its module and both values."""
    target_image, other = (capture(nn.LayerNorm(4, eps=eps)) for eps in (1e-5, 1e-6))
    message = str(
        explain_layout_mismatch(route(fleet.source("a", other)), target_image.layout, fleet.peers.dial, NEVER_S)
    )
    assert message.endswith("first difference: attribute eps: here 1e-05 at the module, there 1e-06 at the module")


def test_image_facts_are_reported_before_tensors(fleet: Fleet) -> None:
    """The facts recorded with two images explain more than the first tensor that differs."""
    sides = []
    for version in ("1", "2"):
        module = nn.Linear(2, int(version))
        vars(module)["rfork"] = {"is": tag_tensors((f"engine toy {version}", "device cpu"))}
        sides.append(capture(module))
    target_image, other = sides
    message = str(
        explain_layout_mismatch(route(fleet.source("a", other)), target_image.layout, fleet.peers.dial, NEVER_S)
    )
    assert message.endswith("first difference: engine: here toy 1; there toy 2")


@pytest.mark.parametrize(
    ("reports", "with_chunks", "expected"), [(0, 0, 0.5), (3, 3, 0.5), (4, 4, 1.0), (19, 3, 0.5), (20, 0, 1.0)]
)
def test_the_first_reports_with_chunks_are_frequent(reports: int, with_chunks: int, expected: float) -> None:
    """Those without chunks too, but not of a target that waits for long."""
    assert expected == planner_requests.progress_interval_s(reports, with_chunks)
