"""Plans many targets that arrived together.

One target per node (host, or NVLink domain) reads over the network; the other targets of the node form a
chain after it. These readers are divided among the available sources. Readers of one source form a chain if
they are few (a chain of N costs N/k), and two interior-disjoint trees if they are many (2·log2(N)/k). Below
relays, and if the batch is small, the next one is expected to read from this one, so the roots have the spare
capacity. The fastest
come first; targets that accept only one reader, or are known to be slow, come last, so that no target waits
for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

from planner.policy import reasons, trees
from planner.policy.chunk_split import merge_storage_reads, split, split_alternately, to_assignments
from planner.policy.eligibility import ineligible_reason, source_order
from planner.policy.plan_state import IDLE_LOAD, PlanState
from planner.policy.source_selection import MAX_STRIPES
from planner.policy.transports import transport_cost
from planner.policy.types import ForkDemand, PlanDecision, Source, Storage, link_fraction
from rfork.image.ranges import Range, intersect, subtract

CHAIN_CHUNK_RATIO: Final = 10
"""A chain is used while the number of targets is at most a tenth of the chunks."""
LAST_CHUNK_SLOTS: Final = 4
"""Free slots of a target that also sends a last chunk: for two children, a target on its node, and this reader."""
MIN_TREE_FEED: Final = 0.45
"""Fraction of a link that feeds one of the two trees at full speed."""
BURST_START: Final = range(16, 65)
"""Sizes of a first batch that others are expected to follow: its last link costs it less than it saves them. Larger
batches arrived at once, and of smaller ones the spare capacity is near the source anyway.
"""
SPEED_CLASS: Final = 2.0
"""Speed ratio between classes: targets slower than the fastest by more than this factor come after it, and so
on.
"""


def plan_fanout(state: PlanState, demands: Sequence[ForkDemand], candidates: Iterable[Source]) -> list[ForkDemand]:
    """Plan targets of one layout without chunks; return those that got no slot.

    All request the same weights and have the same transports; no source has failed any of them.
    """
    nodes = [list(members) for _, members in groupby(sorted(demands, key=node_of), key=node_of)]
    leaders = [min(members, key=lambda demand: (demand.target.slow, *_slots_key(demand))) for members in nodes]
    feeds = select_feeds(state, leaders, candidates)
    if not feeds:
        return list(demands)
    followers = {
        leader.fork_id: _node_followers(leader, members) for leader, members in zip(leaders, nodes, strict=True)
    }
    parts = min(_feed_count(state, feeds, leaders), len(leaders), len(feeds))
    line = sorted(leaders, key=locality_key)
    feeds = sorted(feeds, key=lambda feed: _location_key(feed))
    for part in range(parts):
        line_part = line[len(line) * part // parts : len(line) * (part + 1) // parts]
        sources = feeds[len(feeds) * part // parts : len(feeds) * (part + 1) // parts]
        _assign_line(state, line_part, sources[:MAX_STRIPES], followers)
    for leader in leaders:
        for before, demand in zip([leader, *followers[leader.fork_id]], followers[leader.fork_id], strict=False):
            if not state.is_unplanned(before.target.instance_id) and state.free_slots(before.target):
                _read(state, demand, [(before.target, _all_chunks(demand))])
    return [demand for demand in demands if state.is_unplanned(demand.target.instance_id)]


def select_feeds(state: PlanState, demands: Sequence[ForkDemand], candidates: Iterable[Source]) -> list[Source]:
    """Return the sources that a line of targets can be divided among, best first; each serves every chunk.

    Idle seeds if there are any, else idle relays; else two with half of their link to spare, for one line;
    else the least loaded.
    """
    demand, all_chunks = demands[0], _all_chunks(demands[0])
    idle: list[Source] = []
    halves: list[Source] = []
    for source in sorted(candidates, key=source_order(state, demand.target)):
        if ineligible_reason(state, source, demand) or not state.free_slots(source, demand.target):
            continue
        load = state.load(source, demand.target)
        if state.is_unplanned(source.instance_id) or (halves and 1.0 - load < MIN_TREE_FEED):
            continue
        host = source.location.host
        if host in state.group.shared_hosts and any(feed.location.host == host for feed in idle or halves):
            continue
        if idle and (load > IDLE_LOAD or source.complete != idle[0].complete):
            break
        if (idle or halves) and transport_cost(source, demand.target) != transport_cost(
            (idle or halves)[0], demand.target
        ):
            break
        if state.available_chunks(source, all_chunks, demand.target) == all_chunks:
            if not state.plans_background and not source.complete and state.is_background(source):
                # Its own reads begin to count: they may load the others.
                if idle or halves:
                    continue
                return [source]
            (idle if load <= IDLE_LOAD else halves).append(source)
            if len(halves) == 2 or len(idle) == MAX_STRIPES * len(demands):
                break
    return idle or halves


def _assign_line(
    state: PlanState, line: list[ForkDemand], feeds: list[Source], followers: dict[str, list[ForkDemand]]
) -> None:
    """Assign sources to a line of targets, speed class by speed class, each reading from the class before it."""
    fastest = max((demand.target.ingress_rate or 0.0 for demand in line), default=0.0)

    def line_key(demand: ForkDemand) -> tuple[bool, int, bool]:
        few_slots = state.free_slots(demand.target) < 2 + bool(followers[demand.fork_id])
        return demand.target.slow, _speed(demand, fastest), few_slots

    for (_, _, few_slots), members in groupby(
        sorted(line, key=lambda demand: (line_key(demand), locality_key(demand))), line_key
    ):
        same_class = list(members)
        is_short_line = len(same_class) * CHAIN_CHUNK_RATIO <= same_class[0].target.chunk_count
        if is_short_line or few_slots or sum(state.free_slots(feed) for feed in feeds[:2]) < 2:
            feeds = _chain(state, same_class, feeds, followers)
        else:
            two_trees(state, same_class, feeds)
            with_slot = [
                each.target for each in same_class if state.free_slots(each.target) > bool(followers[each.fork_id])
            ]
            feeds = [min(with_slot, key=state.load)]


def _chain(
    state: PlanState, line: list[ForkDemand], feeds: list[Source], followers: dict[str, list[ForkDemand]]
) -> list[Source]:
    """Chain targets: each reads from the last one with a spare slot; return the sources for the next."""
    for demand in line:
        feeds = [feed for feed in feeds if state.free_slots(feed)]
        if feeds:
            _read(state, demand, zip(feeds, _parts(state, demand, feeds, len(feeds)), strict=False))
            if state.free_slots(demand.target) > bool(followers[demand.fork_id]):
                feeds = [demand.target]
    return feeds


def two_trees(
    state: PlanState,
    line: Sequence[ForkDemand],
    feeds: Sequence[Source],
    able: Mapping[str, Storage] | None = None,
) -> None:
    """Assign the line to two trees below its sources; with `able` (by fork_id) the roots read storage."""
    below_relays = bool(feeds) and not feeds[0].complete
    halves = _parts(state, line[0], feeds, 2)
    both = trees.two_trees(
        len(line),
        spare_at_top=below_relays or (bool(feeds) and len(line) in BURST_START),
        keep_depth=not below_relays,
    )
    feeds = _feeds_by_half(state, feeds[:2], halves)
    last_chunks = [((half[-1][1] - 1, half[-1][1]),) for half in halves]
    last_parents = [
        {
            child: parent
            for child, parent in trees.last_chunk_parents(tree, other).items()
            if state.free_slots(line[parent].target) >= LAST_CHUNK_SLOTS
        }
        for tree, other in zip(both, reversed(both), strict=True)
    ]
    for position, demand in enumerate(line):
        shares: list[tuple[Source, tuple[Range, ...]]] = []
        storage: list[tuple[Storage, tuple[Range, ...]]] = []
        for tree, half in enumerate(halves):
            parent = both[tree][position]
            if (last_parent := last_parents[tree].get(position)) is not None:
                shares.append((line[parent].target, subtract(half, last_chunks[tree])))
                shares.append((line[last_parent].target, last_chunks[tree]))
            elif parent != trees.ROOT:
                shares.append((line[parent].target, half))
            elif able is not None:
                storage.append((able[demand.fork_id], half))
            else:
                shares.append((feeds[tree % len(feeds)], half))
        _read(state, demand, shares, storage)


def _parts(state: PlanState, demand: ForkDemand, feeds: Sequence[Source], count: int) -> list[tuple[Range, ...]]:
    """Return the chunks of the lines or trees below the feeds: runs of the image, or alternating short runs.

    A relay that reads from one source mostly reads in order: it would have nothing for the last part until it has the
    chunks before it.
    """
    all_chunks = _all_chunks(demand)
    parts = split(all_chunks, count)
    if all(feed.complete or _receives_together(state, feed, parts) for feed in feeds):
        return parts
    return split_alternately(all_chunks, [1.0] * len(parts))


def _receives_together(state: PlanState, relay: Source, parts: Sequence[tuple[Range, ...]]) -> bool:
    """Return True if a relay reads each part from other sources than the other parts, so all at the same time."""
    sources = [
        {share.source_id for share in state.shares(relay.instance_id) if intersect(share.chunks, part)}
        for part in parts
    ]
    return sum(map(len, sources)) == len(set[str]().union(*sources))


def _feeds_by_half(state: PlanState, feeds: Sequence[Source], halves: Sequence[tuple[Range, ...]]) -> Sequence[Source]:
    """Return the sources of the two trees: of two relays, each feeds the half that reaches it over fewer links."""
    if len(feeds) < 2 or len(halves) < 2 or all(feed.complete for feed in feeds):
        return feeds
    chunks = [half[-1][1] - 1 for half in halves]
    return min(
        (feeds, feeds[::-1]),
        key=lambda order: sum(state.links(feed, chunk) for feed, chunk in zip(order, chunks, strict=True)),
    )


def _read(
    state: PlanState,
    demand: ForkDemand,
    shares: Iterable[tuple[Source, tuple[Range, ...]]],
    storage: Sequence[tuple[Storage, tuple[Range, ...]]] = (),
) -> None:
    target = demand.target
    assignments = to_assignments(target, shares)
    reason = reasons.choice_reason(state, target, assignments, storage)
    state.decide(
        demand,
        PlanDecision(
            target.weights_id,
            assignments,
            reason,
            provisional_id=target.provisional_id,
            storage=merge_storage_reads(storage),
        ),
    )


def _feed_count(state: PlanState, feeds: Sequence[Source], leaders: Sequence[ForkDemand]) -> int:
    """Return how many lines the sources can feed at the full speed of a target's link."""
    speeds = [demand.target.ingress_rate for demand in leaders if demand.target.ingress_rate]
    link = max(speeds, default=max((feed.egress_rate or 0.0 for feed in feeds), default=0.0))
    capacity = 0.0
    for feed in feeds:
        capacity += min(link_fraction(feed, link), state.spare_egress(feed))
    return max(1, int(capacity + IDLE_LOAD))


