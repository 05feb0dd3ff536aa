"""The order of a batch: chains, two trees, racks, hosts and reader slots."""

from __future__ import annotations

from collections import Counter
from math import ceil, log2

import pytest

from planner.policy.chunk_split import ALTERNATING_RUNS
from planner.policy.group_plan import plan
from planner.policy.types import ForkDemand, GroupView, HostLocation, Source
from rfork.image.ranges import Range, count, intersect
from tests.unit.planner.builders import NOW, group, loading, routes, seed, targets

CHUNK_COUNT = 64
ALL = ((0, CHUNK_COUNT),)
LOW, HIGH = ((0, 32),), ((32, 64),)
Reads = dict[str, dict[str, tuple[Range, ...]]]


def source(name: str, **changes: object) -> Source:
    """Return a seed with 64 chunks and four reader slots."""
    return seed(name, **({"chunk_count": CHUNK_COUNT, "verified": ALL, "max_readers": 4} | changes))


def wide(number: int, **changes: object) -> list[Source]:
    """Return targets with 64 chunks and four reader slots each."""
    return targets(number, **({"chunk_count": CHUNK_COUNT, "max_readers": 4} | changes))


def plan_reads(fleet: GroupView, arrivals: list[Source]) -> Reads:
    """Return the chunks by source for targets that are planned in one call."""
    decisions = plan(fleet, [ForkDemand(f"fork-{each.instance_id}", each) for each in arrivals], NOW)
    return {each.instance_id: routes(decisions[f"fork-{each.instance_id}"]) for each in arrivals}


def loads(reads: Reads) -> dict[str, float]:
    """Return the number of images that each source sends."""
    sent: Counter[str] = Counter()
    for parts in reads.values():
        for name, chunks in parts.items():
            sent[name] += count(chunks)
    return {name: chunks / CHUNK_COUNT for name, chunks in sent.items()}


def depth(reads: Reads, name: str, chunk: int) -> int:
    """Return the number of links that a chunk passes to the target."""
    links = 0
    while name in reads:
        parts = reads[name].items()
        name = next(parent for parent, chunks in parts if any(low <= chunk < high for low, high in chunks))
        links += 1
    return links


def test_a_short_line_is_a_chain() -> None:
    """Six targets with ten times as many chunks read from one another; the seed sends the image once."""
    expected = {"t00": {"s": ALL}} | {f"t{index:02}": {f"t{index - 1:02}": ALL} for index in range(1, 6)}
    assert expected == plan_reads(group(source("s")), wide(6))


def test_a_longer_line_is_two_trees() -> None:
    """Seven targets receive each half of the chunks over a separate tree."""
    expected = {
        "t00": {"t02": LOW, "t01": HIGH}, "t01": {"t00": LOW, "t03": HIGH}, "t02": {"s": LOW, "t01": HIGH},
        "t03": {"t04": LOW, "s": HIGH}, "t04": {"t02": LOW, "t05": HIGH}, "t05": {"t04": LOW, "t03": HIGH},
        "t06": {"t00": LOW, "t05": HIGH},
    }  # fmt: skip
    assert expected == plan_reads(group(source("s")), wide(7))


