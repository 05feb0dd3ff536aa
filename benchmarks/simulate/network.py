"""Simulated network: links shared equally, flows over them, and the one clock of a run.

Each node has two links, one per direction (full duplex). Sizes are parts of the image, rates are images per
unit of time: with links of rate 1 the unit is S/B. The rate of a flow is the smaller of the equal shares at
its two ends; what one end cannot use is not given to the other flows there, so a simulated flow is never
faster than a real one could be. When a flow begins or ends only the flows that share one of its links change.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

INSTANT: Final = 1e-9
"""Events closer together than this belong to one instant: sums of rounded numbers differ by less."""

TagT = TypeVar("TagT")


class Link(Generic[TagT]):
    """One direction of a node's connection to the network; `carried` counts what it has transferred so far."""

    __slots__ = ("carried", "flows", "rate", "share", "updated_at")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.flows: dict[Flow[TagT], None] = {}
        self.updated_at = 0
        self.share = rate
        self.carried = 0.0


class Flow(Generic[TagT]):
    """A transfer over two links; `tag` identifies it to its owner."""

    __slots__ = ("active", "egress", "ingress", "rate", "remaining", "serial", "since", "size", "tag")

    def __init__(self, egress: Link[TagT], ingress: Link[TagT], size: float, tag: TagT) -> None:
        self.egress = egress
        self.ingress = ingress
        self.size = size
        self.remaining = size
        self.tag = tag
        self.rate = 0.0
        self.since = 0.0
        self.serial = -1
        self.active = False


class Network(Generic[TagT]):
    """Runs flows and calls in order of time; `arrived` is called with all flows that ended in one instant."""

    def __init__(self, arrived: Callable[[Sequence[Flow[TagT]]], None], *, latency: float = 0.0) -> None:
        self.now = 0.0
        self._arrived = arrived
        self._latency = latency
        self._heap: list[tuple[float, int, Flow[TagT] | Callable[[], None]]] = []
        self._serial = 0
        self._changed: dict[Link[TagT], None] = {}
        self._fresh: list[Flow[TagT]] = []

    def start(self, flow: Flow[TagT]) -> None:
        """Start to send: the first byte leaves after the latency."""
        if self._latency:
            self._schedule(self.now + self._latency, flow)
        else:
            self._join(flow)

    def cancel(self, flow: Flow[TagT]) -> None:
        """End the flow before its last byte, without a callback."""
        flow.serial = -1
        if flow.active:
            left = flow.remaining - flow.rate * (self.now - flow.since)
            self._detach(flow, flow.size - left)

    def set_rate(self, link: Link[TagT], rate: float) -> None:
        """Change the rate of a link from now on."""
        link.rate = rate
        link.updated_at = -1
        self._changed[link] = None

    def call(self, time: float, callback: Callable[[], None]) -> None:
        """Schedule `callback` at `time`."""
        self._serial += 1
        heapq.heappush(self._heap, (time, self._serial, callback))

    def run(self, until: Callable[[], bool]) -> None:
        """Advance time until the condition is true after an instant, or no event is left."""
        heap, pop = self._heap, heapq.heappop
        self._update_rates()
        while heap and not until():
            time = heap[0][0]
            horizon = time + INSTANT
            ended: list[Flow[TagT]] = []
            calls: list[Callable[[], None]] = []
            self.now = time
            while heap and heap[0][0] <= horizon:
                _, serial, callback = pop(heap)
                if not isinstance(callback, Flow):
                    calls.append(callback)
                elif callback.serial == serial:
                    if callback.active:
                        ended.append(callback)
                    else:
                        self._join(callback)
            for flow in ended:
                flow.serial = -1
                self._detach(flow, flow.size)
            if ended:
                self._arrived(ended)
            for call in calls:
                call()
            self._update_rates()

    def _schedule(self, time: float, flow: Flow[TagT]) -> None:
        self._serial += 1
        flow.serial = self._serial
        heapq.heappush(self._heap, (time, self._serial, flow))

    def _join(self, flow: Flow[TagT]) -> None:
        flow.active = True
        flow.since = self.now
        flow.egress.flows[flow] = None
        flow.ingress.flows[flow] = None
        self._changed[flow.egress] = self._changed[flow.ingress] = None
        self._fresh.append(flow)

    def _detach(self, flow: Flow[TagT], moved: float) -> None:
        flow.active = False
        flow.egress.carried += moved
        flow.ingress.carried += moved
        del flow.egress.flows[flow], flow.ingress.flows[flow]
        self._changed[flow.egress] = self._changed[flow.ingress] = None

    def _update_rates(self) -> None:
        """Update the rates of the flows on every link whose rate or number of flows changed."""
        if not self._changed:
            return
        # A flow that replaced one that ended changes nothing for its neighbours.
        affected: dict[Flow[TagT], None] = dict.fromkeys(self._fresh)
        self._fresh.clear()
        for link in self._changed:
            number = len(link.flows)
            if number != link.updated_at:
                link.updated_at = number
                if number:
                    link.share = link.rate / number
                    affected.update(link.flows)
        self._changed.clear()
        now = self.now
        for flow in affected:
            if not flow.active:
                continue
            rate = min(flow.egress.share, flow.ingress.share)
            if rate != flow.rate:
                flow.remaining -= flow.rate * (now - flow.since)
                flow.since = now
                flow.rate = rate
                self._schedule(now + flow.remaining / rate, flow)
