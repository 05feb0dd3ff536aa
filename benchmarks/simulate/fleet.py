"""Simulated instances: the chunks of each, and what it reads from which source.

A target reads a window of chunks at a time from each of its sources, the lowest first of those that are
assigned to it and that the source has. A chunk can be served as soon as it is complete. The nodes of one host
share its link to the network; among themselves they have separate links. Sets of chunks are the bits of
integers. Times and sizes are those of `benchmarks.simulate.network`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from benchmarks.simulate.network import Flow, Link, Network
from rfork.receiver.source_reads import ActiveRates, SourceReads

LINK_BYTES_PER_S: Final = 10e9
IMAGE_SECONDS: Final = 10.0
"""S/B in seconds, for the policy and for rates, whose constants are in seconds."""
IMAGE_BYTES: Final = int(LINK_BYTES_PER_S * IMAGE_SECONDS)


class SimHost:
    """The machine that several nodes share, with its link to the network."""

    __slots__ = ("egress", "ingress")

    def __init__(self, rate: float) -> None:
        self.egress: Link[SimRead] = Link(rate)
        self.ingress: Link[SimRead] = Link(rate)


class SimNode:
    """An instance: a seed with all chunks, or a target."""

    __slots__ = (
        "alive",
        "arrived_at",
        "chunks",
        "done_at",
        "egress",
        "host",
        "in_flight",
        "ingress",
        "local_egress",
        "local_ingress",
        "name",
        "readers",
        "reads",
        "received",
        "routes",
    )  # fmt: skip

    def __init__(self, name: str, chunks: int, host: SimHost, local_rate: float) -> None:
        self.name = name
        self.chunks = chunks
        self.host = host
        self.egress = host.egress
        self.ingress = host.ingress
        self.local_egress: Link[SimRead] = Link(local_rate)
        self.local_ingress: Link[SimRead] = Link(local_rate)
        self.in_flight = 0
        self.received = 0
        self.routes: dict[SimNode, SimRoute] = {}
        self.reads: SourceReads[int] = SourceReads()
        self.readers: dict[SimRoute, None] = {}
        self.alive = True
        self.arrived_at = 0.0
        self.done_at: float | None = None


class SimRoute:
    """The chunks that one target still needs from one source, and those in flight."""

    __slots__ = ("flows", "missing_chunks", "reads", "source", "target")

    def __init__(self, source: SimNode, target: SimNode) -> None:
        self.source = source
        self.target = target
        self.missing_chunks = 0
        self.flows: dict[Flow[SimRead], None] = {}
        self.reads: SourceReads[int] = SourceReads()


class SimRead:
    """One chunk (as its bit) in flight on one route."""

    __slots__ = ("chunk", "route")

    def __init__(self, route: SimRoute, chunk: int) -> None:
        self.route = route
        self.chunk = chunk


class SimFleet:
    """All nodes of a run and the transfers between them; `finished` is called with each complete target."""

    def __init__(
        self,
        chunk_count: int,
        finished: Callable[[SimNode], None],
        *,
        window: int = 1,
        latency: float = 0.0,
        local_rate: float = 1.0,
    ) -> None:
        self.every_chunk = (1 << chunk_count) - 1
        self.network: Network[SimRead] = Network(self._arrived, latency=latency)
        self.nodes: dict[str, SimNode] = {}
        self._chunk_size = 1 / chunk_count
        self._chunk_bytes = IMAGE_BYTES // chunk_count
        self._window = window
        self._local_rate = local_rate
        self._finished = finished

    def seed(self, name: str, rate: float = 1.0) -> SimNode:
        """Add a node with every chunk; `rate` in images per unit of time, in each direction."""
        return self._add(SimNode(name, self.every_chunk, SimHost(rate), self._local_rate))

    def target(self, name: str, rate: float = 1.0, host: SimHost | None = None) -> SimNode:
        """Add a node without chunks, on a separate host unless one is passed."""
        return self._add(SimNode(name, 0, host or SimHost(rate), self._local_rate))

    def apply_shares(self, target: SimNode, shares: Mapping[str, int]) -> None:
        """Follow a new plan: chunks by source. Chunks in flight stay with the source that sends them."""
        missing = self.every_chunk & ~target.chunks & ~target.in_flight
        for route in list(target.routes.values()):
            route.missing_chunks = 0
        for name, chunks in shares.items():
            source = self.nodes[name]
            known = target.routes.get(source)
            if known is None:
                known = target.routes[source] = SimRoute(source, target)
                source.readers[known] = None
            known.missing_chunks = chunks & missing
        for route in list(target.routes.values()):
            self._start_reads(route)
            if not route.flows and not route.missing_chunks:
                del target.routes[route.source], route.source.readers[route]

    def kill(self, node: SimNode) -> list[SimNode]:
        """End a node: its transfers stop in mid-chunk. Returns its readers."""
        node.alive = False
        for route in list(node.routes.values()):
            self._drop(route)
        readers = list(node.readers)
        for route in readers:
            self._drop(route)
        return [route.target for route in readers]

    def shares(self, target: SimNode) -> dict[str, int]:
        """Return the chunks that the target reads, or has yet to read, from each source."""
        return {
            source.name: route.missing_chunks | sum(flow.tag.chunk for flow in route.flows)
            for source, route in target.routes.items()
        }

    def active_rates(self, target: SimNode) -> ActiveRates:
        """Return the target's rates while it was reading chunks, in bytes per second."""
        now_s = self.network.now * IMAGE_SECONDS
        rates = {source.name: route.reads.bytes_per_s(now_s) for source, route in target.routes.items()}
        return ActiveRates(
            target.reads.bytes_per_s(now_s), {name: rate for name, rate in rates.items() if rate is not None}
        )

    def _add(self, node: SimNode) -> SimNode:
        self.nodes[node.name] = node
        return node

    def _drop(self, route: SimRoute) -> None:
        for flow in route.flows:
            route.target.in_flight &= ~flow.tag.chunk
            route.target.reads.failed(flow.tag.chunk, self.network.now * IMAGE_SECONDS)
            self.network.cancel(flow)
        route.flows.clear()
        del route.target.routes[route.source], route.source.readers[route]

    def _arrived(self, flows: Sequence[Flow[SimRead]]) -> None:
        # All chunks that arrived at this instant are recorded before new ones are chosen.
        waiting_routes: dict[SimRoute, None] = {}
        complete: list[SimNode] = []
        for flow in flows:
            read = flow.tag
            route, chunk = read.route, read.chunk
            target = route.target
            target.chunks |= chunk
            target.in_flight ^= chunk
            target.received += 1
            del route.flows[flow]
            now_s = self.network.now * IMAGE_SECONDS
            seconds = now_s - route.reads.in_flight[chunk].began_at
            route.reads.received(chunk, seconds, now_s)
            target.reads.received(chunk, seconds, now_s)
            waiting_routes[route] = None
            for reader in target.readers:
                if reader.missing_chunks & chunk:
                    waiting_routes[reader] = None
            if target.chunks == self.every_chunk:
                complete.append(target)
        for route in waiting_routes:
            self._start_reads(route)
            if not route.flows and not route.missing_chunks:
                del route.target.routes[route.source], route.source.readers[route]
        for target in complete:
            target.done_at = self.network.now
            self._finished(target)

    def _start_reads(self, route: SimRoute) -> None:
        """Start reads until the route's window is full."""
        while len(route.flows) < self._window:
            ready = route.missing_chunks & route.source.chunks
            if not ready:
                return
            chunk = ready & -ready
            route.missing_chunks ^= chunk
            route.target.in_flight |= chunk
            source, target = route.source, route.target
            if source.host is target.host:
                links = source.local_egress, target.local_ingress
            else:
                links = source.egress, target.ingress
            flow = Flow(*links, self._chunk_size, SimRead(route, chunk))
            route.flows[flow] = None
            route.reads.start(chunk, self._chunk_bytes, self.network.now * IMAGE_SECONDS)
            target.reads.start(chunk, self._chunk_bytes, self.network.now * IMAGE_SECONDS)
            self.network.start(flow)


def bits(indices: Iterable[int]) -> int:
    """Return the set of these chunks."""
    return sum(1 << index for index in indices)
