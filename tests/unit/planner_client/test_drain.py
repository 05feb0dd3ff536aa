"""Draining of instances, and the wait until they can exit."""

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
    """Poll without pauses."""
    monkeypatch.setattr(drain, "POLL_INTERVAL_S", 0.0)


class DrainPlanner:
    """A planner with one instance, the last seed, which has a reader or not at each poll."""

    def __init__(self, reader_states: list[bool], *, may_force: bool = False, another_seed_after: int = 99) -> None:
        """`another_seed_after`: number of polls after which it is not the last seed any more. The last state stays."""
        self.reader_states = reader_states
        self.may_force = may_force
        self.another_seed_after = another_seed_after
        self.calls: list[str] = []
        self.client = PlannerClient("http://p", transport=httpx.MockTransport(self._handle))

    def _handle(self, request: httpx.Request) -> httpx.Response:
        action = request.url.path.rpartition("/")[2]
        if action == "instances":
            return httpx.Response(200, content=PAGE.model_dump_json())
        if action == "exit":
            self.calls.append("poll")
            has_readers = self.reader_states.pop(0) if len(self.reader_states) > 1 else self.reader_states[0]
            body = {
                "can_exit": not has_readers,
                "readers": int(has_readers),
                "reason": READ if has_readers else "no readers",
            }
            return httpx.Response(200, json=body)
        forced = request.url.params.get("force") == "true"
        self.calls.append("force" if forced else "drain")
        if (forced and self.may_force) or self.calls.count("poll") >= self.another_seed_after:
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
        (DrainPlanner([True, False], may_force=True), "drain force drain force poll poll", "no readers"),
        (
            DrainPlanner([True, True, False]),
            "drain force drain force poll drain poll drain poll",
            f"no readers; {NOT_DRAINED}",
        ),
        (
            DrainPlanner([True, True, False], another_seed_after=1),
            "drain force drain force poll drain poll poll",
            "no readers",
        ),
    ],
    ids=["an operator", "an instance", "an instance, until another has the weights"],
)
def test_the_last_seed_of_an_exiting_replica_is_drained_or_waits(
    planner: DrainPlanner, calls: str, reason: str
) -> None:
    """It is drained by force if the token may; otherwise the caller waits for its readers."""
    waits: list[str] = []
    results = drain_replica(planner.client, "pod", wait_s=60, force=True, on_wait=waits.append)
    assert [DrainResult(RANK, True, reason)] == results
    assert calls == " ".join(planner.calls)
    assert {READ} == set(waits)


def test_the_wait_for_readers_is_limited() -> None:
    """The result has the reason, and the missing permission of the token."""
    (result,) = drain_replica(DrainPlanner([True]).client, "pod", wait_s=0, force=True)
    reason = f"instance {RANK} is not drained ({NOT_DRAINED}) and cannot exit after 0 s: {READ}"
    assert DrainResult(RANK, False, reason) == result


@pytest.mark.parametrize(("force", "problem"), [(False, "last-seed"), (True, "forbidden")])
def test_a_rejected_drain_of_one_instance_is_an_error(force: bool, problem: str) -> None:
    """It is raised immediately, without waiting for readers."""
    planner = DrainPlanner([False])
    with pytest.raises(PlannerRejected) as caught:
        drain_instance(planner.client, RANK, force=force, wait_s=60)
    assert problem == caught.value.problem
    assert 0 == planner.calls.count("poll")


def test_draining_a_last_seed_without_force_is_an_error() -> None:
    """The same applies to a replica."""
    with pytest.raises(PlannerRejected, match="no"):
        drain_replica(DrainPlanner([False]).client, "pod", wait_s=60, force=False)


# -- ranks of a replica -----------------------------------------------------------------------------


class ListingPlanner:
    """A planner whose first list requests fail. Knows the ranks of two replicas, which can exit."""

    def __init__(self, failed_lists: int, *, filters: bool = True) -> None:
        """`filters`: whether it supports the replica filter."""
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
            return httpx.Response(200, json={"can_exit": True, "readers": 0, "reason": "no readers"})
        self.drained.append(path.split("/")[1])
        return httpx.Response(200, content=VIEW.model_dump_json())


@pytest.mark.parametrize("filters", [True, False], ids=["a planner that filters", "an older planner"])
def test_a_replica_drains_only_its_own_ranks(filters: bool) -> None:
    """Other instances in the list are ignored."""
    planner = ListingPlanner(0, filters=filters)
    results = drain_replica(planner.client, "pod", wait_s=60, force=True)
    ranks = ["pod-main-tp0", "pod-speculative-tp0"]
    assert [DrainResult(name, True, "no readers") for name in ranks] == results
    assert ["pod"] == planner.lists
    assert set(ranks) == set(planner.drained)


def test_the_ranks_are_requested_again_if_the_planner_is_unreachable() -> None:
    """The wait continues until the planner is back, and the caller is notified of the reason."""
    planner, waits = ListingPlanner(2), list[str]()
    results = drain_replica(planner.client, "pod", wait_s=60, force=True, on_wait=waits.append)
    assert 2 == len(results)
    assert ["pod"] * 3 == planner.lists
    assert ["planner http://p is unreachable: refused"] * 2 == waits


def test_the_wait_for_an_unreachable_planner_is_limited() -> None:
    """It ends at the deadline, or when it is stopped."""
    stop = threading.Event()
    hurried, stopped = ListingPlanner(99), ListingPlanner(99)
    with pytest.raises(PlannerUnreachable, match="refused"):
        drain_replica(hurried.client, "pod", wait_s=0, force=True)
    with pytest.raises(PlannerUnreachable, match="refused"):
        drain_replica(stopped.client, "pod", wait_s=60, force=True, on_wait=lambda _: stop.set(), stop=stop)
    assert 1 == len(hurried.lists)
    assert 2 == len(stopped.lists)
