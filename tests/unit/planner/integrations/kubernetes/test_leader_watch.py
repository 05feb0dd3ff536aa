"""The webhook's view of the controller's Lease."""

from __future__ import annotations

import asyncio

import pytest

from planner.integrations.kubernetes.api_server import ClusterUnavailable
from planner.integrations.kubernetes.cluster import Cluster, ObservedLease
from planner.integrations.kubernetes.leader_election import LeaderWatch
from tests.unit.fake_clock import FakeClock
from tests.unit.planner.integrations.kubernetes.pod_documents import webhook_settings

NONE = ObservedLease(None, "", 0.0, "")


def lease(renewed: str, holder: str | None = "a", duration_s: float = 15.0) -> ObservedLease:
    """Return the Lease as renewed by its holder."""
    return ObservedLease(holder, renewed, duration_s, renewed)


OBSERVATIONS: list[tuple[str, list[tuple[float, ObservedLease]], float, bool]] = [
    ("before the first poll", [], 0, False),
    ("the first poll: time of the renewal unknown", [(0, lease("1"))], 0, False),
    ("renewed meanwhile", [(0, lease("1")), (2, lease("2"))], 2, True),
    ("never renewed", [(0, lease("1")), (2, lease("1")), (60, lease("1"))], 60, False),
    ("not renewed since, recently", [(0, lease("1")), (2, lease("2")), (28, lease("2"))], 29.9, True),
    ("not renewed since", [(0, lease("1")), (2, lease("2")), (28, lease("2"))], 30, False),
    ("not polled since", [(0, lease("1")), (2, lease("2"))], 30, False),
    ("renewed between two distant polls", [(0, lease("1")), (600, lease("2"))], 600, False),
    ("renewed again", [(0, lease("1")), (600, lease("2")), (602, lease("3"))], 602, True),
    ("released", [(0, lease("1")), (2, lease("2")), (4, lease("3", None))], 4, False),
    ("acquired by another holder", [(0, lease("1")), (2, lease("2", None)), (4, lease("3", "b"))], 4, True),
    ("no Lease", [(0, NONE), (2, NONE)], 2, False),
    ("deleted", [(0, lease("1")), (2, lease("2")), (4, NONE)], 4, False),
    ("made", [(0, NONE), (2, lease("1"))], 2, True),
    ("with its own duration", [(0, lease("1")), (2, lease("2", duration_s=5))], 10, False),
    ("without a duration", [(0, lease("1")), (2, lease("2", duration_s=0))], 29, True),
]


@pytest.mark.parametrize(
    ("observations", "now", "expected"),
    [row[1:] for row in OBSERVATIONS],
    ids=[row[0] for row in OBSERVATIONS],
)
def test_a_leader_renewed_the_lease_recently(
    observations: list[tuple[float, ObservedLease]], now: float, expected: bool
) -> None:
    """Within two durations of the Lease, by this process's clock only."""
    clock = FakeClock(0.0)
    leader_watch = LeaderWatch(webhook_settings(lease_duration_s=15), clock)
    for at, seen in observations:
        clock.now = at
        leader_watch.observe(seen, at)
    clock.now = now
    assert expected == leader_watch()


class ScriptedLeaseReader(Cluster):
    """Returns scripted responses, one per poll, then ends. Each poll takes a second."""

    def __init__(self, clock: FakeClock, leader_watch: LeaderWatch, replies: list[ObservedLease | str]) -> None:
        self.clock, self.leader_watch, self.replies = clock, leader_watch, iter(replies)
        self.requests: list[tuple[str, str]] = []
        self.leader_states: list[bool] = []
        self.pauses: list[float] = []

    async def read_lease(self, name: str, namespace: str) -> ObservedLease:
        self.requests.append((name, namespace))
        self.clock.now += 1
        reply = next(self.replies, None)
        if reply is None:
            raise asyncio.CancelledError
        if isinstance(reply, str):
            raise ClusterUnavailable(reply)
        return reply

    async def sleep(self, seconds: float) -> None:
        self.leader_states.append(self.leader_watch())
        self.pauses.append(seconds)
        self.clock.now += seconds


async def test_changes_of_the_leadership_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the API server is unreachable or rejects requests, no controller leads. One line per change."""
    clock = FakeClock()
    leader_watch = LeaderWatch(webhook_settings(lease="it", namespace="rfork", poll_interval_s=2), clock)
    away = "GET it: 403 forbidden"
    lease_reader = ScriptedLeaseReader(
        clock, leader_watch, [away, away, lease("1"), lease("2"), lease("3"), away, lease("4"), NONE]
    )
    monkeypatch.setattr(asyncio, "sleep", lease_reader.sleep)
    with caplog.at_level("INFO"), pytest.raises(asyncio.CancelledError):
        await leader_watch.follow(lease_reader)
    assert [False, False, False, True, True, False, True, False] == lease_reader.leader_states
    assert {("it", "rfork")} == set(lease_reader.requests)
    assert {2.0} == set(lease_reader.pauses)
    no_gate_message, gate_message = (
        "no controller leads: new Pods get no readiness gate",
        "new Pods get the readiness gate",
    )
    messages = [record.getMessage() for record in caplog.records]
    assert [no_gate_message, gate_message, no_gate_message, gate_message, no_gate_message] == [
        next((each for each in (no_gate_message, gate_message) if each in line), line) for line in messages
    ]
    assert ["403" in line for line in messages] == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("poll_interval_s", "lease_duration_s", "expected"), [(2.0, 15.0, 2.0), (60.0, 15.0, 5.0), (2.0, 1.0, 0.5)]
)
async def test_the_poll_interval_is_bounded(
    monkeypatch: pytest.MonkeyPatch, poll_interval_s: float, lease_duration_s: float, expected: float
) -> None:
    """The configured interval, but at least every five seconds and twice per duration."""
    clock = FakeClock()
    leader_watch = LeaderWatch(
        webhook_settings(poll_interval_s=poll_interval_s, lease_duration_s=lease_duration_s), clock
    )
    lease_reader = ScriptedLeaseReader(clock, leader_watch, [NONE])
    monkeypatch.setattr(asyncio, "sleep", lease_reader.sleep)
    with pytest.raises(asyncio.CancelledError):
        await leader_watch.follow(lease_reader)
    assert [expected] == lease_reader.pauses
