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

from planner.fleet import Decision, Demand, Source, Storage, part_of_link
from planner.policy import reasons, trees
from planner.policy.choosing import STRIPES
from planner.policy.fitness import order, unfit
from planner.policy.parts import assigned, merged, split
from planner.policy.ways import way
from planner.policy.working import FREE, Working
from rfork.image.ranges import Range

SHORT: Final = 10
"""A chain is short enough while it has no more targets than a tenth of the chunks."""
HALF: Final = 0.45
"""Part of a link that suffices to feed one of the two trees at full speed."""
SPEED_CLASS: Final = 2.0
"""Targets measured at less than the fastest one's speed over this stand behind it, and so on."""


def fan_out(working: Working, demands: Sequence[Demand], candidates: Iterable[Source]) -> list[Demand]:
    """Decide for targets of one layout that hold nothing; returns those that get no slot here.

    All want the same weights and have the same transports; none has failed a source.
    """
    nodes = [list(members) for _, members in groupby(sorted(demands, key=node_of), key=node_of)]
    leaders = [min(members, key=lambda demand: (demand.target.slow, *_few(demand))) for members in nodes]
    feeds = feeds_for(working, leaders, candidates)
    if not feeds:
        return list(demands)
    behind = {
        leader.fork_id: _line_behind(leader, members) for leader, members in zip(leaders, nodes, strict=True)
    }
    parts = min(_feed_count(working, feeds, leaders), len(leaders), len(feeds))
    line = sorted(leaders, key=where)
    feeds = sorted(feeds, key=lambda feed: _place_key(feed))
    for part in range(parts):
        mine = line[len(line) * part // parts : len(line) * (part + 1) // parts]
        sources = feeds[len(feeds) * part // parts : len(feeds) * (part + 1) // parts]
        _spread(working, mine, sources[:STRIPES], behind)
    for leader in leaders:
        for before, demand in zip([leader, *behind[leader.fork_id]], behind[leader.fork_id], strict=False):
            if not working.unplanned(before.target.instance_id) and working.slots(before.target):
                _read(working, demand, [(before.target, _whole(demand))])
    return [demand for demand in demands if working.unplanned(demand.target.instance_id)]


def feeds_for(working: Working, demands: Sequence[Demand], candidates: Iterable[Source]) -> list[Source]:
    """The sources that a line of targets may be divided among, best first; all give every chunk.

    Idle seeds if there are any, else idle relays; else two that have half of their link to spare, for
    one line; else the least loaded.
    """
    demand, whole = demands[0], _whole(demands[0])
    idle: list[Source] = []
    halves: list[Source] = []
    for source in sorted(candidates, key=lambda source: order(working, source, demand.target)):
        if unfit(source, demand, working.now) or not working.slots(source):
            continue
        load = working.load(source, demand.target)
        if working.unplanned(source.instance_id) or (halves and 1.0 - load < HALF):
            continue
        if idle and (load > FREE or source.complete != idle[0].complete):
            break
        if (idle or halves) and way(source, demand.target) != way((idle or halves)[0], demand.target):
            break
        if working.fed(source, whole, demand.target) == whole:
            (idle if load <= FREE else halves).append(source)
            if len(halves) == 2 or len(idle) == STRIPES * len(demands):
                break
    return idle or halves


def _spread(
    working: Working, line: list[Demand], feeds: list[Source], behind: dict[str, list[Demand]]
) -> None:
    """Have a line of targets read from its sources: class by class, each behind the one before it."""
    fastest = max((demand.target.ingress_rate or 0.0 for demand in line), default=0.0)

    def kind(demand: Demand) -> tuple[bool, int, bool]:
        few_slots = working.slots(demand.target) < 2 + bool(behind[demand.fork_id])
        return demand.target.slow, _speed(demand, fastest), few_slots

    for (_, _, few_slots), members in groupby(
        sorted(line, key=lambda demand: (kind(demand), where(demand))), kind
    ):
        alike = list(members)
        short = len(alike) * SHORT <= alike[0].target.chunk_count
        if short or few_slots or sum(working.slots(feed) for feed in feeds[:2]) < 2:
            feeds = _chain(working, alike, feeds, behind)
        else:
            two_trees(working, alike, feeds)
            with_slot = [
                each.target for each in alike if working.slots(each.target) > bool(behind[each.fork_id])
            ]
            feeds = [min(with_slot, key=working.load)]


def _chain(
    working: Working, line: list[Demand], feeds: list[Source], behind: dict[str, list[Demand]]
) -> list[Source]:
    """Each reads from the last before it that has a slot to spare; returns who is read from next."""
    for demand in line:
        feeds = [feed for feed in feeds if working.slots(feed)]
        if feeds:
            _read(working, demand, zip(feeds, split(_whole(demand), len(feeds)), strict=False))
            if working.slots(demand.target) > bool(behind[demand.fork_id]):
                feeds = [demand.target]
    return feeds


def two_trees(
    working: Working,
    line: Sequence[Demand],
    feeds: Sequence[Source],
    able: Mapping[str, Storage] | None = None,
) -> None:
    """Have the line read by two trees from its sources; with `able` (by fork_id) the roots read storage."""
    halves = split(_whole(line[0]), 2)
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
        _read(working, demand, shares, storage)


def _read(
    working: Working,
    demand: Demand,
    shares: Iterable[tuple[Source, tuple[Range, ...]]],
    storage: Sequence[tuple[Storage, tuple[Range, ...]]] = (),
) -> None:
    target = demand.target
    assignments = assigned(target, shares)
    reason = reasons.how(working, target, assignments, storage)
    working.decide(
        demand,
        Decision(target.weights_id, assignments, reason, draft=target.draft, storage=merged(storage)),
    )


def _feed_count(working: Working, feeds: Sequence[Source], leaders: Sequence[Demand]) -> int:
    """How many lines the sources can feed at the full speed of a target's link."""
    speeds = [demand.target.ingress_rate for demand in leaders if demand.target.ingress_rate]
    link = max(speeds, default=max((feed.egress_rate or 0.0 for feed in feeds), default=0.0))
    capacity = 0.0
    for feed in feeds:
        capacity += min(part_of_link(feed, link), working.spare(feed))
    return max(1, int(capacity + FREE))


def _whole(demand: Demand) -> tuple[Range, ...]:
    return ((0, demand.target.chunk_count),)


def node_of(demand: Demand) -> str:
    """The NVLink domain or host of a target: what reads over the network once."""
    place = demand.target.place
    return f"nvlink {place.nvlink}" if place.nvlink is not None else f"host {place.host}"


def _line_behind(leader: Demand, members: Sequence[Demand]) -> list[Demand]:
    """The others of a node: those of one host together, and who takes no reader last."""
    here = leader.target.place.host

    def key(demand: Demand) -> tuple[bool, bool, str, tuple[int, str]]:
        host = demand.target.place.host
        return not demand.target.max_readers, host != here, host, _few(demand)

    return sorted((each for each in members if each is not leader), key=key)


def _few(demand: Demand) -> tuple[int, str]:
    """Who takes no reader stands behind those that do."""
    return -min(2, demand.target.max_readers), demand.target.instance_id


def _place_key(source: Source) -> tuple[str, str, str, str]:
    place = source.place
    return place.zone or "", place.rack or "", place.host, source.instance_id


def where(demand: Demand) -> tuple[str, str, str, str]:
    """By this a line of targets is in order: neighbours stand together."""
    return _place_key(demand.target)


def _speed(demand: Demand, fastest: float) -> int:
    """The class of a target's measured speed, 0 the fastest; one that was not measured counts as fast."""
    rate, steps = demand.target.ingress_rate or fastest, 0
    while rate * SPEED_CLASS < fastest:
        rate, steps = rate * SPEED_CLASS, steps + 1
    return steps
