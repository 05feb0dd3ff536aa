"""How long forks will take by a plan: its shares as flows of blocks over links.

Each host has one link, one direction each way, for what leaves it; what stays within a host moves at
`WITHIN_HOST`. A target reads a block from a source once that holds it, in the order in which the source got
them, so that what relays give while they receive is accounted for. A flow's part of a link is its part of the
bytes that go there, or an equal one if that is more: each then ends about when it would if those that end
before it handed their parts on.

Left out: what comes before the first byte (the planner's own wait for others, capture, connections) and after
the last (verification of what is not verified on the way), new plans on the way, links between racks, the
link of those that read storage over the network, other ranks on a host's link, and governors, which hold
back a seed while it serves.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from planner.fleet import Share, Source
from planner.policy.ways import shared_transports
from rfork.image.ranges import Range, subtract

MOST_DELIVERIES: Final = 1 << 16
"""Blocks that come to all targets together: of more chunks than that several make one block."""
WITHIN_HOST: Final = 4e9
"""Bytes a second from one process of a host to another, verified: about what two busy cores do."""
WITHIN_GPUS: Final = 50e9
"""The same between GPUs of a host."""

Shares = Mapping[str, tuple[Share, ...]]
"""What each target reads, by its instance_id; a share of its own stands for its storage."""
Ends = tuple[str, str]
STORAGE: Final = "storage of "
"""What a target's storage is called beside instances, whose ids have no spaces."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second."""

    link: float
    """One direction of a host's link."""
    storage: float
    """Storage, for each that reads it."""


@dataclass(slots=True)
class _Flow:
    """What one target reads from one source."""

    target: str
    parts: dict[int, int]
    """Chunks by block."""
    chunks: int
    rate: float = 0.0
    whole: bool = False
    """A loader, which gives nothing before it has read everything."""
    free_at: float = 0.0


@dataclass(slots=True)
class _Node:
    waits: dict[int, int] = field(default_factory=dict)
    """Blocks, and how many flows still bring a part of each."""
    flows: list[_Flow] = field(default_factory=list)
    """Those that read from it."""


def predict(
    sources: Mapping[str, Source], shares: Shares, image_bytes: int, rates: Rates
) -> dict[str, float]:
    """Seconds from now until each target has all that its shares are to bring; 0: it has.

    Who has to wait for chunks that nobody gives is missing. `sources` holds the targets too.
    """
    chunk_count = max((sources[name].chunk_count for name in shares), default=0)
    chunk_bytes = image_bytes / max(1, chunk_count)
    size = max(1, -(-chunk_count * len(shares) // MOST_DELIVERIES))
    nodes, flows = _wired(sources, shares, size)
    _set_rates(sources, flows, rates)
    heap: list[tuple[float, int, str, int]] = []
    serial = count()

    def give(node: _Node, block: int, at: float) -> None:
        for flow in node.flows:
            chunks = flow.parts.get(block)
            if chunks is None:
                continue
            if flow.whole:
                flow.free_at = flow.chunks * chunk_bytes / flow.rate
            else:
                # A chunk of the block that just came is read while the next one comes.
                ready_at = at + chunk_bytes / flow.rate
                flow.free_at = max(ready_at, flow.free_at + chunks * chunk_bytes / flow.rate)
            heapq.heappush(heap, (flow.free_at, next(serial), flow.target, block))

    for name, node in nodes.items():
        stored = name.startswith(STORAGE)
        blocks = range(-(-chunk_count // size)) if stored else _held(sources.get(name), chunk_count, size)
        for block in blocks:
            if block not in node.waits:
                give(node, block, 0.0)
    done = {name: 0.0 for name in shares if not nodes[name].waits}
    while heap:
        at, _, name, block = heapq.heappop(heap)
        node = nodes[name]
        node.waits[block] -= 1
        if not node.waits[block]:
            del node.waits[block]
            give(node, block, at)
            if not node.waits:
                done[name] = at
    return done


def _wired(
    sources: Mapping[str, Source], shares: Shares, size: int
) -> tuple[dict[str, _Node], dict[Ends, _Flow]]:
    """The nodes, and the flows by source and target. A target's storage is a node of its own, without a name
    that `sources` has.
    """
    nodes: dict[str, _Node] = {name: _Node() for name in shares}
    flows: dict[Ends, _Flow] = {}
    for target, reads in shares.items():
        held = sources[target].verified
        for share in reads:
            parts = dict(_blocks(subtract(share.chunks, held), size))
            own = share.source_id == target
            giver = f"{STORAGE}{target}" if own else share.source_id
            if not parts:
                continue
            flow = _Flow(target, parts, sum(parts.values()), whole=share.whole)
            flows[share.source_id, target] = flow
            nodes.setdefault(giver, _Node()).flows.append(flow)
            for block in parts:
                nodes[target].waits[block] = nodes[target].waits.get(block, 0) + 1
    return nodes, flows


def _set_rates(sources: Mapping[str, Source], flows: Mapping[Ends, _Flow], rates: Rates) -> None:
    """Give each flow the least of what it gets at either end."""
    limits: dict[Ends, list[tuple[str, float]]] = {}
    for (name, target), flow in flows.items():
        source, reader = sources.get(name), sources[target]
        flow.rate = rates.storage if name == target else rates.link
        if name == target or source is None:
            continue
        if source.place.host == reader.place.host:
            transports = shared_transports(source, reader)
            flow.rate = WITHIN_GPUS if transports[:1] == ("cuda_ipc",) else WITHIN_HOST
            limits[name, target] = []
        else:
            out, into = f"from host {source.place.host}", f"to host {reader.place.host}"
            limits[name, target] = [(out, rates.link), (into, rates.link)]
        if source.egress_rate is not None:
            limits[name, target].append((f"instance {name}", source.egress_rate))
    asked: dict[str, list[int]] = {}
    for ends, passed in limits.items():
        for place, _ in passed:
            asked.setdefault(place, []).append(flows[ends].chunks)
    totals = {place: (len(chunks), sum(chunks)) for place, chunks in asked.items()}
    for ends, passed in limits.items():
        flow = flows[ends]
        for place, rate in passed:
            number, chunks = totals[place]
            flow.rate = min(flow.rate, rate * max(1 / number, flow.chunks / chunks))


def _held(source: Source | None, chunk_count: int, size: int) -> Iterable[int]:
    """Blocks that a source has from the beginning; one that is gone has none."""
    if source is None:
        return ()
    parts = _blocks(source.verified, size)
    return [block for block, chunks in parts if chunks == min(size, chunk_count - block * size)]


def _blocks(ranges: Iterable[Range], size: int) -> Iterator[tuple[int, int]]:
    """Each block that the ranges (normalised) touch, and how many chunks of it they hold."""
    before: tuple[int, int] | None = None
    for begin, end in ranges:
        for block in range(begin // size, -(-end // size)):
            chunks = min(end, (block + 1) * size) - max(begin, block * size)
            if before is not None and before[0] == block:
                before = block, before[1] + chunks
            else:
                if before is not None:
                    yield before
                before = block, chunks
    if before is not None:
        yield before