@pytest.mark.parametrize("chunk_count", [16, 64, 128, 500])
def test_below_a_relay_neither_tree_waits_for_the_other(chunk_count: int) -> None:
    """The relay reads its chunks in order: at any time it has about as many for each of its two children."""
    every_chunk = ((0, chunk_count),)
    relay = loading("r", chunk_count=chunk_count, max_readers=4)
    first = source("s", chunk_count=chunk_count, verified=every_chunk)
    fleet = group(first, relay, reads={"r": {"s": every_chunk}})
    reads = plan_reads(fleet, wide(chunk_count // 8, chunk_count=chunk_count))
    fed = [parts["r"] for parts in reads.values() if "r" in parts]
    assert 2 == len(fed)
    for reached in range(1, chunk_count + 1):
        one, other = (count(intersect(chunks, ((0, reached),))) for chunks in fed)
        assert abs(one - other) <= chunk_count / ALTERNATING_RUNS + 1


@pytest.mark.parametrize("number", [7, 15, 31, 32, 33, 100, 257])
def test_in_two_trees_no_member_sends_more_than_one_image_and_a_chunk(number: int) -> None:
    """Each has at most two children, for one half only, and one reader of a last chunk; the depth is logarithmic."""
    reads = plan_reads(group(source("s")), wide(number))
    assert max(loads(reads).values()) <= 1.0 + 1 / CHUNK_COUNT
    for name in ("s", *reads):
        parts_read = [chunks for parts in reads.values() for parent, chunks in parts.items() if parent == name]
        halves = [chunks for chunks in parts_read if count(chunks) > 1]
        assert len(halves) <= 2
        assert len(parts_read) <= len(halves) + 1
        assert name == "s" or len({chunks[0][0] for chunks in halves}) <= 1
    assert max(depth(reads, name, chunk) for name in reads for chunk in (0, 63)) <= ceil(log2(number)) + 2


def test_a_last_chunk_needs_a_fourth_reader_slot() -> None:
    """With three slots, two children and a target on the same node leave none."""
    for max_readers, expected in ((3, 0), (4, 14)):
        reads = plan_reads(group(source("s")), wide(72, max_readers=max_readers))
        assert expected == sum(count(chunks) == 1 for parts in reads.values() for chunks in parts.values())


def test_racks_stay_together() -> None:
    """With four racks of eight, few of the 64 links cross racks, whatever the names."""
    racks = {f"t{index:02}": f"r{index % 4}" for index in range(32)}
    arrivals = [
        loading(name, chunk_count=CHUNK_COUNT, max_readers=4, location=HostLocation(f"h-{name}", rack, "z"))
        for name, rack in racks.items()
    ]
    reads = plan_reads(group(source("s", location=HostLocation("h-s", "r0", "z"))), arrivals)
    crossings = [
        (parent, name)
        for name, parts in reads.items()
        for parent in parts
        if parent != "s" and racks[parent] != racks[name]
    ]
    assert len(crossings) <= 12


def test_each_seed_feeds_its_own_line() -> None:
    """Six targets and three seeds form three chains of two."""
    expected = {
        "t00": {"s0": ALL}, "t01": {"t00": ALL}, "t02": {"s1": ALL}, "t03": {"t02": ALL},
        "t04": {"s2": ALL}, "t05": {"t04": ALL},
    }  # fmt: skip
    assert expected == plan_reads(group(*(source(f"s{index}") for index in range(3))), wide(6))


def test_two_seeds_at_half_link_speed_feed_one_line() -> None:
    """Each sends half of the image to the first target."""
    arrivals = [loading(f"t{index:02}", chunk_count=CHUNK_COUNT, ingress_rate=2e9) for index in range(3)]
    fleet = group(source("s0", egress_rate=1e9), source("s1", egress_rate=1e9))
    expected = {"t00": {"s0": LOW, "s1": HIGH}, "t01": {"t00": ALL}, "t02": {"t01": ALL}}
    assert expected == plan_reads(fleet, arrivals)


@pytest.mark.parametrize("label", ["host", "nvlink"])
def test_one_target_of_a_node_reads_over_the_network(label: str) -> None:
    """Two nodes of four have one network reader each; the others read within the node."""

    def placement(index: int) -> HostLocation:
        node = f"n{index // 4}"
        return HostLocation(node) if label == "host" else HostLocation(f"h{index}", nvlink=node)

    arrivals = [loading(f"t{index}", chunk_count=CHUNK_COUNT, location=placement(index)) for index in range(8)]
    expected = {
        "t0": {"s": ALL}, "t1": {"t0": ALL}, "t2": {"t1": ALL}, "t3": {"t2": ALL},
        "t4": {"t0": ALL}, "t5": {"t4": ALL}, "t6": {"t5": ALL}, "t7": {"t6": ALL},
    }  # fmt: skip
    assert expected == plan_reads(group(source("s")), arrivals)


LAST: list[tuple[str, dict[str, object]]] = [
    ("is slow", {"slow": True}),
    ("accepts one reader", {"max_readers": 1}),
    ("was measured slower", {"ingress_rate": 1e8}),
]


@pytest.mark.parametrize(("case", "changes"), LAST)
def test_no_target_waits_for_a_weaker_one(case: str, changes: dict[str, object]) -> None:
    """A weaker target comes last in the line, though its name sorts first."""
    weak = loading("a", chunk_count=CHUNK_COUNT, **changes)
    strong = [loading(name, chunk_count=CHUNK_COUNT, max_readers=4, ingress_rate=1e9) for name in ("b", "c")]
    assert {"a": {"c": ALL}, "b": {"s": ALL}, "c": {"b": ALL}} == plan_reads(group(source("s")), [weak, *strong])


def test_weak_targets_are_ordered_by_capacity() -> None:
    """Fast targets come first, then slower classes, then single slots, then slow ones."""
    arrivals = [
        loading("slow", chunk_count=CHUNK_COUNT, slow=True, ingress_rate=1e9),
        loading("half", chunk_count=CHUNK_COUNT, ingress_rate=4e8),
        loading("fast", chunk_count=CHUNK_COUNT, ingress_rate=1e9),
        loading("one", chunk_count=CHUNK_COUNT, ingress_rate=1e9, max_readers=1),
    ]
    expected = {"fast": {"s": ALL}, "one": {"fast": ALL}, "half": {"one": ALL}, "slow": {"half": ALL}}
    assert expected == plan_reads(group(source("s")), arrivals)


def test_a_target_without_slots_has_no_readers() -> None:
    """The others read from the last target with slots."""
    arrivals = [
        loading(name, chunk_count=CHUNK_COUNT, max_readers=max_readers)
        for name, max_readers in (("a", 0), ("b", 0), ("c", 2))
    ]
    assert {"a": {"c": ALL}, "b": {"c": ALL}, "c": {"s": ALL}} == plan_reads(group(source("s")), arrivals)


def test_a_node_leader_with_one_slot_serves_its_own_node() -> None:
    """The next node reads from a source with a spare slot."""
    arrivals = [
        loading("a0", chunk_count=CHUNK_COUNT, location=HostLocation("h"), max_readers=1),
        loading("a1", chunk_count=CHUNK_COUNT, location=HostLocation("h"), max_readers=1),
        loading("b", chunk_count=CHUNK_COUNT),
    ]
    assert {"a0": {"b": ALL}, "a1": {"a0": ALL}, "b": {"s": ALL}} == plan_reads(group(source("s")), arrivals)


def test_a_line_below_two_relays_waits_for_neither() -> None:
    """Each has half of its link to spare, and receives in order: the line reads alternating chunks from both."""
    every_chunk, low, high = ((0, 12),), ((0, 6),), ((6, 12),)
    relays = [loading("a", max_readers=4), loading("b", max_readers=4), loading("c", max_readers=0)]
    reads = {"a": {"s": every_chunk}, "b": {"s": every_chunk}, "c": {"a": low, "b": high}}
    fleet = group(seed("s", max_readers=2), *relays, reads=reads)
    line = plan_reads(fleet, [loading(f"t{index}", max_readers=1) for index in range(3)])
    even, odd = (tuple((chunk, chunk + 1) for chunk in range(begin, 12, 2)) for begin in (0, 1))
    assert {"t0": {"a": even, "b": odd}, "t1": {"t0": every_chunk}, "t2": {"t1": every_chunk}} == line


def test_a_late_target_reads_from_the_end_of_the_line() -> None:
    """The seed's link is used up by the first line."""
    fleet = group(source("s"), *wide(3), reads={"t00": {"s": ALL}, "t01": {"t00": ALL}, "t02": {"t01": ALL}})
    assert {"late": {"t02": ALL}} == plan_reads(fleet, [loading("late", chunk_count=CHUNK_COUNT)])


def test_targets_that_share_a_host_with_a_seed_read_there() -> None:
    """They do not read over the network, though another seed is idle."""
    fleet = group(source("near", location=HostLocation("h")), source("far"))
    arrivals = [loading(name, chunk_count=CHUNK_COUNT, location=HostLocation("h")) for name in "ab"]
    assert {"far"}.isdisjoint({parent for parts in plan_reads(fleet, arrivals).values() for parent in parts})


def test_children_of_a_removed_relay_get_new_sources_without_overload() -> None:
    """When one of fifteen in two trees is removed, its children get other sources, and no member sends twice."""
    arrivals = wide(15)
    reads = plan_reads(group(source("s")), arrivals)
    children: Counter[str] = Counter(parent for parts in reads.values() for parent in parts)
    dead = next(name for name, number in sorted(children.items()) if number == 2 and name != "s")
    members = [source("s"), *(each for each in arrivals if each.instance_id != dead)]
    del reads[dead]
    for orphan in sorted(name for name, parts in reads.items() if dead in parts):
        fleet = group(*members, reads=reads)
        target = fleet.sources[orphan]
        fork_demand = ForkDemand(f"fork-{orphan}", target, {dead: "SourceUnavailable"}, fleet.shares[orphan])
        reads[orphan] = routes(plan(fleet, [fork_demand], NOW)[fork_demand.fork_id])
    assert dict.fromkeys(reads, CHUNK_COUNT) == {
        name: sum(count(chunks) for chunks in parts.values()) for name, parts in reads.items()
    }
    assert max(loads(reads).values()) <= 1.5
