"""The simulated network: links that are shared equally, flows over them, and the one clock of a run.

Each node has two links, one a direction (full duplex). Sizes are parts of the image, rates are images
a unit of time: with links of rate 1 the unit is S/B. The rate of a flow is the lesser of the equal
shares that its two ends give it; what one end cannot use is not handed to the other flows there, so a
simulated flow is never faster than a real one could be. When a flow begins or ends only the flows that
share one of its links change.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

INSTANT: Final = 1e-9
"""Events this close together are of one instant: sums of rounded numbers differ by less."""

Tag = TypeVar("Tag")


class Link(Generic[Tag]):
    """One direction of a node's connection to the network; `carried` counts what it has moved so far."""

    __slots__ = ("carried", "flows", "rate", "settled", "share")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.flows: dict[Flow[Tag], None] = {}
        self.settled = 0
        self.share = rate
        self.carried = 0.0


class Flow(Generic[Tag]):
    """A transfer over two links; `tag` is what its owner knows it by."""

    __slots__ = ("active", "egress", "ingress", "rate", "remaining", "serial", "since", "size", "tag")

    def __init__(self, egress: Link[Tag], ingress: Link[Tag], size: float, tag: Tag) -> None:
        self.egress = egress
        self.ingress = ingress
        self.size = size
        self.remaining = size
        self.tag = tag
        self.rate = 0.0
        self.since = 0.0
        self.serial = -1
        self.active = False


class Network(Generic[Tag]):
    """Runs flows and calls, in order of time; `arrived` is told all flows that ended in one instant."""

    def __init__(self, arrived: Callable[[Sequence[Flow[Tag]]], None], *, latency: float = 0.0) -> None:
        self.now = 0.0
        self._arrived = arrived
        self._latency = latency
        self._heap: list[tuple[float, int, Flow[Tag] | Callable[[], None]]] = []
        self._serial = 0
        self._changed: dict[Link[Tag], None] = {}
        self._fresh: list[Flow[Tag]] = []

    def start(self, flow: Flow[Tag]) -> None:
        """Begin to send: the first byte leaves after the latency."""
        if self._latency:
            self._schedule(self.now + self._latency, flow)
        else:
            self._join(flow)

    def cancel(self, flow: Flow[Tag]) -> None:
        """End the flow before its last byte; nobody is told."""
        flow.serial = -1
        if flow.active:
            left = flow.remaining - flow.rate * (self.now - flow.since)
            self._part(flow, flow.size - left)

    def call(self, time: float, what: Callable[[], None]) -> None:
        """Have `what` called at `time`."""
        self._serial += 1
        heapq.heappush(self._heap, (time, self._serial, what))

    def run(self, until: Callable[[], bool]) -> None:
        """Let time pass until the condition holds after an instant, or nothing is left to happen."""
        heap, pop = self._heap, heapq.heappop
        self._settle()
        while heap and not until():
            time = heap[0][0]
            horizon = time + INSTANT
            ended: list[Flow[Tag]] = []
            calls: list[Callable[[], None]] = []
            self.now = time
            while heap and heap[0][0] <= horizon:
                _, serial, what = pop(heap)
                if not isinstance(what, Flow):
                    calls.append(what)
                elif what.serial == serial:
                    if what.active:
                        ended.append(what)
                    else:
                        self._join(what)
            for flow in ended:
                flow.serial = -1
                self._part(flow, flow.size)
            if ended:
                self._arrived(ended)
            for call in calls:
                call()
            self._settle()

    def _schedule(self, time: float, flow: Flow[Tag]) -> None:
        self._serial += 1
        flow.serial = self._serial
        heapq.heappush(self._heap, (time, self._serial, flow))

    def _join(self, flow: Flow[Tag]) -> None:
        flow.active = True
        flow.since = self.now
        flow.egress.flows[flow] = None
        flow.ingress.flows[flow] = None
        self._changed[flow.egress] = self._changed[flow.ingress] = None
        self._fresh.append(flow)

    def _part(self, flow: Flow[Tag], moved: float) -> None:
        flow.active = False
        flow.egress.carried += moved
        flow.ingress.carried += moved
        del flow.egress.flows[flow], flow.ingress.flows[flow]
        self._changed[flow.egress] = self._changed[flow.ingress] = None

    def _settle(self) -> None:
        """Give the flows of every link whose number of flows changed their new rates."""
        if not self._changed:
            return
        # A flow that took the place of one that ended changes nothing for its neighbours.
        affected: dict[Flow[Tag], None] = dict.fromkeys(self._fresh)
        self._fresh.clear()
        for link in self._changed:
            number = len(link.flows)
            if number != link.settled:
                link.settled = number
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
