"""Many targets at once: one plan for all that arrived together.

One target a node (host, or NVLink domain) reads over the network; the others of the node stand in a
chain behind it. The readers are divided among the sources that are free. Those of one source form a
chain while they are few (a chain of N costs N/k), and two interior-disjoint trees when they are many
(2·log2(N)/k). The fastest stand first; who takes only one reader, or is known to be slow, stands
behind all others, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

from planner.policy import reasons, trees
from planner.policy.chunk_split import split, the, to_assignments
from planner.policy.eligibility import ineligible_reason, source_sort_key
from planner.policy.plan_state import IDLE_LOAD, PlanState
from planner.policy.source_selection import MAX_STRIPES
from planner.policy.transports import transport_cost
from planner.policy_types import ForkDemand, PlanDecision, Source, Storage, link_fraction
from rfork.image.ranges import Range

CHAIN_CHUNK_RATIO: Final = 10
"""A chain is short enough while it has no more targets than a tenth of the chunks."""
MIN_TREE_FEED: Final = 0.45
"""Part of a link that suffices to feed one of the two trees at full speed."""
SPEED_CLASS: Final = 2.0
"""Targets measured at less than the fastest one's speed over this stand behind it, and so on."""


def plan_fanout(state: PlanState, demands: Sequence[ForkDemand], candidates: Iterable[Source]) -> list[ForkDemand]:
    """Decide for targets of one layout that hold nothing; returns those that get no slot here.

    All want the same weights and have the same transports; none has failed a source.
    """
    nodes = [list(members) for _, members in groupby(sorted(demands, key=node_of), key=node_of)]
    leaders = [min(members, key=lambda demand: (demand.target.slow, *_few_slots_last(demand))) for members in nodes]
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
        assigned_feeds = line[len(line) * part // parts : len(line) * (part + 1) // parts]
        sources = feeds[len(feeds) * part // parts : len(feeds) * (part + 1) // parts]
        _place_line(state, assigned_feeds, sources[:MAX_STRIPES], followers)
    for leader in leaders:
        for before, demand in zip([leader, *followers[leader.fork_id]], followers[leader.fork_id], strict=False):
            if not state.is_unplanned(before.target.instance_id) and state.slots(before.target):
                _read(state, demand, [(before.target, _all_chunks(demand))])
    return [demand for demand in demands if state.is_unplanned(demand.target.instance_id)]


def select_feeds(state: PlanState, demands: Sequence[ForkDemand], candidates: Iterable[Source]) -> list[Source]:
    """The sources that a line of targets may be divided among, best first; all give every chunk.

    Idle seeds if there are any, else idle relays; else two that have half of their link to spare, for
    one line; else the least loaded.
    """
    demand, all_chunks = demands[0], _all_chunks(demands[0])
    idle: list[Source] = []
    halves: list[Source] = []
    for source in sorted(candidates, key=lambda source: source_sort_key(state, source, demand.target)):
        if ineligible_reason(source, demand, state.now) or not state.slots(source):
            continue
        load = state.load(source, demand.target)
        if state.is_unplanned(source.instance_id) or (halves and 1.0 - load < MIN_TREE_FEED):
            continue
        if idle and (load > IDLE_LOAD or source.complete != idle[0].complete):
            break
        if (idle or halves) and transport_cost(source, demand.target) != transport_cost(
            (idle or halves)[0], demand.target
        ):
            break
        if state.available_chunks(source, all_chunks, demand.target) == all_chunks:
            (idle if load <= IDLE_LOAD else halves).append(source)
            if len(halves) == 2 or len(idle) == MAX_STRIPES * len(demands):
                break
    return idle or halves


def _place_line(
    state: PlanState, line: list[ForkDemand], feeds: list[Source], followers: dict[str, list[ForkDemand]]
) -> None:
    """Have a line of targets read from its sources: class by class, each behind the one before it."""
    fastest = max((demand.target.ingress_rate or 0.0 for demand in line), default=0.0)

    def line_key(demand: ForkDemand) -> tuple[bool, int, bool]:
        few_slots = state.slots(demand.target) < 2 + bool(followers[demand.fork_id])
        return demand.target.slow, _speed(demand, fastest), few_slots

    for (_, _, few_slots), members in groupby(
        sorted(line, key=lambda demand: (line_key(demand), locality_key(demand))), line_key
    ):
        same_class = list(members)
        is_short_line = len(same_class) * CHAIN_CHUNK_RATIO <= same_class[0].target.chunk_count
        if is_short_line or few_slots or sum(state.slots(feed) for feed in feeds[:2]) < 2:
            feeds = _chain(state, same_class, feeds, followers)
        else:
            two_trees(state, same_class, feeds)
            with_slot = [each.target for each in same_class if state.slots(each.target) > bool(followers[each.fork_id])]
            feeds = [min(with_slot, key=state.load)]


def _chain(
    state: PlanState, line: list[ForkDemand], feeds: list[Source], followers: dict[str, list[ForkDemand]]
) -> list[Source]:
    """Each reads from the last before it that has a slot to spare; returns who is read from next."""
    for demand in line:
        feeds = [feed for feed in feeds if state.slots(feed)]
        if feeds:
            _read(state, demand, zip(feeds, split(_all_chunks(demand), len(feeds)), strict=False))
            if state.slots(demand.target) > bool(followers[demand.fork_id]):
                feeds = [demand.target]
    return feeds


def two_trees(
    state: PlanState,
    line: Sequence[ForkDemand],
    feeds: Sequence[Source],
    able: Mapping[str, Storage] | None = None,
) -> None:
    """Have the line read by two trees from its sources; with `able` (by fork_id) the roots read storage."""
    halves = split(_all_chunks(line[0]), 2)
    both = trees.two_trees(len(line))
    for position, demand in enumerate(line):
        shares: list[tuple[Source, tuple[Range, ...]]] = []
        storage: list[tuple[Storage, tuple[Range, ...]]] = []
        for tree, half in enumerate(halves):
            parent = both[tree][position]
            if parent != trees.ROOT:
                shares.append((line[parent].target, half))
            elif able is not None:
                storage.append((able[demand.fork_id], half))
            else:
                shares.append((feeds[tree % len(feeds)], half))
        _read(state, demand, shares, storage)


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
            target.weights_id, assignments, reason, provisional_id=target.provisional_id, storage=the(storage)
        ),
    )


