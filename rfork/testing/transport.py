"""In-memory transport within one process, with fault injection. For tests.

It implements the complete contract of `rfork.transport.base` without sockets, so code above the transport can
be tested with sources that corrupt, stall and die at defined points.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rfork.errors import LeaseRejected, SourceTimeout, SourceUnavailable
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.net.token_bucket import TokenBucket
from rfork.transport.base import (
    AccessGate,
    Availability,
    Endpoint,
    OpenControlStream,
    StatelessExporter,
    TokenSource,
    no_control_stream,
)

SLICE_BYTES = MIB
POLL_INTERVAL_S = 0.05


@dataclass(slots=True)
class FaultInjection:
    """Faults of one source. May be changed at any time; applies from the next slice on."""

    corrupt_chunks: set[int] = field(default_factory=set)
    """Chunks whose first byte is inverted."""
    dies_after_bytes: int | None = None
    """The source serves this many bytes in total and dies permanently."""
    stalls_after_bytes: int | None = None
    """The source serves this many bytes in total and then stalls every reader until its deadline."""
    rejects_leases: bool = False


class InMemoryNetwork:
    """Simulated network: the exports of all `InMemoryTransport`s that share this object."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.exports: dict[str, InMemoryExporter] = {}
        self._export_count = 0

    def add(self, exporter: InMemoryExporter) -> str:
        """Make an exporter reachable and return its name, which is never reused."""
        with self.changed:
            self._export_count += 1
            name = f"memory-{self._export_count}"
            self.exports[name] = exporter
            return name

    def remove(self, name: str) -> None:
        """Make an exporter unreachable and wake readers that wait for it."""
        with self.changed:
            self.exports.pop(name, None)
            self.changed.notify_all()


class InMemoryExporter(StatelessExporter):
    """Source side: an image, its gate and its faults."""

    def __init__(
        self,
        network: InMemoryNetwork,
        image: Image,
        gate: AccessGate,
        faults: FaultInjection,
        *,
        one_sided: bool = False,
    ) -> None:
        self.image = image
        self.one_sided = one_sided
        self.gate = gate
        self.faults = faults
        self.served_bytes = 0
        self._admitted_bytes = 0
        self._network = network
        self._copies = 0
        self._name = network.add(self)

    def endpoint(self) -> Endpoint:
        """Return its name in the network."""
        return Endpoint("memory", {"name": self._name})

    def close(self) -> None:
        """Leave the network; return when no reader copies from the image."""
        self._network.remove(self._name)
        with self._network.changed:
            self._network.changed.wait_for(lambda: self._copies == 0)

    def serve(self, token: str, begin: int, end: int, views: Sequence[memoryview]) -> None:
        """Copy image range `[begin, end)` into `views`.

        Raises the gate's errors, and LeaseRejected or SourceUnavailable for injected faults.
        """
        if self.faults.rejects_leases:
            raise LeaseRejected(f"{self._name} rejects every lease (injected fault)")
        if not self.one_sided:
            fork_id = self.gate.authorize(token, begin, begin)
            remaining = end - begin
            while remaining:
                remaining -= self.gate.acquire_bytes(remaining, fork_id)
        # A copy is short, so there is nothing to abort.
        with self.gate.read_guard(token, begin, end, lambda: None):
            self._serve(begin, end, views)

    def _serve(self, begin: int, end: int, views: Sequence[memoryview]) -> None:
        with self._network.changed:
            dies_after_bytes = self.faults.dies_after_bytes
            if dies_after_bytes is not None and self.served_bytes + end - begin > dies_after_bytes:
                self._network.exports.pop(self._name, None)
            if self._name not in self._network.exports:
                raise SourceUnavailable(f"{self._name} is unavailable")
            self.served_bytes += end - begin
            self._copies += 1
        try:
            with self.image.readable(begin, end) as source:
                _copy(source, views)
            for chunk in self.faults.corrupt_chunks:
                first = self.image.layout.chunks[chunk][0]
                if begin <= first < end:
                    _flip(views, first - begin)
        finally:
            with self._network.changed:
                self._copies -= 1
                self._network.changed.notify_all()

    def admit(self, nbytes: int) -> bool:
        """Admit the next `nbytes` of a reader; return False if the source stalls before them."""
        with self._network.changed:
            limit = self.faults.stalls_after_bytes
            if limit is not None and self._admitted_bytes + nbytes > limit:
                return False
            self._admitted_bytes += nbytes
            return True


