"""Simulation of fork durations: the shares of a plan as flows of blocks over links.

Each host has one full-duplex link for traffic that leaves it; traffic within a host moves at
`SAME_HOST_RATE`. A target reads a block from a source once the source has it, in the order in which the
source received it, so that relays that serve while they receive are modelled. A flow's fraction of a link is
its fraction of the bytes on it, or an equal fraction if that is more: each flow then ends about when it would
if finished flows passed on their bandwidth.

Not modelled: time before the first byte (batching, capture, connections) and after the last (verification
that is not overlapped), replans, links between racks, the link of targets that read storage over the network,
other ranks on a host's link, and latency controllers, which throttle a serving seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from planner.policy.transports import shared_transports
from planner.policy_types import ChunkShare, Source
from rfork.image.ranges import Range, subtract

MAX_DELIVERIES: Final = 1 << 16
"""Maximum number of blocks delivered to all targets together: if there are more chunks, a block has several."""
SAME_HOST_RATE: Final = 4e9
"""Bytes per second between two processes of a host, verified: about the speed of two busy cores."""
CUDA_IPC_RATE: Final = 50e9
"""The same between GPUs of a host."""

Shares = Mapping[str, tuple[ChunkShare, ...]]
"""Reads of each target, by its instance_id; a share with its own id means its storage."""
LinkEnd = tuple[str, str]
STORAGE: Final = "storage of "
"""Prefix for the name of a target's storage; it contains spaces, which instance ids do not."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Rates in bytes per second."""

    link: float
    """One direction of a host's link."""
    storage: float
    """Storage, per reader."""


@dataclass(slots=True)
class _Flow:
    """Chunks that one target reads from one source."""

    target: str
    parts: dict[int, int]
    """Number of chunks by block."""
    chunks: int
    rate: float = 0.0
    all_or_nothing: bool = False
    """A loader, which serves nothing until it has read everything."""
    free_at: float = 0.0


@dataclass(slots=True)
class _Node:
    missing_blocks: dict[int, int] = field(default_factory=dict)
    """By block, the number of flows that still deliver a part of it."""
    flows: list[_Flow] = field(default_factory=list)
    """Flows that read from this node."""


def simulate_flows(
    sources: Mapping[str, Source], shares: Shares, image_bytes: int, rates: LinkRates
) -> dict[str, float]:
    """Return the seconds until each target has everything that its shares deliver; 0 if it already has.

    A target that waits for chunks that no source serves is omitted. `sources` includes the targets.
    """
    chunk_count = max((sources[name].chunk_count for name in shares), default=0)
    chunk_bytes = image_bytes / max(1, chunk_count)
    size = max(1, -(-chunk_count * len(shares) // MAX_DELIVERIES))
    nodes, flows = _build_graph(sources, shares, size)
    _set_rates(sources, flows, rates)
    heap: list[tuple[float, int, str, int]] = []
    serial = count()

    def deliver(node: _Node, block: int, at: float) -> None:
        for flow in node.flows:
            chunks = flow.parts.get(block)
            if chunks is None:
                continue
            if flow.all_or_nothing:
                flow.free_at = flow.chunks * chunk_bytes / flow.rate
            else:
                # Pipelining: a chunk of the last block is read while the next block arrives.
                ready_at = at + chunk_bytes / flow.rate
                flow.free_at = max(ready_at, flow.free_at + chunks * chunk_bytes / flow.rate)
            heapq.heappush(heap, (flow.free_at, next(serial), flow.target, block))

    for name, node in nodes.items():
        stored = name.startswith(STORAGE)
        blocks = range(-(-chunk_count // size)) if stored else _initial_blocks(sources.get(name), chunk_count, size)
        for block in blocks:
            if block not in node.missing_blocks:
                deliver(node, block, 0.0)
    done = {name: 0.0 for name in shares if not nodes[name].missing_blocks}
    while heap:
        at, _, name, block = heapq.heappop(heap)
        node = nodes[name]
        node.missing_blocks[block] -= 1
        if not node.missing_blocks[block]:
            del node.missing_blocks[block]
            deliver(node, block, at)
            if not node.missing_blocks:
                done[name] = at
    return done


def _build_graph(
    sources: Mapping[str, Source], shares: Shares, size: int
) -> tuple[dict[str, _Node], dict[LinkEnd, _Flow]]:
    """Return the nodes, and the flows by source and target. A target's storage is a separate node with a name
    that is not in `sources`.
    """
    nodes: dict[str, _Node] = {name: _Node() for name in shares}
    flows: dict[LinkEnd, _Flow] = {}
    for target, reads in shares.items():
        verified = sources[target].verified
        for share in reads:
            parts = dict(_blocks(subtract(share.chunks, verified), size))
            from_storage = share.source_id == target
            source_id = f"{STORAGE}{target}" if from_storage else share.source_id
            if not parts:
                continue
            flow = _Flow(target, parts, sum(parts.values()), all_or_nothing=share.all_or_nothing)
            flows[share.source_id, target] = flow
            nodes.setdefault(source_id, _Node()).flows.append(flow)
            for block in parts:
                nodes[target].missing_blocks[block] = nodes[target].missing_blocks.get(block, 0) + 1
    return nodes, flows


def _set_rates(sources: Mapping[str, Source], flows: Mapping[LinkEnd, _Flow], rates: LinkRates) -> None:
    """Assign each flow the lower of its rates at both ends."""
    limits: dict[LinkEnd, list[tuple[str, float]]] = {}
    for (name, target), flow in flows.items():
        source, reader = sources.get(name), sources[target]
        flow.rate = rates.storage if name == target else rates.link
        if name == target or source is None:
            continue
        if source.location.host == reader.location.host:
            transports = shared_transports(source, reader)
            flow.rate = CUDA_IPC_RATE if transports[:1] == ("cuda_ipc",) else SAME_HOST_RATE
            limits[name, target] = []
        else:
            out, into = f"from host {source.location.host}", f"to host {reader.location.host}"
            limits[name, target] = [(out, rates.link), (into, rates.link)]
        if source.egress_rate is not None:
            limits[name, target].append((f"instance {name}", source.egress_rate))
    flows_by_end: dict[str, list[int]] = {}
    for ends, link_ends in limits.items():
        for link_end, _ in link_ends:
            flows_by_end.setdefault(link_end, []).append(flows[ends].chunks)
    totals = {link_end: (len(chunks), sum(chunks)) for link_end, chunks in flows_by_end.items()}
    for ends, link_ends in limits.items():
        flow = flows[ends]
        for link_end, rate in link_ends:
            number, chunks = totals[link_end]
            flow.rate = min(flow.rate, rate * max(1 / number, flow.chunks / chunks))


def _initial_blocks(source: Source | None, chunk_count: int, size: int) -> Iterable[int]:
    """Return the blocks that a source has initially; none if it was removed."""
    if source is None:
        return ()
    parts = _blocks(source.verified, size)
    return [block for block, chunks in parts if chunks == min(size, chunk_count - block * size)]


def _blocks(ranges: Iterable[Range], size: int) -> Iterator[tuple[int, int]]:
    """Yield each block that the (normalised) ranges touch, with the number of its chunks in them."""
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
