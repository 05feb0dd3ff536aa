"""Instances that are to end: drained where that is allowed, and waited for in any case."""

from __future__ import annotations

import threading

import httpx
import pytest

from rfork.errors import PlannerRejected, PlannerUnreachable
from rfork.planner_client import drain
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.drain import NOT_DRAINED, DrainResult, drain_instance, drain_replica
from rfork.schema import InstanceInfo, InstancePage
from tests.unit.planner.builders import seed_report

RANK = "pod-main-tp0"
VIEW = InstanceInfo(report=seed_report(RANK), age_s=0)
PAGE = InstancePage(items=(VIEW,), next=None)
READ = "forks that read from it: 1"


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow one another without a pause."""
    monkeypatch.setattr(drain, "POLL_INTERVAL_S", 0.0)


class DrainPlanner:
    """Knows one instance, the last seed; tells at each look whether somebody reads from it."""

    def __init__(self, reader_states: list[bool], *, may_force: bool = False, another_seed_after: int = 99) -> None:
        """`another_seed_after` so many looks it is not the last any more; the last look stays."""
        self.reader_states, self.may_force, self.another_seed_after = (
            reader_states,
            may_force,
            another_seed_after,
        )
        self.calls: list[str] = []
        self.client = PlannerClient("http://p", transport=httpx.MockTransport(self._handle))

    def _handle(self, request: httpx.Request) -> httpx.Response:
        action = request.url.path.rpartition("/")[2]
        if action == "instances":
            return httpx.Response(200, content=PAGE.model_dump_json())
        if action == "exit":
            self.calls.append("look")
            has_readers = self.reader_states.pop(0) if len(self.reader_states) > 1 else self.reader_states[0]
            body = {
                "can_exit": not has_readers,
                "readers": int(has_readers),
                "reason": READ if has_readers else "nobody reads",
            }
            return httpx.Response(200, json=body)
        forced = request.url.params.get("force") == "true"
        self.calls.append("force" if forced else "drain")
        if (forced and self.may_force) or self.calls.count("look") >= self.another_seed_after:
            return httpx.Response(200, content=VIEW.model_dump_json())
        status, problem = (403, "forbidden") if forced else (409, "last-seed")
        problem_body = {
            "type": f"https://rfork.dev/problems/{problem}",
            "title": "",
            "status": status,
            "detail": "no",
        }
        return httpx.Response(status, json=problem_body)


@pytest.mark.parametrize(
    ("planner", "calls", "reason"),
    [
        (DrainPlanner([True, False], may_force=True), "drain force drain force look look", "nobody reads"),
        (
            DrainPlanner([True, True, False]),
            "drain force drain force look drain look drain look",
            f"nobody reads from it; {NOT_DRAINED}",
        ),
        (
            DrainPlanner([True, True, False], another_seed_after=1),
            "drain force drain force look drain look look",
            "nobody reads",
        ),
    ],
    ids=["an operator", "an instance", "an instance, until another holds the weights"],
)
def test_the_last_seed_of_a_server_that_ends(planner: DrainPlanner, calls: str, reason: str) -> None:
    """Forced where the token may; else its readers are waited for, and it is drained once that can be."""
    waits: list[str] = []
    ended = drain_replica(planner.client, "pod", wait_s=60, force=True, on_wait=waits.append)
    assert ([DrainResult(RANK, True, reason)], calls, {READ}) == (ended, " ".join(planner.calls), set(waits))


def test_readers_that_keep_coming_are_not_waited_for_longer_than_that() -> None:
    """It may not end by then, and why is said, with what its token could not do."""
    (ended,) = drain_replica(DrainPlanner([True]).client, "pod", wait_s=0, force=True)
    why = f"instance {RANK} is not drained ({NOT_DRAINED}), and may not end after 0 s: {READ}"
    assert DrainResult(RANK, False, why) == ended


@pytest.mark.parametrize(("force", "problem"), [(False, "last-seed"), (True, "forbidden")])
def test_who_asks_for_one_instance_is_told_what_is_refused(force: bool, problem: str) -> None:
    """At once, with nobody waited for: it is for a person to decide."""
    planner = DrainPlanner([False])
    with pytest.raises(PlannerRejected) as caught:
        drain_instance(planner.client, RANK, force=force, wait_s=60)
    assert (problem, 0) == (caught.value.problem, planner.calls.count("look"))


def test_who_does_not_force_is_told_of_the_last_seed() -> None:
    """Of a whole server too."""
    with pytest.raises(PlannerRejected, match="no"):
        drain_replica(DrainPlanner([False]).client, "pod", wait_s=60, force=False)


# -- who they are -----------------------------------------------------------------------------------


class ListingPlanner:
    """A planner that is away for so many lists, and knows the ranks of two servers; all of them may end."""

    def __init__(self, failed_lists: int, *, filters: bool = True) -> None:
        """`filters`: whether it knows that filter."""
        self.failed_lists, self.filters = failed_lists, filters
        self.lists: list[str | None] = []
        self.drained: list[str] = []
        self.client = PlannerClient("http://p", transport=httpx.MockTransport(self._handle))

    def _handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/v1/instances")
        if not path:
            replica = request.url.params.get("replica")
            self.lists.append(replica)
            if len(self.lists) <= self.failed_lists:
                raise httpx.ConnectError("refused")
            names = ["pod-b-main-tp0", "pod-speculative-tp0", "pod-main-tp0"]
            found = names[1:] if self.filters else names
            views = tuple(InstanceInfo(report=seed_report(name), age_s=0) for name in found)
            return httpx.Response(200, content=InstancePage(items=views, next=None).model_dump_json())
        if path.endswith("/exit"):
            return httpx.Response(200, json={"can_exit": True, "readers": 0, "reason": "nobody reads"})
        self.drained.append(path.split("/")[1])
        return httpx.Response(200, content=VIEW.model_dump_json())


@pytest.mark.parametrize("filters", [True, False], ids=["a planner that filters", "an older one"])
def test_a_server_asks_for_its_own_ranks(filters: bool) -> None:
    """And drains no other's, whatever is listed."""
    planner = ListingPlanner(0, filters=filters)
    ended = drain_replica(planner.client, "pod", wait_s=60, force=True)
    ranks = ["pod-speculative-tp0", "pod-main-tp0"]
    assert ([DrainResult(name, True, "nobody reads") for name in ranks], ["pod"]) == (ended, planner.lists)
    assert set(ranks) == set(planner.drained)


def test_a_planner_that_is_away_is_asked_again_who_they_are() -> None:
    """Until it is back, and who waits is told why."""
    planner, waits = ListingPlanner(2), list[str]()
    ended = drain_replica(planner.client, "pod", wait_s=60, force=True, on_wait=waits.append)
    assert (2, ["pod"] * 3) == (len(ended), planner.lists)
    assert ["planner http://p cannot be reached: refused"] * 2 == waits


def test_a_planner_that_stays_away_is_not_waited_for_longer_than_that() -> None:
    """Nor once the wait is to stop."""
    stop = threading.Event()
    hurried, stopped = ListingPlanner(99), ListingPlanner(99)
    with pytest.raises(PlannerUnreachable, match="refused"):
        drain_replica(hurried.client, "pod", wait_s=0, force=True)
    with pytest.raises(PlannerUnreachable, match="refused"):
        drain_replica(stopped.client, "pod", wait_s=60, force=True, on_wait=lambda _: stop.set(), stop=stop)
    assert (1, 2) == (len(hurried.lists), len(stopped.lists))
