"""Leases that a stock engine's sidecar acquires from the planner for its clients, without sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest

from planner.app import create_app
from rfork.engines.sglang_bridge import lease_manager
from rfork.engines.sglang_bridge.engine import EngineDescription, Version, WeightInfo
from rfork.engines.sglang_bridge.identity import STOCK_PREFIX, seed_report
from rfork.engines.sglang_bridge.lease_manager import LeaseManager, SeedSelector
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
    """Raise as for an unreachable host."""
    raise httpx.ConnectError("")


class RestartablePlanner(httpx.BaseTransport):
    """An in-memory planner."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all instances and forks."""
        self._planner = AppTransport(create_app(PlannerSettings(batch_window_s=0)))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._planner.handle_request(request)


class SidecarHarness:
    """An in-memory planner with two reported seeds, and a fetch that fails on request."""

    def __init__(self, **seeds: InstanceReport) -> None:
        self.transport = RestartablePlanner()
        self.planner = PlannerClient("http://p", transport=self.transport)
        for report in seeds.values():
            self.planner.report(report)
        self.fails: dict[str, RforkError] = {}
        self.fetched: list[str] = []

    def fetch(self, route: Route, rank: int) -> WeightInfo:
        """Return the response of another sidecar."""
        self.fetched.append(route.source_id)
        if (error := self.fails.get(route.source_id)) is not None:
            raise error
        return INFO

    def seed_selector(self, wait_s: float = 0.0) -> SeedSelector:
        """Return a selector for model m."""
        return SeedSelector(self.planner, self.fetch, SETTINGS, model="m", wait_s=wait_s, stopping=threading.Event())

    def manager(self, *, engine_up: Callable[[], bool] | None = None, max_lease_s: float = 60.0) -> LeaseManager:
        """Return a lease manager for clients of model m, without its thread."""
        return LeaseManager(
            self.planner,
            self.fetch,
            SETTINGS,
            model="m",
            wait_s=0.0,
            max_lease_s=max_lease_s,
            engine_up=engine_up,
        )

    def states(self) -> list[str]:
        """Return the states of all forks, in order."""
        return sorted(fork.state for fork in self.planner.forks())


def _seed(name: str, **changes: object) -> InstanceReport:
    report = seed_report(
        SETTINGS, model="m", version="v", rank=0, description=DESCRIPTION,
        info=WeightInfo(f"{name}:1", TENSORS), weights="0" * 32, generation=0, address=f"{name}:9",
    )  # fmt: skip
    return report.model_copy(update={"instance_id": f"{STOCK_PREFIX}{name}", **changes})


def test_an_unresponsive_seed_is_replaced_by_another() -> None:
    """The first seed is unreachable for this client only."""
    harness = SidecarHarness(a=_seed("a"), b=_seed("b"))
    harness.fails = {f"{STOCK_PREFIX}a": SourceUnavailable("refused")}
    assert f"{STOCK_PREFIX}b" == harness.seed_selector(wait_s=5.0).acquire(0, None).route.source_id
    assert [f"{STOCK_PREFIX}a", f"{STOCK_PREFIX}b"] == harness.fetched
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
def test_a_client_without_a_seed_leaves_no_records(
    seeds: dict[str, InstanceReport], error_type: type[RforkError]
) -> None:
    """The error has the matching type, and the planner has no fork and no target for the client."""
    harness = SidecarHarness(**seeds)
    with pytest.raises(error_type):
        harness.seed_selector().acquire(0, None)
    assert [] == [state for state in harness.states() if state in ("planning", "running")]
    assert sorted(report.instance_id for report in seeds.values()) == [
        view.report.instance_id for view in harness.planner.instances()
    ]


def test_an_unreachable_planner_is_waited_for_and_then_named() -> None:
    """Only the planner could select a seed."""
    harness = SidecarHarness()
    harness.planner = PlannerClient("http://p", transport=httpx.MockTransport(unreachable))
    with pytest.raises(PlannerUnreachable):
        harness.seed_selector().acquire(0, None)


