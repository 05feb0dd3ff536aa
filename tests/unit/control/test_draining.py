"""Instances that are to end: drained where that is allowed, and waited for in any case."""

from __future__ import annotations

import threading

import httpx
import pytest

from rfork.control import draining
from rfork.control.client import PlannerClient
from rfork.control.draining import UNDRAINED, Drained, drain_replica, drained
from rfork.errors import PlannerRefused, PlannerUnreachable
from rfork.wire import InstancePage, InstanceView
from tests.unit.planner.builders import whole

RANK = "pod-target-tp0"
VIEW = InstanceView(report=whole(RANK), age_s=0)
PAGE = InstancePage(items=(VIEW,), next=None)
READ = "forks that read from it: 1"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow one another without a pause."""
    monkeypatch.setattr(draining, "LOOK_S", 0.0)


class Planner:
    """Knows one instance, the last seed; tells at each look whether somebody reads from it."""

    def __init__(self, looks: list[bool], *, may_force: bool = False, another_after: int = 99) -> None:
        """`another_after` so many looks it is not the last any more; the last look stays."""
        self.looks, self.may_force, self.another_after = looks, may_force, another_after
        self.asked: list[str] = []
        self.client = PlannerClient("http://p", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        kind = request.url.path.rpartition("/")[2]
        if kind == "instances":
            return httpx.Response(200, content=PAGE.model_dump_json())
        if kind == "exit":
            self.asked.append("look")
            read = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
            answer = {"may_exit": not read, "readers": int(read), "reason": READ if read else "nobody reads"}
            return httpx.Response(200, json=answer)
        forced = request.url.params.get("force") == "true"
        self.asked.append("force" if forced else "drain")
        if (forced and self.may_force) or self.asked.count("look") >= self.another_after:
            return httpx.Response(200, content=VIEW.model_dump_json())
        status, problem = (403, "forbidden") if forced else (409, "last-seed")
        told = {
            "type": f"https://rfork.dev/problems/{problem}",
            "title": "",
            "status": status,
            "detail": "no",
        }
        return httpx.Response(status, json=told)


@pytest.mark.parametrize(
    ("planner", "asked", "reason"),
    [
        (Planner([True, False], may_force=True), "drain force drain force look look", "nobody reads"),
        (
            Planner([True, True, False]),
            "drain force drain force look drain look drain look",
            f"nobody reads from it; {UNDRAINED}",
        ),
        (
            Planner([True, True, False], another_after=1),
            "drain force drain force look drain look look",
            "nobody reads",
        ),
    ],
    ids=["an operator", "an instance", "an instance, until another holds the weights"],
)
def test_the_last_seed_of_a_server_that_ends(planner: Planner, asked: str, reason: str) -> None:
    """Forced where the token may; else its readers are waited for, and it is drained once that can be."""
    waits: list[str] = []
    ended = drain_replica(planner.client, "pod", wait_s=60, force=True, on_wait=waits.append)
    assert ([Drained(RANK, True, reason)], asked, {READ}) == (ended, " ".join(planner.asked), set(waits))


def test_readers_that_keep_coming_are_not_waited_for_longer_than_that() -> None:
    """It may not end by then, and why is said, with what its token could not do."""
    (ended,) = drain_replica(Planner([True]).client, "pod", wait_s=0, force=True)
    why = f"instance {RANK} is not drained ({UNDRAINED}), and may not end after 0 s: {READ}"
    assert Drained(RANK, False, why) == ended


@pytest.mark.parametrize(("force", "problem"), [(False, "last-seed"), (True, "forbidden")])
def test_who_asks_for_one_instance_is_told_what_is_refused(force: bool, problem: str) -> None:
    """At once, with nobody waited for: it is for a person to decide."""
    planner = Planner([False])
    with pytest.raises(PlannerRefused) as caught:
        drained(planner.client, RANK, force=force, wait_s=60)
    assert (problem, 0) == (caught.value.problem, planner.asked.count("look"))


def test_who_does_not_force_is_told_of_the_last_seed() -> None:
    """Of a whole server too."""
    with pytest.raises(PlannerRefused, match="no"):
        drain_replica(Planner([False]).client, "pod", wait_s=60, force=False)


# -- who they are -----------------------------------------------------------------------------------


class Listing:
    """A planner that is away for so many lists, and knows the ranks of two servers; all of them may end."""

    def __init__(self, away: int, *, filters: bool = True) -> None:
        """`filters`: whether it knows that filter."""
        self.away, self.filters = away, filters
        self.lists: list[str | None] = []
        self.drained: list[str] = []
        self.client = PlannerClient("http://p", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/v1/instances")
        if not path:
            replica = request.url.params.get("replica")
            self.lists.append(replica)
            if len(self.lists) <= self.away:
                raise httpx.ConnectError("refused")
            names = ["pod-b-target-tp0", "pod-draft-tp0", "pod-target-tp0"]
            found = names[1:] if self.filters else names
            views = tuple(InstanceView(report=whole(name), age_s=0) for name in found)
            return httpx.Response(200, content=InstancePage(items=views, next=None).model_dump_json())
        if path.endswith("/exit"):
            return httpx.Response(200, json={"may_exit": True, "readers": 0, "reason": "nobody reads"})
        self.drained.append(path.split("/")[1])
        return httpx.Response(200, content=VIEW.model_dump_json())


@pytest.mark.parametrize("filters", [True, False], ids=["a planner that filters", "an older one"])
def test_a_server_asks_for_its_own_ranks(filters: bool) -> None:
    """And drains no other's, whatever is listed."""
    planner = Listing(0, filters=filters)
    ended = drain_replica(planner.client, "pod", wait_s=60, force=True)
    ranks = ["pod-draft-tp0", "pod-target-tp0"]
    assert ([Drained(name, True, "nobody reads") for name in ranks], ["pod"]) == (ended, planner.lists)
    assert set(ranks) == set(planner.drained)


def test_a_planner_that_is_away_is_asked_again_who_they_are() -> None:
    """Until it is back, and who waits is told why."""
    planner, waits = Listing(2), list[str]()
    ended = drain_replica(planner.client, "pod", wait_s=60, force=True, on_wait=waits.append)
    assert (2, ["pod"] * 3) == (len(ended), planner.lists)
    assert ["planner http://p cannot be reached: refused"] * 2 == waits


def test_a_planner_that_stays_away_is_not_waited_for_longer_than_that() -> None:
    """Nor once the wait is to stop."""
    stop = threading.Event()
    hurried, stopped = Listing(99), Listing(99)
    with pytest.raises(PlannerUnreachable, match="refused"):
        drain_replica(hurried.client, "pod", wait_s=0, force=True)
    with pytest.raises(PlannerUnreachable, match="refused"):
        drain_replica(stopped.client, "pod", wait_s=60, force=True, on_wait=lambda _: stop.set(), stop=stop)
    assert (1, 2) == (len(hurried.lists), len(stopped.lists))
