"""Targets that their sources delay move to seeds that became idle."""

from __future__ import annotations

import pytest

from planner.policy.starvation import is_starving
from planner.policy.types import GroupView, Source
from tests.unit.planner.builders import NOW, Reads, decide, group, loading, routes, seed

ALL = ((0, 12),)
LINK = 1e9
IDLE = seed("idle", ingress_rate=LINK)


def target(chunks: int = 2, rate: float | None = LINK / 4) -> Source:
    """Return a target with this number of chunks and this rate."""
    return loading("t", (0, chunks), read_rate=rate, ingress_rate=rate)


def fleet(member: Source, *others: Source, reads: Reads | None = None) -> GroupView:
    """Return a group in which the target reads from the relay `a`, or as `reads` lists."""
    relay = loading("a", (0, 3), read_rate=LINK / 4, ingress_rate=LINK)
    return group(seed("s"), relay, IDLE, member, *others, reads=reads or {"a": {"s": ALL}, "t": {"a": ALL}})


def test_a_delayed_target_starves() -> None:
    """Its relay has one chunk more, and a seed without readers has all."""
    assert is_starving(fleet(target()), target(), IDLE)


@pytest.mark.parametrize("rate", [LINK, None])
def test_a_target_that_is_not_known_to_be_delayed_does_not_starve(rate: float | None) -> None:
    """It reads at the speed of a link, or has not reported since its plan."""
    assert not is_starving(fleet(target(rate=rate)), target(rate=rate), IDLE)


def test_a_target_of_a_seed_without_other_readers_does_not_starve() -> None:
    """Another seed would not be faster."""
    view = fleet(target(), reads={"t": {"s": ALL}})
    assert not is_starving(view, target(), IDLE)


def test_a_target_of_a_busy_seed_starves() -> None:
    """It shares the link with another reader."""
    view = fleet(target(), reads={"a": {"s": ALL}, "t": {"s": ALL}})
    assert is_starving(view, target(), IDLE)


def test_a_target_that_is_nearly_complete_does_not_starve() -> None:
    """Another plan is not worth its cost."""
    complete = target(12)
    assert not is_starving(fleet(complete), complete, IDLE)


@pytest.mark.parametrize(
    ("missing", "rate", "expected"),
    [(3, LINK / 2, True), (2, LINK / 2, False), (2, LINK / 4, True), (1, LINK / 4, False), (1, 0.0, True)],
)
def test_the_fewer_chunks_are_missing_the_more_slowly_a_starving_target_reads(
    missing: int, rate: float, expected: bool
) -> None:
    """A plan is worth its cost for the last chunk of 64 only if that chunk does not arrive."""
    changes = {"chunk_count": 64, "ingress_rate": LINK}
    member = loading("t", (0, 64 - missing), read_rate=rate, **changes)
    idle = seed("idle", verified=((0, 64),), **changes)
    view = group(idle, loading("a", (0, 3), **changes), member, reads={"t": {"a": ((0, 64),)}})
    assert expected is is_starving(view, member, idle)


def test_a_starving_target_moves_to_the_idle_seed() -> None:
    """It reads there what its relay would have read first."""
    view = fleet(target())
    assert {"idle": ((2, 12),)} == routes(decide(view, view.sources["t"]))


def test_a_target_that_reads_at_full_speed_keeps_its_relay() -> None:
    """An idle seed alone is no reason to move."""
    view = fleet(target(rate=LINK))
    assert {"a": ((2, 12),)} == routes(decide(view, view.sources["t"]))


def test_a_starving_target_does_not_move_to_a_quarantined_seed() -> None:
    """It keeps its relay."""
    member = target()
    relay = loading("a", (0, 3), read_rate=LINK / 4, ingress_rate=LINK)
    bad = seed("idle", ingress_rate=LINK, quarantined_until=NOW + 1)
    view = group(seed("s"), relay, bad, member, reads={"a": {"s": ALL}, "t": {"a": ALL}})
    assert {"a": ((2, 12),)} == routes(decide(view, view.sources["t"]))
