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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from planner.policy.transports import shared_transports
from planner.policy.types import ChunkShare, Source
from rfork.image.ranges import Range, subtract

MAX_DELIVERIES: Final = 1 << 16
"""Maximum number of blocks delivered to all targets together: if there are more chunks, a block has several."""
SAME_HOST_RATE: Final = 4e9
"""Bytes per second between two processes of a host, verified: about the speed of two busy cores."""
CUDA_IPC_RATE: Final = 50e9
"""The same between GPUs of a host."""
STORAGE_PREFIX: Final = "storage of "
"""Prefix for the name of a target's storage; it contains spaces, which instance ids do not."""

Shares = Mapping[str, tuple[ChunkShare, ...]]
"""Reads of each target, by its instance_id; a share with its own id means its storage."""
FlowKey = tuple[str, str]
"""Ids of a flow's source and target."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Rates in bytes per second."""

    link: float
    """One direction of a host's link."""
    storage: float
    """Storage, per reader."""


def simulate_flows(
    sources: Mapping[str, Source], shares: Shares, image_bytes: int, rates: LinkRates
) -> dict[str, float]:
    """Return the seconds until each target has everything that its shares deliver; 0 if it already has.

    A target that waits for chunks that no source serves is omitted. `sources` includes the targets.
    """
    chunk_count = max((sources[name].chunk_count for name in shares), default=0)
    chunk_bytes = image_bytes / max(1, chunk_count)
    block_chunks = max(1, -(-chunk_count * len(shares) // MAX_DELIVERIES))
    nodes, flows = _build_graph(sources, shares, block_chunks)
    _set_rates(sources, flows, rates)
    deliveries: list[tuple[float, int, str, int]] = []
    """Heap of the blocks in flight: time of arrival, a tie breaker, target and block."""
    serial = count()

    def send(node: _Node, block: int, at: float) -> None:
        """Send a block to the readers of a node, which has it since `at`."""
        for flow in node.flows:
            chunks = flow.chunks_by_block.get(block)
            if chunks is None:
                continue
            if flow.all_or_nothing:
                flow.free_at = flow.chunks * chunk_bytes / flow.rate
            else:
                # Pipelining: a chunk of the last block is read while the next block arrives.
                ready_at = at + chunk_bytes / flow.rate
                flow.free_at = max(ready_at, flow.free_at + chunks * chunk_bytes / flow.rate)
            heapq.heappush(deliveries, (flow.free_at, next(serial), flow.target, block))

    for name, node in nodes.items():
        is_storage = name.startswith(STORAGE_PREFIX)
        all_blocks = range(-(-chunk_count // block_chunks))
        blocks = all_blocks if is_storage else _initial_blocks(sources.get(name), chunk_count, block_chunks)
        for block in blocks:
            if block not in node.missing_blocks:
                send(node, block, 0.0)
    completed_at = {name: 0.0 for name in shares if not nodes[name].missing_blocks}
    while deliveries:
        at, _, name, block = heapq.heappop(deliveries)
        node = nodes[name]
        node.missing_blocks[block] -= 1
        if not node.missing_blocks[block]:
            del node.missing_blocks[block]
            send(node, block, at)
            if not node.missing_blocks:
                completed_at[name] = at
    return completed_at


@dataclass(slots=True)
class _Flow:
    """Chunks that one target reads from one source."""

    target: str
    chunks_by_block: dict[int, int]
    """Number of chunks by block."""
    chunks: int
    rate: float = 0.0
    all_or_nothing: bool = False
    """A loader, which serves nothing until it has read everything."""
    free_at: float = 0.0
    """Time at which its last block has arrived."""


@dataclass(slots=True)
class _Node:
    """A source, a target, or the storage of a target."""

    missing_blocks: dict[int, int] = field(default_factory=dict)
    """By block, the number of flows that still deliver a part of it."""
    flows: list[_Flow] = field(default_factory=list)
    """Flows that read from this node."""


def _build_graph(
    sources: Mapping[str, Source], shares: Shares, block_chunks: int
) -> tuple[dict[str, _Node], dict[FlowKey, _Flow]]:
    """Return the nodes by name, and the flows by source and target. A target's storage is a separate node."""
    nodes: dict[str, _Node] = {name: _Node() for name in shares}
    flows: dict[FlowKey, _Flow] = {}
    for target, reads in shares.items():
        verified = sources[target].verified
        for share in reads:
            chunks_by_block = dict(_blocks(subtract(share.chunks, verified), block_chunks))
            if not chunks_by_block:
                continue
            flow = _Flow(target, chunks_by_block, sum(chunks_by_block.values()), all_or_nothing=share.all_or_nothing)
            flows[share.source_id, target] = flow
            source_name = f"{STORAGE_PREFIX}{target}" if share.source_id == target else share.source_id
            nodes.setdefault(source_name, _Node()).flows.append(flow)
            missing_blocks = nodes[target].missing_blocks
            for block in chunks_by_block:
                missing_blocks[block] = missing_blocks.get(block, 0) + 1
    return nodes, flows


def _set_rates(sources: Mapping[str, Source], flows: Mapping[FlowKey, _Flow], rates: LinkRates) -> None:
    """Assign each flow the lowest of its rates at the links that it shares with other flows."""
    links_by_flow: dict[FlowKey, list[tuple[str, float]]] = {}
    """Name and rate of each link that a flow uses."""
    for (source_id, target), flow in flows.items():
        source, reader = sources.get(source_id), sources[target]
        from_storage = source_id == target
        flow.rate = rates.storage if from_storage else rates.link
        if from_storage or source is None:
            continue
        links = links_by_flow.setdefault((source_id, target), [])
        if source.location.host == reader.location.host:
            transports = shared_transports(source, reader)
            flow.rate = CUDA_IPC_RATE if transports[:1] == ("cuda_ipc",) else SAME_HOST_RATE
        else:
            links.append((f"from host {source.location.host}", rates.link))
            links.append((f"to host {reader.location.host}", rates.link))
        if source.egress_rate is not None:
            links.append((f"instance {source_id}", source.egress_rate))
    flow_count: Counter[str] = Counter()
    chunk_count: Counter[str] = Counter()
    for key, links in links_by_flow.items():
        for link, _ in links:
            flow_count[link] += 1
            chunk_count[link] += flows[key].chunks
    for key, links in links_by_flow.items():
        flow = flows[key]
        for link, rate in links:
            fraction = max(1 / flow_count[link], flow.chunks / chunk_count[link])
            flow.rate = min(flow.rate, rate * fraction)


def _initial_blocks(source: Source | None, chunk_count: int, block_chunks: int) -> Iterable[int]:
    """Return the blocks that a source has completely from the start; none if it was removed."""
    if source is None:
        return ()
    verified = _blocks(source.verified, block_chunks)
    return [block for block, chunks in verified if chunks == min(block_chunks, chunk_count - block * block_chunks)]


def _blocks(ranges: Iterable[Range], block_chunks: int) -> Iterator[tuple[int, int]]:
    """Yield each block that the (normalised) ranges touch, with the number of its chunks in them."""
    current: tuple[int, int] | None = None
    for begin, end in ranges:
        for block in range(begin // block_chunks, -(-end // block_chunks)):
            chunks = min(end, (block + 1) * block_chunks) - max(begin, block * block_chunks)
            if current is not None and current[0] == block:
                current = block, current[1] + chunks
            else:
                if current is not None:
                    yield current
                current = block, chunks
    if current is not None:
        yield current
