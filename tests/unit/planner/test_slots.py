"""Who reads from whom, and who holds what: the counts that a group's index goes by."""

from __future__ import annotations

from dataclasses import replace

from planner.fleet import Holders
from planner.holders import HolderCounts
from planner.slots import STRANGER, Slots
from planner.store.records import Read
from tests.unit.planner.builders import CHUNKS, LAYOUT, ORIGIN, WEIGHTS, loading, seed
from tests.unit.planner.records import fork

HALF = ((0, CHUNKS // 2),)
REST = ((CHUNKS // 2, CHUNKS),)
READING = replace(
    fork("f"), reads=(Read("near", HALF, ("shared_memory", "http"), 0), Read("far", REST, ("http",), 0))
)


def test_a_fork_has_a_slot_at_each_source_of_its_plan() -> None:
    """It wants of each what part of its chunks comes from there; what stays on the host loads no link."""
    slots = Slots()
    slots.take(READING, CHUNKS, 1.0)
    assert ({"near": {"f": 0.5}, "far": {"f": 0.5}}, 0, 0.5) == (
        slots.readers, slots.load("near"), slots.load("far"),
    )  # fmt: skip


def test_a_fork_that_falls_behind_wants_less() -> None:
    """It cannot take more."""
    slots = Slots()
    slots.take(READING, CHUNKS, 0.3)
    assert 0.15 == slots.load("far")


def test_a_slot_is_given_back_once() -> None:
    """Of sources that are no members nothing is left; members stand there without readers."""
    slots = Slots()
    slots.greet("far", ())
    slots.take(READING, CHUNKS, 1.0)
    assert (["near", "far"], [], {"far": {}}, {}) == (
        slots.release(READING), slots.release(READING), slots.readers, slots.local,
    )  # fmt: skip


def test_strangers_have_slots_while_they_are_named() -> None:
    """One that gets a plan is a stranger no more, and is not counted twice."""
    slots = Slots()
    slots.greet("far", ("f", "x"))
    before = dict(slots.readers["far"])
    slots.take(READING, CHUNKS, 1.0)
    planned = slots.strangers("far")
    slots.greet("far", ())
    assert ({"f": STRANGER, "x": STRANGER}, ("x",), {"f": 0.5}) == (before, planned, slots.readers["far"])


def test_planned_readers_outlive_the_member() -> None:
    """It may come back to them; strangers are named anew by then."""
    slots = Slots()
    slots.greet("far", ("x",))
    slots.take(READING, CHUNKS, 1.0)
    slots.dismiss("far")
    assert ({"f": 0.5}, None) == (slots.readers["far"], slots.strangers("far"))


def test_holders_are_counted_by_layout_and_content() -> None:
    """Seeds, those that hold a part, and drafts apart; who drains or holds nothing does not count."""
    counts = HolderCounts()
    part = {"verified": HALF}
    for each in (
        seed("s"), seed("gone", state="draining"), loading("t"), loading("u", weights_id=WEIGHTS, **part),
        loading("d", draft=ORIGIN, **part),
    ):  # fmt: skip
        counts.add(each)
    held = dict(counts.of(LAYOUT))
    counts.remove(seed("s"))
    assert (
        {(WEIGHTS, None): Holders(1, 2), (None, ORIGIN): Holders(0, 1)},
        {(WEIGHTS, None): Holders(0, 1), (None, ORIGIN): Holders(0, 1)},
        False,
    ) == (held, counts.of(LAYOUT), counts.any_seed)


def test_nothing_is_left_of_holders_that_are_gone() -> None:
    """Nor of their layout."""
    counts = HolderCounts()
    counts.add(seed("s"))
    had = counts.any_seed
    counts.remove(seed("s"))
    assert (True, {}) == (had, counts.of(LAYOUT))