class InMemoryReader:
    """Target side: copies slices until the range is complete, the deadline passes or either side closes."""

    def __init__(self, network: InMemoryNetwork, name: str, image: Image, token: TokenSource) -> None:
        self._network = network
        self._name = name
        self._image = image
        self._token = token
        self._closed = False
        self._bucket = TokenBucket()

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)`; see `Reader.read`. Raises ValueError for a range outside the
        image.
        """
        with self._image.writable(begin, end) as views:
            rest = list(views)
            for at in range(begin, end, SLICE_BYTES):
                slice_end = min(at + SLICE_BYTES, end)
                piece, rest = _split(rest, slice_end - at)
                source = self._source()
                if not source.admit(slice_end - at):
                    self._wait_stalled(deadline)
                if time.monotonic() >= deadline:
                    raise SourceTimeout(f"{self._name} was too slow: the read's deadline has passed")
                self._throttle(slice_end - at, deadline)
                source.serve(self._token(), at, slice_end, piece)

    def set_rate_limit(self, rate: int | None) -> None:
        """See `Reader.set_rate_limit`."""
        self._bucket.set_rate(rate)

    def _throttle(self, nbytes: int, deadline: float) -> None:
        while (delay := self._bucket.consume(nbytes)) > 0:
            with self._network.changed:
                self._network.changed.wait_for(lambda: self._closed, min(delay, POLL_INTERVAL_S))
            self._source()
            if time.monotonic() >= deadline:
                raise SourceTimeout(f"{self._name} was throttled until the deadline")

    def close(self) -> None:
        """Close the reader; reads in progress raise SourceUnavailable at their next slice."""
        with self._network.changed:
            self._closed = True
            self._network.changed.notify_all()

    def _source(self) -> InMemoryExporter:
        with self._network.changed:
            if self._closed:
                raise SourceUnavailable(f"the reader of {self._name} was closed")
            if self._name not in self._network.exports:
                raise SourceUnavailable(f"{self._name} is unavailable")
            return self._network.exports[self._name]

    def _wait_stalled(self, deadline: float) -> None:
        """Wait without receiving bytes. Raises SourceTimeout at the deadline, or SourceUnavailable."""
        with self._network.changed:
            self._network.changed.wait_for(
                lambda: self._closed or self._name not in self._network.exports, deadline - time.monotonic()
            )
        self._source()
        raise SourceTimeout(f"{self._name} sent nothing until the deadline")


class InMemoryTransport:
    """`Transport` within one process; `faults` apply to the images it exports.

    `one_sided`: its exporters do not acquire egress budget, like a transport that reads remote memory.
    """

    connect_timeout_s = 0.0

    def __init__(
        self, network: InMemoryNetwork, faults: FaultInjection | None = None, *, one_sided: bool = False
    ) -> None:
        self._network = network
        self._faults = faults or FaultInjection()
        self._one_sided = one_sided

    @property
    def name(self) -> str:
        """Name in settings, plans and reports."""
        return "memory"

    @property
    def one_sided(self) -> bool:
        """See `Transport.one_sided`."""
        return self._one_sided

    def availability(self) -> Availability:
        """Always available within this process."""
        return Availability(True, "only within this process; for tests")

    def export(self, image: Image, gate: AccessGate) -> InMemoryExporter:
        """Source side: make `image` readable to users of the same network object."""
        return InMemoryExporter(self._network, image, gate, self._faults, one_sided=self._one_sided)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        open_control_stream: OpenControlStream = no_control_stream,
    ) -> InMemoryReader:
        """Target side. Raises SourceUnavailable for an unknown export, SourceTimeout after the deadline."""
        name = endpoint.parameters.get("name", "")
        if name not in self._network.exports:
            raise SourceUnavailable(f"unknown export {name!r}")
        if time.monotonic() >= deadline:
            raise SourceTimeout(f"the deadline passed before connecting to {name}")
        return InMemoryReader(self._network, name, image, token)


def _split(views: Sequence[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """Split views into the first `count` bytes and the rest."""
    first: list[memoryview] = []
    for index, view in enumerate(views):
        if count < view.nbytes:
            rest = [view[count:], *views[index + 1 :]]
            return ([*first, view[:count]] if count else first), rest
        first.append(view)
        count -= view.nbytes
    return first, []


def _copy(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Copy between two sequences of views of equal total length, split differently."""
    rest = list(target)
    for view in source:
        pieces, rest = _split(rest, view.nbytes)
        at = 0
        for piece in pieces:
            piece[:] = view[at : at + piece.nbytes]
            at += piece.nbytes


def _flip(views: Sequence[memoryview], offset: int) -> None:
    """Invert the byte at `offset` in a sequence of views."""
    _, rest = _split(views, offset)
    rest[0][0] ^= 0xFF
