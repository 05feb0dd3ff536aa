"""Who reads from whom, and who holds what: the counts that a group's index goes by."""

from __future__ import annotations

from dataclasses import replace

from planner.content_counts import ContentCounts
from planner.policy_types import HolderCount
from planner.reader_slots import UNPLANNED_SHARE, ReaderSlots
from planner.store.records import RouteRecord
from tests.unit.planner.builders import CHUNKS, LAYOUT, ORIGIN, WEIGHTS, loading, seed
from tests.unit.planner.records import fork

HALF = ((0, CHUNKS // 2),)
REST = ((CHUNKS // 2, CHUNKS),)
READING = replace(
    fork("f"),
    reads=(RouteRecord("near", HALF, ("shared_memory", "http"), 0), RouteRecord("far", REST, ("http",), 0)),
)


def test_a_fork_has_a_slot_at_each_source_of_its_plan() -> None:
    """It wants of each what part of its chunks comes from there; what stays on the host loads no link."""
    slots = ReaderSlots()
    slots.add_reader(READING, CHUNKS, 1.0)
    assert ({"near": {"f": 0.5}, "far": {"f": 0.5}}, 0, 0.5) == (
        slots.readers, slots.load("near"), slots.load("far"),
    )  # fmt: skip


def test_a_fork_that_falls_behind_wants_less() -> None:
    """It cannot take more."""
    slots = ReaderSlots()
    slots.add_reader(READING, CHUNKS, 0.3)
    assert 0.15 == slots.load("far")


def test_a_slot_is_given_back_once() -> None:
    """Of sources that are no members nothing is left; members stand there without readers."""
    slots = ReaderSlots()
    slots.set_unplanned_readers("far", ())
    slots.add_reader(READING, CHUNKS, 1.0)
    assert (["near", "far"], [], {"far": {}}, {}) == (
        slots.release(READING), slots.release(READING), slots.readers, slots.local,
    )  # fmt: skip


def test_strangers_have_slots_while_they_are_named() -> None:
    """One that gets a plan is a stranger no more, and is not counted twice."""
    slots = ReaderSlots()
    slots.set_unplanned_readers("far", ("f", "x"))
    before = dict(slots.readers["far"])
    slots.add_reader(READING, CHUNKS, 1.0)
    planned = slots.unplanned_readers("far")
    slots.set_unplanned_readers("far", ())
    assert ({"f": UNPLANNED_SHARE, "x": UNPLANNED_SHARE}, ("x",), {"f": 0.5}) == (
        before,
        planned,
        slots.readers["far"],
    )


def test_planned_readers_outlive_the_member() -> None:
    """It may come back to them; strangers are named anew by then."""
    slots = ReaderSlots()
    slots.set_unplanned_readers("far", ("x",))
    slots.add_reader(READING, CHUNKS, 1.0)
    slots.remove_member("far")
    assert ({"f": 0.5}, None) == (slots.readers["far"], slots.unplanned_readers("far"))


def test_holders_are_counted_by_layout_and_content() -> None:
    """Seeds, those that hold a part, and drafts apart; who drains or holds nothing does not count."""
    counts = ContentCounts()
    part = {"verified": HALF}
    for each in (
        seed("s"), seed("gone", state="draining"), loading("t"), loading("u", weights_id=WEIGHTS, **part),
        loading("d", provisional_id=ORIGIN, **part),
    ):  # fmt: skip
        counts.add(each)
    initial = dict(counts.counts_for(LAYOUT))
    counts.remove(seed("s"))
    assert (
        {(WEIGHTS, None): HolderCount(1, 2), (None, ORIGIN): HolderCount(0, 1)},
        {(WEIGHTS, None): HolderCount(0, 1), (None, ORIGIN): HolderCount(0, 1)},
        False,
    ) == (initial, counts.counts_for(LAYOUT), counts.any_seed)


def test_nothing_is_left_of_holders_that_are_gone() -> None:
    """Nor of their layout."""
    counts = ContentCounts()
    counts.add(seed("s"))
    had = counts.any_seed
    counts.remove(seed("s"))
    assert (True, {}) == (had, counts.counts_for(LAYOUT))
