"""The memory transport: two images in one process, and faults on demand. For tests.

It keeps the whole contract of `rfork.transport.base` without a socket, so each state machine above the
seam can be tested with sources that lie, stall and die exactly where the test wants it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rfork.errors import LeaseRejected, SourceTimeout, SourceUnavailable
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.transport.base import (
    AccessGate,
    Availability,
    Endpoint,
    OpenControlStream,
    StatelessExporter,
    TokenSource,
    no_control_stream,
)
from rfork.transport.token_bucket import TokenBucket

SLICE_BYTES = MIB
POLL_INTERVAL_S = 0.05


@dataclass(slots=True)
class FaultInjection:
    """What goes wrong at one source. May be changed at any time; holds from the next slice on."""

    corrupt_chunks: set[int] = field(default_factory=set)
    """Chunks whose first byte arrives with all bits flipped."""
    dies_after: int | None = None
    """Bytes given in all before the source is gone for good."""
    stalls_after: int | None = None
    """Bytes given in all before it gives no more, until the reader's deadline."""
    refuses: bool = False
    """Whether every lease is refused."""


class InMemoryNetwork:
    """What plays the network: the exports of all `InMemoryTransport`s that were given this object."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.exports: dict[str, InMemoryExporter] = {}
        self._exported = 0

    def add(self, exporter: InMemoryExporter) -> str:
        """Make it reachable; returns its name, which no other export ever has."""
        with self.changed:
            self._exported += 1
            name = f"memory-{self._exported}"
            self.exports[name] = exporter
            return name

    def remove(self, name: str) -> None:
        """Make it unreachable; readers that wait for it wake."""
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
        self._promised = 0
        self._network = network
        self._copies = 0
        self._name = network.add(self)

    def endpoint(self) -> Endpoint:
        """Its name in the network."""
        return Endpoint("memory", {"name": self._name})

    def close(self) -> None:
        """Leave the network; returns once no reader copies from the image."""
        self._network.remove(self._name)
        with self._network.changed:
            self._network.changed.wait_for(lambda: self._copies == 0)

    def serve(self, token: str, begin: int, end: int, views: Sequence[memoryview]) -> None:
        """Copy image range `[begin, end)` into `views`; raises what the gate does, and SourceUnavailable."""
        if self.faults.refuses:
            raise LeaseRejected(f"{self._name} was told to refuse")
        if not self.one_sided:
            fork_id, left = self.gate.authorize(token, begin, begin), end - begin
            while left:
                left -= self.gate.acquire_bytes(left, fork_id)
        # A copy ends at once by itself: there is nothing to cut.
        with self.gate.read_guard(token, begin, end, lambda: None):
            self._serve(begin, end, views)

    def _serve(self, begin: int, end: int, views: Sequence[memoryview]) -> None:
        with self._network.changed:
            dies_after = self.faults.dies_after
            if dies_after is not None and self.served_bytes + end - begin > dies_after:
                self._network.exports.pop(self._name, None)
            if self._name not in self._network.exports:
                raise SourceUnavailable(f"{self._name} is gone")
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

    def is_stalled(self, nbytes: int) -> bool:
        """Whether the next `nbytes` are not to come; else they count, before another reader is asked."""
        with self._network.changed:
            limit = self.faults.stalls_after
            if limit is not None and self._promised + nbytes > limit:
                return True
            self._promised += nbytes
            return False


class InMemoryReader:
    """Target side: copies slices until the range is whole, the deadline passes or either side ends."""

    def __init__(self, network: InMemoryNetwork, name: str, image: Image, token: TokenSource) -> None:
        self._network = network
        self._name = name
        self._image = image
        self._token = token
        self._closed = False
        self._bucket = TokenBucket()

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)`; see `Reader.read`. A range outside the image is a ValueError."""
        with self._image.writable(begin, end) as views:
            left = list(views)
            for at in range(begin, end, SLICE_BYTES):
                until = min(at + SLICE_BYTES, end)
                piece, left = _split(left, until - at)
                source = self._source()
                if source.is_stalled(until - at):
                    self._wait(deadline)
                if time.monotonic() >= deadline:
                    raise SourceTimeout(f"{self._name} was too slow: the read's deadline has passed")
                self._throttle(until - at, deadline)
                source.serve(self._token(), at, until, piece)

    def set_rate_limit(self, rate: int | None) -> None:
        """See `Reader.set_rate_limit`."""
        self._bucket.set_rate(rate)

    def _throttle(self, nbytes: int, deadline: float) -> None:
        while (delay := self._bucket.consume(nbytes)) > 0:
            with self._network.changed:
                self._network.changed.wait_for(lambda: self._closed, min(delay, POLL_INTERVAL_S))
            self._source()
            if time.monotonic() >= deadline:
                raise SourceTimeout(f"{self._name} was held back until the deadline")

    def close(self) -> None:
        """Reads under way raise SourceUnavailable at their next slice."""
        with self._network.changed:
            self._closed = True
            self._network.changed.notify_all()

    def _source(self) -> InMemoryExporter:
        with self._network.changed:
            if self._closed:
                raise SourceUnavailable(f"the reader of {self._name} was closed")
            if self._name not in self._network.exports:
                raise SourceUnavailable(f"{self._name} is gone")
            return self._network.exports[self._name]

    def _wait(self, deadline: float) -> None:
        """Wait for bytes that will not come. Raises SourceTimeout at the deadline, or SourceUnavailable."""
        with self._network.changed:
            self._network.changed.wait_for(
                lambda: self._closed or self._name not in self._network.exports, deadline - time.monotonic()
            )
        self._source()
        raise SourceTimeout(f"{self._name} sent nothing until the deadline")


