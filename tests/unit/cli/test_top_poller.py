"""How `rfork top` asks a planner: little, and on through the planner's absence."""

from __future__ import annotations

import httpx
import pytest

from rfork.cli.top.poller import ENDED_S, FleetPoller
from rfork.errors import PlannerRejected, PlannerUnreachable
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkPage, InstancePage
from tests.unit.cli.fleet_builders import finished_fork, running_fork


class PlannerStub:
    """Answers as a planner with these forks; `is_down`: it does not; `status`: it refuses with that."""

    def __init__(self) -> None:
        self.requested_states: list[str] = []
        self.running = True
        self.is_down = False
        self.status = 200
        self.now = 0.0

    def client(self) -> PlannerClient:
        return PlannerClient("http://planner", transport=httpx.MockTransport(self._handle))

    def take_requested_states(self) -> list[str]:
        """The states of forks that were asked for since the last call."""
        requested_states, self.requested_states = self.requested_states, []
        return requested_states

    def _handle(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("nobody listens", request=request)
        if self.status != 200:
            problem = {"type": "x/forbidden", "title": "t", "status": self.status, "detail": "no"}
            return httpx.Response(self.status, json=problem)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=[])
        if request.url.path == "/v1/instances":
            return httpx.Response(200, text=InstancePage(items=()).model_dump_json())
        state = request.url.params["state"]
        self.requested_states.append(state)
        live, ended = (
            (running_fork(),) if self.running else (),
            (finished_fork(fork_id="f2"),) if not self.running else (),
        )
        items = {"running": live, "finished": ended}.get(state, ())
        return httpx.Response(200, text=ForkPage(items=items).model_dump_json())


def test_ended_forks_are_asked_for_when_one_ended() -> None:
    """And every ten seconds: a fork may come and go between two looks."""
    planner = PlannerStub()
    poller = FleetPoller(planner.client(), clock=lambda: planner.now)
    live, all_ = ["planning", "running"], ["planning", "running", "finished", "failed"]
    polls = []
    for at, running in ((0.0, True), (1.0, True), (2.0, False), (3.0, False), (2.0 + ENDED_S, False)):
        planner.now, planner.running = at, running
        sample = poller.poll()
        polls.append((planner.take_requested_states(), [fork.state for fork in sample.fleet.forks]))
    assert [
        (all_, ["running"]), (live, ["running"]), (all_, ["finished"]), (live, ["finished"]),
        (all_, ["finished"]),
    ] == polls  # fmt: skip


def test_ended_forks_grow_older_between_two_questions() -> None:
    """How long ago they ended is right though they were listed a while ago."""
    planner = PlannerStub()
    planner.running = False
    poller = FleetPoller(planner.client(), clock=lambda: planner.now)
    ages = []
    for planner.now in (0.0, 3.0):
        ages += [fork.age_s for fork in poller.poll().fleet.forks]
    assert [10.0, 13.0] == ages


def test_a_planner_that_goes_away_leaves_its_last_picture() -> None:
    """With why and since when; one that is back is as before."""
    planner = PlannerStub()
    poller = FleetPoller(planner.client(), clock=lambda: planner.now)
    poller.poll()
    planner.is_down, samples = True, []
    for planner.now in (5.0, 6.0):
        sample = poller.poll()
        samples.append((sample.at, sample.away_since, len(sample.fleet.forks), "nobody listens" in sample.error))
    planner.is_down, planner.now = False, 7.0
    recovered = poller.poll()
    assert ([(0.0, 5.0, 1, True)] * 2, (7.0, None, "")) == (
        samples,
        (recovered.at, recovered.away_since, recovered.error),
    )


def test_a_planner_that_was_never_there_is_an_error() -> None:
    """A wrong URL is told at once, not waited for."""
    planner = PlannerStub()
    planner.is_down = True
    with pytest.raises(PlannerUnreachable):
        FleetPoller(planner.client()).poll()


def test_a_token_that_is_refused_ends_it() -> None:
    """No waiting makes a token right."""
    planner = PlannerStub()
    poller = FleetPoller(planner.client())
    poller.poll()
    planner.status = 403
    with pytest.raises(PlannerRejected):
        poller.poll()
