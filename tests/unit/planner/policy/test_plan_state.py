"""Distances of chunks from a source that has them, and the halves that relays feed."""

from __future__ import annotations

import pytest

from planner.policy.group_plan import plan
from planner.policy.plan_state import PlanState
from planner.policy.types import ForkDemand
from tests.unit.planner.builders import NOW, Reads, group, loading, routes, seed

LOW, HIGH = ((0, 6),), ((6, 12),)
READS: Reads = {"a": {"s": LOW, "b": HIGH}, "b": {"a": LOW, "c": HIGH}, "c": {"a": LOW, "s": HIGH}}


@pytest.mark.parametrize(("name", "chunk", "expected"), [("a", 0, 1), ("b", 0, 2), ("b", 11, 2), ("a", 11, 3)])
def test_links_are_counted_up_to_a_source_that_has_the_chunk(name: str, chunk: int, expected: int) -> None:
    """Each half takes another path."""
    fleet = group(seed("s"), *map(loading, "abc"), reads=READS)
    assert expected == PlanState(fleet, (), NOW).links(fleet.sources[name], chunk)


def test_a_cycle_has_an_end() -> None:
    """Two relays that read from each other have no chunk."""
    fleet = group(loading("a"), loading("b"), reads={"a": {"b": LOW}, "b": {"a": LOW}})
    assert 2 == PlanState(fleet, (), NOW).links(fleet.sources["a"], 0)


def test_a_relay_feeds_the_half_that_it_receives_first() -> None:
    """The first target of each tree reads from the relay that has few links to that half."""
    reads: Reads = {"a": {"s": HIGH, "b": LOW}, "b": {"s": LOW, "a": HIGH}}
    fleet = group(seed("s"), loading("a", max_readers=4), loading("b", max_readers=4), reads=reads)
    arrivals = [loading(f"t{index}", max_readers=4) for index in range(2)]
    decisions = plan(fleet, [ForkDemand(f"fork-{each.instance_id}", each) for each in arrivals], NOW)
    assert {"b": LOW, "t1": HIGH} == routes(decisions["fork-t0"])
    assert {"t0": LOW, "a": HIGH} == routes(decisions["fork-t1"])
