"""Whether a controller leads, as the webhook sees it; its process; and that nothing of it holds Pods up."""

from __future__ import annotations

import asyncio

import pytest

from planner.hooks.kubernetes.cluster import ClusterUnavailable, LeaseSeen
from planner.hooks.kubernetes.leading import Leading
from tests.unit.clock import Clock
from tests.unit.hooks.kubernetes.documents import hook

NONE = LeaseSeen(None, "", 0.0, "")


def lease(renewed: str, holder: str | None = "a", duration_s: float = 15.0) -> LeaseSeen:
    """The Lease as its holder renewed it."""
    return LeaseSeen(holder, renewed, duration_s, renewed)


LOOKS: list[tuple[str, list[tuple[float, LeaseSeen]], float, bool]] = [
    ("before the first look", [], 0, False),
    ("the first look: when it was renewed is not known", [(0, lease("1"))], 0, False),
    ("renewed meanwhile", [(0, lease("1")), (2, lease("2"))], 2, True),
    ("one that nobody renews", [(0, lease("1")), (2, lease("1")), (60, lease("1"))], 60, False),
    ("not renewed since, for a while", [(0, lease("1")), (2, lease("2")), (28, lease("2"))], 29.9, True),
    ("not renewed since", [(0, lease("1")), (2, lease("2")), (28, lease("2"))], 30, False),
    ("not looked at since", [(0, lease("1")), (2, lease("2"))], 30, False),
    ("renewed perhaps long ago, between two looks", [(0, lease("1")), (600, lease("2"))], 600, False),
    ("renewed again", [(0, lease("1")), (600, lease("2")), (602, lease("3"))], 602, True),
    ("given up", [(0, lease("1")), (2, lease("2")), (4, lease("3", None))], 4, False),
    ("another took it", [(0, lease("1")), (2, lease("2", None)), (4, lease("3", "b"))], 4, True),
    ("no Lease", [(0, NONE), (2, NONE)], 2, False),
    ("deleted", [(0, lease("1")), (2, lease("2")), (4, NONE)], 4, False),
    ("made", [(0, NONE), (2, lease("1"))], 2, True),
    ("by the duration of its own", [(0, lease("1")), (2, lease("2", duration_s=5))], 10, False),
    ("one without duration", [(0, lease("1")), (2, lease("2", duration_s=0))], 29, True),
]


@pytest.mark.parametrize(
    ("looks", "now", "expected"), [row[1:] for row in LOOKS], ids=[row[0] for row in LOOKS]
)
def test_who_leads_was_surely_there_not_long_ago(
    looks: list[tuple[float, LeaseSeen]], now: float, expected: bool
) -> None:
    """By this process's clock alone, within two durations of the Lease."""
    clock = Clock(0.0)
    leads = Leading(hook(lease_s=15), clock)
    for at, seen in looks:
        clock.now = at
        leads.see(seen, at)
    clock.now = now
    assert expected == leads()


class Shelf:
    """What the API server answers, look by look; then nothing more. Each look takes a second."""

    def __init__(self, clock: Clock, leads: Leading, answers: list[LeaseSeen | str]) -> None:
        self.clock, self.leads, self.answers = clock, leads, iter(answers)
        self.asked: list[tuple[str, str]] = []
        self.led: list[bool] = []
        self.waited: list[float] = []

    async def read_lease(self, name: str, namespace: str) -> LeaseSeen:
        self.asked.append((name, namespace))
        self.clock.now += 1
        answer = next(self.answers, None)
        if answer is None:
            raise asyncio.CancelledError
        if isinstance(answer, str):
            raise ClusterUnavailable(answer)
        return answer

    async def sleep(self, seconds: float) -> None:
        self.led.append(self.leads())
        self.waited.append(seconds)
        self.clock.now += seconds


async def test_it_looks_for_ever_and_says_what_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An API server that is away, or refuses, is nobody who leads; one line for each change."""
    clock = Clock()
    leads = Leading(hook(lease="it", namespace="rfork", look_s=2), clock)
    away = "GET it: 403 forbidden"
    shelf = Shelf(clock, leads, [away, away, lease("1"), lease("2"), lease("3"), away, lease("4"), NONE])
    monkeypatch.setattr(asyncio, "sleep", shelf.sleep)
    with caplog.at_level("INFO"), pytest.raises(asyncio.CancelledError):
        await leads.follow(shelf)
    assert [False, False, False, True, True, False, True, False] == shelf.led
    assert ({("it", "rfork")}, {2.0}) == (set(shelf.asked), set(shelf.waited))
    without, given = "no controller leads: new Pods get no readiness gate", "new Pods get the readiness gate"
    heard = [record.getMessage() for record in caplog.records]
    assert [without, given, without, given, without] == [
        next((each for each in (without, given) if each in line), line) for line in heard
    ]
    assert ["403" in line for line in heard] == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("look_s", "lease_s", "expected"), [(2.0, 15.0, 2.0), (60.0, 15.0, 5.0), (2.0, 1.0, 0.5)]
)
async def test_it_looks_often_enough(
    monkeypatch: pytest.MonkeyPatch, look_s: float, lease_s: float, expected: float
) -> None:
    """As often as at the planner, but no more seldom than every five seconds, or twice a duration."""
    clock = Clock()
    leads = Leading(hook(look_s=look_s, lease_s=lease_s), clock)
    shelf = Shelf(clock, leads, [NONE])
    monkeypatch.setattr(asyncio, "sleep", shelf.sleep)
    with pytest.raises(asyncio.CancelledError):
        await leads.follow(shelf)
    assert [expected] == shelf.waited