def _all_chunks(demand: ForkDemand) -> tuple[Range, ...]:
    return ((0, demand.target.chunk_count),)


def node_of(demand: ForkDemand) -> str:
    """Return the NVLink domain or host of a target: the unit that reads over the network once."""
    location = demand.target.location
    return f"nvlink {location.nvlink}" if location.nvlink is not None else f"host {location.host}"


def _node_followers(leader: ForkDemand, members: Sequence[ForkDemand]) -> list[ForkDemand]:
    """Return the other targets of a node: grouped by host, and those that accept no readers last."""
    own_node = leader.target.location.host

    def key(demand: ForkDemand) -> tuple[bool, bool, str, tuple[int, str]]:
        host = demand.target.location.host
        return not demand.target.max_readers, host != own_node, host, _slots_key(demand)

    return sorted((each for each in members if each is not leader), key=key)


def _slots_key(demand: ForkDemand) -> tuple[int, str]:
    """Return a sort key that puts targets without reader slots last."""
    return -min(2, demand.target.max_readers), demand.target.instance_id


def _location_key(source: Source) -> tuple[str, str, str, str]:
    location = source.location
    return location.zone or "", location.rack or "", location.host, source.instance_id


def locality_key(demand: ForkDemand) -> tuple[str, str, str, str]:
    """Return the order of a line of targets, which keeps neighbours together."""
    return _location_key(demand.target)


def _speed(demand: ForkDemand, fastest: float) -> int:
    """Return the speed class of a target, 0 for the fastest; unmeasured targets count as fast."""
    rate, steps = demand.target.ingress_rate or fastest, 0
    while rate * SPEED_CLASS < fastest:
        rate, steps = rate * SPEED_CLASS, steps + 1
    return steps