def test_a_failed_seed_is_avoided_unless_it_is_the_last() -> None:
    """No seed is blamed for a client that did not start."""
    harness = SidecarHarness(a=_seed("a"), b=_seed("b"))
    first = harness.seed_selector().acquire(0, f"{STOCK_PREFIX}a").route.source_id
    harness.planner.remove(f"{STOCK_PREFIX}b")
    again = harness.seed_selector().acquire(0, f"{STOCK_PREFIX}a").route.source_id
    assert f"{STOCK_PREFIX}b" == first
    assert f"{STOCK_PREFIX}a" == again
    assert [] == [view for view in harness.planner.instances() if view.quarantined]


def test_an_engine_that_was_healthy_before_proves_no_read() -> None:
    """Another client sent the request, so the lease is kept."""
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager(engine_up=lambda: True)
    manager.weight_info_for(0)
    manager.poll()
    assert ["running"] == harness.states()
    manager.stop()
    assert ["failed"] == harness.states()


@pytest.mark.parametrize(("max_lease_s", "expected"), [(60.0, "running"), (0.0, "failed")])
def test_a_lease_expires_after_the_hold_time(max_lease_s: float, expected: str) -> None:
    """A client that never starts, or whose state is unknown, eventually releases its slot."""
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager(max_lease_s=max_lease_s)
    manager.weight_info_for(0)
    manager.poll()
    assert [expected] == harness.states()


def test_a_lease_that_the_planner_refuses_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed changed its weights in place, so the generation that was read no longer exists."""
    monkeypatch.setattr(lease_manager, "RENEWALS_PER_TTL", 1e9)
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager()
    manager.weight_info_for(0)
    harness.planner.report(_seed("a", generation=1))
    manager.poll()
    (fork,) = harness.planner.forks()
    assert "failed" == fork.state
    assert "changed its weights" in str(fork.finish)


def test_a_restarted_planner_may_learn_of_the_seed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease stays valid until it expires, because the seed's heartbeat may follow the client's renewal."""
    monkeypatch.setattr(lease_manager, "RENEWALS_PER_TTL", 1e9)
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


def test_a_seed_that_a_restarted_planner_never_learns_of_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the lease has expired, the seed may have changed its weights."""
    monkeypatch.setattr(lease_manager, "RENEWALS_PER_TTL", 1e9)
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager()
    manager.weight_info_for(0)
    harness.transport.restart()
    manager._client_leases[0].expires_at = 0.0
    manager.poll()
    assert ["failed"] == harness.states()


def test_a_seed_with_other_weights_at_a_restarted_planner_is_dropped_immediately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The seed has reported since and has other weights, so waiting is pointless."""
    monkeypatch.setattr(lease_manager, "RENEWALS_PER_TTL", 1e9)
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager()
    manager.weight_info_for(0)
    harness.transport.restart()
    harness.planner.report(_seed("a", generation=1))
    manager.poll()
    assert ["failed"] == harness.states()


def test_a_response_after_the_stop_keeps_no_lease() -> None:
    """A client whose request arrived just before the stop is rejected, and its lease is released."""
    harness = SidecarHarness(a=_seed("a"))
    manager = harness.manager()
    fetch = harness.fetch

    def stop_then_fetch(route: Route, rank: int) -> WeightInfo:
        manager.stop()
        return fetch(route, rank)

    manager._selector._fetch = stop_then_fetch
    with pytest.raises(SourceBusy, match="stopped"):
        manager.weight_info_for(0)
    assert ["failed"] == harness.states()


def test_health_from_before_a_lease_proves_no_read() -> None:
    """The engine was replaced, and its successor sends a request while the health check is in progress."""
    harness = SidecarHarness(a=_seed("a"))
    health = [False, True]

    def engine_up() -> bool:
        up = health.pop()
        if up:  # health of the previous engine: the next one sends its request before this returns
            manager.weight_info_for(0)
        return up

    manager = harness.manager(engine_up=engine_up)
    manager.poll()
    assert ["running"] == harness.states()


def test_two_ranks_have_separate_leases() -> None:
    """A second request of one rank releases only that rank's lease."""
    ranks = [_seed(f"r{rank}", rank=Rank(tp=rank, tp_size=2)) for rank in (0, 1)]
    harness = SidecarHarness(zero=ranks[0], one=ranks[1])
    manager = harness.manager()
    for rank in (0, 1, 1):
        manager.weight_info_for(rank)
    assert ["failed", "running", "running"] == harness.states()
    assert [f"{STOCK_PREFIX}r0", f"{STOCK_PREFIX}r1", f"{STOCK_PREFIX}r1"] == harness.fetched