class InMemoryTransport:
    """`Transport` within one process; `faults` are those of the images it exports.

    `one_sided`: its exporters ask the gate for no budget, as those of a transport that reads memory.
    """

    def __init__(
        self, network: InMemoryNetwork, faults: FaultInjection | None = None, *, one_sided: bool = False
    ) -> None:
        self._network = network
        self._faults = faults or FaultInjection()
        self._one_sided = one_sided

    @property
    def name(self) -> str:
        """The word used for it in settings, plans and reports."""
        return "memory"

    @property
    def one_sided(self) -> bool:
        """See `Transport.one_sided`."""
        return self._one_sided

    def availability(self) -> Availability:
        """Always usable, within this process."""
        return Availability(True, "reaches only this process; for tests")

    def export(self, image: Image, gate: AccessGate) -> InMemoryExporter:
        """Source side: make `image` readable to whoever shares the network object."""
        return InMemoryExporter(self._network, image, gate, self._faults, one_sided=self._one_sided)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> InMemoryReader:
        """Target side: raises SourceUnavailable when no such export lives, SourceTimeout past the deadline."""
        name = endpoint.parameters.get("name", "")
        if name not in self._network.exports:
            raise SourceUnavailable(f"there is no export {name!r} here")
        if time.monotonic() >= deadline:
            raise SourceTimeout(f"no time is left to connect to {name}")
        return InMemoryReader(self._network, name, image, token)


def _split(views: Sequence[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `count` bytes of a line of views, and the rest."""
    first: list[memoryview] = []
    for index, view in enumerate(views):
        if count < view.nbytes:
            rest = [view[count:], *views[index + 1 :]]
            return ([*first, view[:count]] if count else first), rest
        first.append(view)
        count -= view.nbytes
    return first, []


def _copy(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Copy between two lines of views of equal length, however each is cut."""
    left = list(target)
    for view in source:
        pieces, left = _split(left, view.nbytes)
        at = 0
        for piece in pieces:
            piece[:] = view[at : at + piece.nbytes]
            at += piece.nbytes


def _flip(views: Sequence[memoryview], offset: int) -> None:
    """Flip all bits of the byte at `offset` in a line of views."""
    _, rest = _split(views, offset)
    rest[0][0] ^= 0xFF