def _feed_count(state: PlanState, feeds: Sequence[Source], leaders: Sequence[ForkDemand]) -> int:
    """How many lines the sources can feed at the full speed of a target's link."""
    speeds = [demand.target.ingress_rate for demand in leaders if demand.target.ingress_rate]
    link = max(speeds, default=max((feed.egress_rate or 0.0 for feed in feeds), default=0.0))
    capacity = 0.0
    for feed in feeds:
        capacity += min(link_fraction(feed, link), state.spare_egress(feed))
    return max(1, int(capacity + IDLE_LOAD))


def _all_chunks(demand: ForkDemand) -> tuple[Range, ...]:
    return ((0, demand.target.chunk_count),)


def node_of(demand: ForkDemand) -> str:
    """The NVLink domain or host of a target: what reads over the network once."""
    location = demand.target.location
    return f"nvlink {location.nvlink}" if location.nvlink is not None else f"host {location.host}"


def _node_followers(leader: ForkDemand, members: Sequence[ForkDemand]) -> list[ForkDemand]:
    """The others of a node: those of one host together, and who takes no reader last."""
    own_node = leader.target.location.host

    def key(demand: ForkDemand) -> tuple[bool, bool, str, tuple[int, str]]:
        host = demand.target.location.host
        return not demand.target.max_readers, host != own_node, host, _few_slots_last(demand)

    return sorted((each for each in members if each is not leader), key=key)


def _few_slots_last(demand: ForkDemand) -> tuple[int, str]:
    """Who takes no reader stands behind those that do."""
    return -min(2, demand.target.max_readers), demand.target.instance_id


def _location_key(source: Source) -> tuple[str, str, str, str]:
    location = source.location
    return location.zone or "", location.rack or "", location.host, source.instance_id


def locality_key(demand: ForkDemand) -> tuple[str, str, str, str]:
    """By this a line of targets is in order: neighbours stand together."""
    return _location_key(demand.target)


def _speed(demand: ForkDemand, fastest: float) -> int:
    """The class of a target's measured speed, 0 the fastest; one that was not measured counts as fast."""
    rate, steps = demand.target.ingress_rate or fastest, 0
    while rate * SPEED_CLASS < fastest:
        rate, steps = rate * SPEED_CLASS, steps + 1
    return steps
