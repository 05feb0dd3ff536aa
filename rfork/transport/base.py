"""The transport seam: one-sided reads of image ranges, with a deadline on everything.

A byte's path: the target's puller asks a `Reader` for `[begin, end)` of the image; the source's
`FakeSpanExporter` gives it from the tensors' own memory; it lands in the target's tensors' own memory; the
puller verifies it there. Between the two nothing is kept.

On the **source**: `Transport.export` makes an image readable and asks the `AccessGate` before each byte.
On the **target**: `Transport.connect` turns the endpoint that the source's peer service gave into a
`Reader`. A new transport is one module with these three classes; it edits no shared file but the
table in `rfork.transport.selection`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

from rfork.errors import SourceUnavailable
from rfork.image.memory import Image, Segment

CONNECT_S: Final = 2.0
"""Time for one connection to a source: one lost packet is sent again after 1 s."""

TokenSource = Callable[[], str]
"""Gives the newest lease token of a route: tokens are renewed while a fork runs."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach one exported image over one transport; travels in the peer service's answer.

    `parameters` belong to the transport. `segments` are the source's memory addresses, for
    transports that read remote memory by address, and empty for others.
    """

    transport: str
    parameters: Mapping[str, str]
    segments: tuple[Segment, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a transport can run on this machine, and why (not): what `rfork doctor` prints."""

    usable: bool
    reason: str
    hint: str = ""


class ControlStream(Protocol):
    """Messages between one reader and its source's exporter, both ways and in order, over the peer service.

    For what two sides have to agree on while bytes move; the bytes themselves never go this way. Each end
    has one `ControlStream`; one thread at a time receives, any may send or close.
    """

    def send(self, message: bytes) -> None:
        """Send at most 64 KiB; returns before it has arrived. Raises SourceUnavailable once the line is closed."""
        ...

    def receive(self, deadline: float) -> bytes:
        """The next message. `deadline` is a `time.monotonic()` value.

        Raises SourceUnavailable once either side closed the line or died, SourceTimeout at the deadline, or what
        the lease's check says on the source.
        """
        ...

    def close(self) -> None:
        """End it for both sides. Safe to call twice."""
        ...


OpenControlStream = Callable[[], ControlStream]
"""Opens a line to the exporter of the channel. Runs on the target; raises as `ControlStream.receive` does."""


def no_control_stream() -> ControlStream:
    """A `OpenControlStream` for readers that have nothing to agree on."""
    raise SourceUnavailable("there is no line to this source")


class AccessGate(Protocol):
    """The source's guard; every exporter passes each request through it. Runs on the source."""

    def authorize(self, token: str, begin: int, end: int) -> str:
        """Check a token and a byte range; returns the fork_id it was leased to.

        Raises LeaseRejected (no, expired or forged token), SourceWeightsChanged (token of an older
        generation) or SourceBusy (the range is not verified here yet).
        """
        ...

    def read_guard(self, token: str, begin: int, end: int, cut: Callable[[], None]) -> AbstractContextManager[None]:
        """Admit the range, and keep its bytes as they are until the block ends. Raises as `authorize`.

        Every read of the image's memory is in such a block. Whoever is about to change the bytes waits for
        it, and after a short while calls `cut`, on a thread of its own: the block then has to end at once.
        """
        ...

    def acquire_bytes(self, max_bytes: int, fork_id: str) -> int:
        """Block until the source's egress budget allows some of `max_bytes` bytes; returns how many.

        Those who wait are served fork by fork, however many connections one fork has.

        Under a rate the answer is small, so that a reader hears something often enough not to take
        a source that is held back for one that has stalled.
        """
        ...

    def version_tag(self) -> str:
        """Names the bytes as they are now: another value once the weights or their generation change."""
        ...


class Exporter(Protocol):
    """One image, readable over one transport. Runs on the source."""

    def endpoint(self) -> Endpoint:
        """Where and how to read it."""
        ...

    def ready(self, deadline: float) -> bool:
        """Wait, until `deadline` at most, for what it does beforehand; whether that is over.

        Whether it can give then, or never will, `authorize_peer` says.
        """
        ...

    def authorize_peer(self, channel_id: str, address: str) -> None:
        """A reader at this IP address was given a channel: it may read from now on.

        Where each read shows a token there is nothing to do. Raises SourceBusy.
        """
        ...

    def revoke_peer(self, channel_id: str) -> None:
        """That channel is no more; one that was never let in is no error."""
        ...

    def run_control_stream(self, channel_id: str, line: ControlStream) -> None:
        """Talk with the reader that holds this channel, until either side closes the line.

        Runs on a thread of its own for each line. Exporters that have nothing to say are `StatelessExporter`.
        """
        ...

    def close(self) -> None:
        """Stop giving; returns once no reader touches the image's memory. Safe to call twice."""
        ...


class StatelessExporter:
    """What an exporter does about channels whose reads each show a token, and that need no line: nothing."""

    def ready(self, deadline: float) -> bool:
        """See `FakeSpanExporter.ready`."""
        return True

    def authorize_peer(self, channel_id: str, address: str) -> None:
        """See `FakeSpanExporter.authorize_peer`."""

    def revoke_peer(self, channel_id: str) -> None:
        """See `FakeSpanExporter.revoke_peer`."""

    def run_control_stream(self, channel_id: str, line: ControlStream) -> None:
        """See `FakeSpanExporter.run_control_stream`."""
        line.close()


class Reader(Protocol):
    """One source's image, read into the target's own. Runs on the target; thread-safe."""

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` from the source into the target image's memory.

        `deadline` is a `time.monotonic()` value. Returns or raises only when no more bytes of this
        read can land: the caller may hand the range to another source at once.

        Raises SourceUnavailable, SourceTimeout, SourceCorrupt (too few bytes), SourceWeightsChanged, SourceBusy
        or LeaseRejected.
        """
        ...

    def set_rate_limit(self, rate: int | None) -> None:
        """Take at most so many bytes a second from now on, all reads together; None: as many as come.

        The source asks for this where it cannot hold a reader back. It is cooperation: nothing but the
        reader's good will enforces it. Where the source does hold its readers back there is nothing to do.
        """
        ...

    def close(self) -> None:
        """Drop all connections; reads under way raise SourceUnavailable. Safe to call twice."""
        ...


class Transport(Protocol):
    """A way to move bytes. Stateless: one instance may export and connect many images."""

    @property
    def name(self) -> str:
        """The word used for it in settings, plans and reports."""
        ...

    @property
    def one_sided(self) -> bool:
        """Whether reads run no code of the source: it then asks its readers to hold themselves back."""
        ...

    def availability(self) -> Availability:
        """Whether it can run here. Never raises, never opens a port."""
        ...

    def export(self, image: Image, gate: AccessGate) -> Exporter:
        """Source side: make `image` readable to whoever `gate` admits.

        Raises TransportUnavailable kinds where it cannot for this image: the others are exported without it.
        """
        ...

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> Reader:
        """Target side: a reader that fills `image` from `endpoint`. Raises as `Reader.read` does.

        And TransportUnavailable kinds where it cannot work between these two: the next transport that both
        offer is taken, and nobody is blamed. So whatever can be found out beforehand is found out here.
        """
        ...
