"""What a stock engine's sidecar holds at the planner for its clients, without sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest

from planner.app import create_app
from rfork.engines.sglang_bridge import lease_manager
from rfork.engines.sglang_bridge.engine import EngineDescription, Version, WeightInfo
from rfork.engines.sglang_bridge.identity import PREFIX, seed_report
from rfork.engines.sglang_bridge.lease_manager import LeaseManager
from rfork.engines.sglang_bridge.seed_selector import SeedSelector
from rfork.errors import (
    LayoutMismatch,
    NoSource,
    PlannerUnreachable,
    RforkError,
    SourceBusy,
    SourceUnavailable,
)
from rfork.planner_client.client import PlannerClient
from rfork.schema import InstanceReport, Rank, Route
from rfork.settings import InstanceSettings, PlannerSettings
from tests.fake_sglang_server import TENSORS
from tests.unit.planner.app_transport import AppTransport

SETTINGS = InstanceSettings(planner="http://p", node_name="node", no_source_timeout_s=0.0)
DESCRIPTION = EngineDescription("m", 1, 1, 1, "bfloat16", "", "", Version("/models/m", "default"))
INFO = WeightInfo("10.0.0.7:15001", TENSORS)


def unreachable(request: httpx.Request) -> httpx.Response:
    """Nobody answers."""
    raise httpx.ConnectError("")


class RestartablePlanner(httpx.BaseTransport):
    """A planner in memory."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """It knows nobody any more."""
        self._planner = AppTransport(create_app(PlannerSettings(batch_window_s=0)))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._planner.handle_request(request)


class SidecarHarness:
    """A planner in memory, two seeds' reports in it, and a fetch that fails as it is told."""

    def __init__(self, **seeds: InstanceReport) -> None:
        self.transport = RestartablePlanner()
        self.planner = PlannerClient("http://p", transport=self.transport)
        for report in seeds.values():
            self.planner.report(report)
        self.fails: dict[str, RforkError] = {}
        self.fetched: list[str] = []

    def fetch(self, route: Route, rank: int) -> WeightInfo:
        """What another sidecar answers."""
        self.fetched.append(route.source_id)
        if (error := self.fails.get(route.source_id)) is not None:
            raise error
        return INFO

    def seed_selector(self, wait_s: float = 0.0) -> SeedSelector:
        """Asks for model m."""
        return SeedSelector(self.planner, self.fetch, SETTINGS, model="m", wait_s=wait_s, stopping=threading.Event())

    def manager(self, *, engine_up: Callable[[], bool] | None = None, lease_hold_s: float = 60.0) -> LeaseManager:
        """Answers clients of model m; its thread is not started."""
        return LeaseManager(
            self.planner,
            self.fetch,
            SETTINGS,
            model="m",
            wait_s=0.0,
            lease_hold_s=lease_hold_s,
            engine_up=engine_up,
        )

    def states(self) -> list[str]:
        """Of all forks, in order."""
        return sorted(fork.state for fork in self.planner.forks())


def _seed(name: str, **changes: object) -> InstanceReport:
    report = seed_report(
        SETTINGS, model="m", version="v", rank=0, description=DESCRIPTION,
        info=WeightInfo(f"{name}:1", TENSORS), weights="0" * 32, generation=0, address=f"{name}:9",
    )  # fmt: skip
    return report.model_copy(update={"instance_id": f"{PREFIX}{name}", **changes})


def test_a_seed_that_does_not_answer_is_avoided_and_another_taken() -> None:
    """The first is out of reach of this client alone."""
    harness = SidecarHarness(a=_seed("a"), b=_seed("b"))
    harness.fails = {f"{PREFIX}a": SourceUnavailable("refused")}
    assert (f"{PREFIX}b", [f"{PREFIX}a", f"{PREFIX}b"]) == (
        harness.seed_selector(wait_s=5.0).acquire(0, None).route.source_id, harness.fetched,
    )  # fmt: skip
    assert [] == [view for view in harness.planner.instances() if view.quarantined]


@pytest.mark.parametrize(
    ("seeds", "error_type"),
    [
        ({}, NoSource),
        ({"full": _seed("full", max_readers=0)}, SourceBusy),
        ({"draining": _seed("draining", state="draining")}, NoSource),
        ({"a": _seed("a"), "b": _seed("b", layout_id="f" * 32)}, LayoutMismatch),
        ({"a": _seed("a"), "b": _seed("b", weights_id="f" * 32)}, SourceBusy),
    ],
)
def test_a_client_that_gets_no_seed_leaves_nothing_behind(
    seeds: dict[str, InstanceReport], error_type: type[RforkError]
) -> None:
    """The error says which it is, and the planner holds no fork and no target for it."""
    harness = SidecarHarness(**seeds)
    with pytest.raises(error_type):
        harness.seed_selector().acquire(0, None)
    assert [] == [state for state in harness.states() if state in ("planning", "running")]
    assert sorted(report.instance_id for report in seeds.values()) == [
        view.report.instance_id for view in harness.planner.instances()
    ]


