"""How `rfork top` asks a planner: little, and on through the planner's absence."""

from __future__ import annotations

import httpx
import pytest

from rfork.cli.top.looking import ENDED_S, Looker
from rfork.control.client import PlannerClient
from rfork.errors import PlannerRefused, PlannerUnreachable
from rfork.wire import ForkPage, InstancePage
from tests.unit.cli.fleets import forked, going


class Planner:
    """Answers as a planner with these forks; `away`: it does not; `status`: it refuses with that."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.running = True
        self.away = False
        self.status = 200
        self.now = 0.0

    def client(self) -> PlannerClient:
        return PlannerClient("http://planner", transport=httpx.MockTransport(self._answer))

    def asked(self) -> list[str]:
        """The states of forks that were asked for since the last call."""
        states, self.states = self.states, []
        return states

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("nobody listens", request=request)
        if self.status != 200:
            problem = {"type": "x/forbidden", "title": "t", "status": self.status, "detail": "no"}
            return httpx.Response(self.status, json=problem)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=[])
        if request.url.path == "/v1/instances":
            return httpx.Response(200, text=InstancePage(items=()).model_dump_json())
        state = request.url.params["state"]
        self.states.append(state)
        live, ended = (going(),) if self.running else (), (forked(fork_id="f2"),) if not self.running else ()
        items = {"running": live, "finished": ended}.get(state, ())
        return httpx.Response(200, text=ForkPage(items=items).model_dump_json())


def test_ended_forks_are_asked_for_when_one_ended() -> None:
    """And every ten seconds: a fork may come and go between two looks."""
    planner = Planner()
    looker = Looker(planner.client(), clock=lambda: planner.now)
    live, all_ = ["planning", "running"], ["planning", "running", "finished", "failed"]
    told = []
    for at, running in ((0.0, True), (1.0, True), (2.0, False), (3.0, False), (2.0 + ENDED_S, False)):
        planner.now, planner.running = at, running
        look = looker.look()
        told.append((planner.asked(), [fork.state for fork in look.fleet.forks]))
    assert [
        (all_, ["running"]), (live, ["running"]), (all_, ["finished"]), (live, ["finished"]),
        (all_, ["finished"]),
    ] == told  # fmt: skip


def test_ended_forks_grow_older_between_two_questions() -> None:
    """How long ago they ended is right though they were listed a while ago."""
    planner = Planner()
    planner.running = False
    looker = Looker(planner.client(), clock=lambda: planner.now)
    ages = []
    for planner.now in (0.0, 3.0):
        ages += [fork.age_s for fork in looker.look().fleet.forks]
    assert [10.0, 13.0] == ages


def test_a_planner_that_goes_away_leaves_its_last_picture() -> None:
    """With why and since when; one that is back is as before."""
    planner = Planner()
    looker = Looker(planner.client(), clock=lambda: planner.now)
    looker.look()
    planner.away, told = True, []
    for planner.now in (5.0, 6.0):
        look = looker.look()
        told.append((look.at, look.away_since, len(look.fleet.forks), "nobody listens" in look.error))
    planner.away, planner.now = False, 7.0
    back = looker.look()
    assert ([(0.0, 5.0, 1, True)] * 2, (7.0, None, "")) == (told, (back.at, back.away_since, back.error))


def test_a_planner_that_was_never_there_is_an_error() -> None:
    """A wrong URL is told at once, not waited for."""
    planner = Planner()
    planner.away = True
    with pytest.raises(PlannerUnreachable):
        Looker(planner.client()).look()


def test_a_token_that_is_refused_ends_it() -> None:
    """No waiting makes a token right."""
    planner = Planner()
    looker = Looker(planner.client())
    looker.look()
    planner.status = 403
    with pytest.raises(PlannerRefused):
        looker.look()
