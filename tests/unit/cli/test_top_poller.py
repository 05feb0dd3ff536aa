"""`rfork top` polls the planner with few requests, and survives planner outages."""

from __future__ import annotations

import httpx
import pytest

from rfork.cli.top import MAX_FINISHED_AGE_S, FleetPoller
from rfork.errors import PlannerRejected, PlannerUnreachable
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkPage, InstancePage
from tests.unit.cli.fleet_builders import finished_fork, running_fork


class PlannerStub:
    """A planner with one fork. `is_down`: it does not respond; `status`: of its responses."""

    def __init__(self) -> None:
        self.requested_states: list[str] = []
        self.running = True
        self.is_down = False
        self.status = 200
        self.now = 0.0

    def client(self) -> PlannerClient:
        return PlannerClient("http://planner", transport=httpx.MockTransport(self._handle))

    def pop_requested_states(self) -> list[str]:
        """Return the fork states requested since the last call."""
        requested_states, self.requested_states = self.requested_states, []
        return requested_states

    def _handle(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("connection refused", request=request)
        if self.status != 200:
            problem = {"type": "x/forbidden", "title": "t", "status": self.status, "detail": "no"}
            return httpx.Response(self.status, json=problem)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=[])
        if request.url.path == "/v1/instances":
            return httpx.Response(200, text=InstancePage(items=()).model_dump_json())
        state = request.url.params["state"]
        self.requested_states.append(state)
        running = (running_fork(),) if self.running else ()
        finished = () if self.running else (finished_fork(fork_id="f2"),)
        items = {"running": running, "finished": finished}.get(state, ())
        return httpx.Response(200, text=ForkPage(items=items).model_dump_json())


def test_finished_forks_are_requested_when_one_finished() -> None:
    """They are also requested every ten seconds: a fork may start and finish between two polls."""
    planner = PlannerStub()
    poller = FleetPoller(planner.client(), clock=lambda: planner.now)
    unfinished, all_states = ["planning", "running"], ["planning", "running", "finished", "failed"]
    polls = []
    for at, running in ((0.0, True), (1.0, True), (2.0, False), (3.0, False), (2.0 + MAX_FINISHED_AGE_S, False)):
        planner.now, planner.running = at, running
        sample = poller.poll()
        polls.append((planner.pop_requested_states(), [fork.state for fork in sample.fleet.forks]))
    assert [
        (all_states, ["running"]), (unfinished, ["running"]), (all_states, ["finished"]),
        (unfinished, ["finished"]), (all_states, ["finished"]),
    ] == polls  # fmt: skip


def test_finished_forks_age_between_requests() -> None:
    """The age of a finished fork is correct although the list was requested earlier."""
    planner = PlannerStub()
    planner.running = False
    poller = FleetPoller(planner.client(), clock=lambda: planner.now)
    ages = []
    for planner.now in (0.0, 3.0):
        ages += [fork.age_s for fork in poller.poll().fleet.forks]
    assert [10.0, 13.0] == ages


def test_an_unreachable_planner_leaves_the_last_state() -> None:
    """The sample has the error and its start time, until the planner is back."""
    planner = PlannerStub()
    poller = FleetPoller(planner.client(), clock=lambda: planner.now)
    poller.poll()
    planner.is_down, samples = True, []
    for planner.now in (5.0, 6.0):
        sample = poller.poll()
        samples.append((sample.at, sample.away_since, len(sample.fleet.forks), "connection refused" in sample.error))
    planner.is_down, planner.now = False, 7.0
    recovered = poller.poll()
    assert [(0.0, 5.0, 1, True)] * 2 == samples
    assert 7.0 == recovered.at
    assert recovered.away_since is None
    assert "" == recovered.error


def test_an_unreachable_planner_at_the_first_poll_is_an_error() -> None:
    """A wrong URL is reported immediately."""
    planner = PlannerStub()
    planner.is_down = True
    with pytest.raises(PlannerUnreachable):
        FleetPoller(planner.client()).poll()


def test_a_rejected_token_is_an_error() -> None:
    """A rejected token raises, because a retry cannot succeed."""
    planner = PlannerStub()
    poller = FleetPoller(planner.client())
    poller.poll()
    planner.status = 403
    with pytest.raises(PlannerRejected):
        poller.poll()