def test_a_planner_that_is_away_is_waited_for_and_then_named() -> None:
    """Nobody else could say which seed to take."""
    harness = SidecarHarness()
    harness.planner = PlannerClient("http://p", transport=httpx.MockTransport(unreachable))
    with pytest.raises(PlannerUnreachable):
        harness.seed_selector().acquire(0, None)


def test_the_seed_that_came_to_nothing_is_avoided_unless_it_is_the_last() -> None:
    """No seed is blamed for a client that did not come up."""
    harness = SidecarHarness(a=_seed("a"), b=_seed("b"))
    first = harness.seed_selector().acquire(0, f"{PREFIX}a").route.source_id
    harness.planner.remove(f"{PREFIX}b")
    again = harness.seed_selector().acquire(0, f"{PREFIX}a").route.source_id
    assert (f"{PREFIX}b", f"{PREFIX}a") == (first, again)
    assert [] == [view for view in harness.planner.instances() if view.quarantined]


def test_an_engine_that_was_healthy_all_along_says_nothing_of_a_read() -> None:
    """Somebody else asked: the lease is held on."""
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager(engine_up=lambda: True)
    manager.weight_info_for(0)
    manager.poll()
    assert ["running"] == harness.states()
    manager.stop()
    assert ["failed"] == harness.states()


@pytest.mark.parametrize(("lease_hold_s", "expected"), [(60.0, "running"), (0.0, "failed")])
def test_a_lease_is_not_held_for_ever(lease_hold_s: float, expected: str) -> None:
    """A client that never comes up, or of which nothing is known, gives its place back in the end."""
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager(lease_hold_s=lease_hold_s)
    manager.weight_info_for(0)
    manager.poll()
    assert [expected] == harness.states()


def test_a_lease_that_the_planner_gives_no_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed changed its weights in place: the generation that was read is gone."""
    monkeypatch.setattr(lease_manager, "RENEWALS", 1e9)
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager()
    manager.weight_info_for(0)
    harness.planner.report(_seed("a", generation=1))
    manager.poll()
    (fork,) = harness.planner.forks()
    assert ("failed", True) == (fork.state, "changed its weights" in str(fork.finish))


def test_a_planner_that_restarted_may_hear_of_the_seed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease is good until it lapses: the seed's heartbeat may come after the client's renewal."""
    monkeypatch.setattr(lease_manager, "RENEWALS", 1e9)
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager()
    manager.weight_info_for(0)
    harness.transport.restart()
    seen: list[str] = []
    for report in (None, None, _seed("a"), _seed("a", generation=1)):
        if report is not None:
            harness.planner.report(report)
        manager.poll()
        seen += harness.states()
    assert ["planning", "planning", "running", "failed"] == seen


def test_a_seed_that_a_restarted_planner_never_hears_of_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the lease has lapsed, it may have changed its weights."""
    monkeypatch.setattr(lease_manager, "RENEWALS", 1e9)
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager()
    manager.weight_info_for(0)
    harness.transport.restart()
    manager._client_leases[0].expires_at = 0.0
    manager.poll()
    assert ["failed"] == harness.states()


def test_a_seed_that_is_another_at_a_restarted_planner_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has reported since, and holds other weights: nothing better is to come."""
    monkeypatch.setattr(lease_manager, "RENEWALS", 1e9)
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager()
    manager.weight_info_for(0)
    harness.transport.restart()
    harness.planner.report(_seed("a", generation=1))
    manager.poll()
    assert ["failed"] == harness.states()


def test_an_answer_that_comes_after_the_stop_holds_nothing() -> None:
    """A client that asked just before the sidecar ended is refused, and its lease is given back."""
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager()
    fetch = harness.fetch

    def stop_then_fetch(route: Route, rank: int) -> WeightInfo:
        manager.stop()
        return fetch(route, rank)

    manager._selector._fetch = stop_then_fetch
    with pytest.raises(SourceBusy, match="ended"):
        manager.weight_info_for(0)
    assert ["failed"] == harness.states()


def test_health_from_before_a_lease_says_nothing_of_its_read() -> None:
    """The engine went down and its successor asks while the look at it is under way."""
    harness = SidecarHarness(a=_seed("a"))
    health = [False, True]

    def engine_up() -> bool:
        up = health.pop()
        if up:  # of the engine that was: the next one asks before this is heard
            manager.weight_info_for(0)
        return up

    manager = harness.manager(engine_up=engine_up)
    manager.poll()
    assert ["running"] == harness.states()


def test_two_ranks_are_held_apart() -> None:
    """Each has its own lease, and one that asks again gives up its own alone."""
    ranks = [_seed(f"r{rank}", rank=Rank(tp=rank, tp_size=2)) for rank in (0, 1)]
    harness = SidecarHarness(zero=ranks[0], one=ranks[1])
    manager = harness.manager()
    for rank in (0, 1, 1):
        manager.weight_info_for(rank)
    assert (["failed", "running", "running"], [f"{PREFIX}r0", f"{PREFIX}r1", f"{PREFIX}r1"]) == (
        harness.states(), harness.fetched,
    )  # fmt: skip
