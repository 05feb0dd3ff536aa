"""Reader slots and holder counts of a group's index."""

from __future__ import annotations

from dataclasses import replace

from planner.core.group_index import UNPLANNED_SHARE, ContentCounts, ReaderSlots
from planner.core.records import RouteRecord
from planner.policy.types import ContentCount
from tests.unit.planner.builders import CHUNKS, LAYOUT, ORIGIN, WEIGHTS, loading, seed
from tests.unit.planner.records import fork

HALF = ((0, CHUNKS // 2),)
REST = ((CHUNKS // 2, CHUNKS),)
READING = replace(
    fork("f"),
    reads=(RouteRecord("near", HALF, ("shared_memory", "http"), 0), RouteRecord("far", REST, ("http",), 0)),
)


def test_a_fork_has_a_slot_at_each_source_of_its_plan() -> None:
    """Its load on each is the fraction of its chunks from there; same-host reads load no link."""
    slots = ReaderSlots()
    slots.add_reader(READING, CHUNKS, 1.0)
    assert {"near": {"f": 0.5}, "far": {"f": 0.5}} == slots.readers
    assert 0 == slots.load("near")
    assert 0.5 == slots.load("far")


def test_a_straggler_uses_less() -> None:
    """It cannot read faster."""
    slots = ReaderSlots()
    slots.add_reader(READING, CHUNKS, 0.3)
    assert 0.15 == slots.load("far")


def test_a_slot_is_released_once() -> None:
    """Sources without readers have no table."""
    slots = ReaderSlots()
    slots.add_reader(READING, CHUNKS, 1.0)
    assert ["near", "far"] == slots.release(READING)
    assert [] == slots.release(READING)
    assert {} == slots.readers
    assert {} == slots.local


def test_unplanned_readers_have_slots_while_reported() -> None:
    """One that gets a plan is no longer unplanned, and is not counted twice."""
    slots = ReaderSlots()
    slots.set_unplanned_readers("far", ("f", "x"))
    before = dict(slots.readers["far"])
    slots.add_reader(READING, CHUNKS, 1.0)
    planned = slots.unplanned_readers("far")
    slots.set_unplanned_readers("far", ())
    assert {"f": UNPLANNED_SHARE, "x": UNPLANNED_SHARE} == before
    assert ("x",) == planned
    assert {"f": 0.5} == slots.readers["far"]


def test_planned_readers_outlive_the_member() -> None:
    """It may come back to them; unplanned readers are reported again then."""
    slots = ReaderSlots()
    slots.set_unplanned_readers("far", ("x",))
    slots.add_reader(READING, CHUNKS, 1.0)
    slots.set_unplanned_readers("far", ())
    assert {"f": 0.5} == slots.readers["far"]
    assert () == slots.unplanned_readers("far")


def test_holders_are_counted_by_layout_and_content() -> None:
    """Seeds, partial holders and provisional content are separate; draining and empty members do not count."""
    counts = ContentCounts()
    part = {"verified": HALF}
    for each in (
        seed("s"), seed("gone", state="draining"), loading("t"), loading("u", weights_id=WEIGHTS, **part),
        loading("d", provisional_id=ORIGIN, **part),
    ):  # fmt: skip
        counts.add(each)
    initial = dict(counts.counts_for(LAYOUT))
    counts.remove(seed("s"))
    assert {(WEIGHTS, None): ContentCount(1, 2), (None, ORIGIN): ContentCount(0, 1)} == initial
    assert {(WEIGHTS, None): ContentCount(0, 1), (None, ORIGIN): ContentCount(0, 1)} == counts.counts_for(LAYOUT)
    assert not counts.any_seed


def test_removed_holders_leave_nothing() -> None:
    """Their layout is removed too."""
    counts = ContentCounts()
    counts.add(seed("s"))
    had = counts.any_seed
    counts.remove(seed("s"))
    assert had
    assert {} == counts.counts_for(LAYOUT)
