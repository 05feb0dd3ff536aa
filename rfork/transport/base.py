"""Transport interface: one-sided reads of image ranges, each with a deadline.

The path of a byte: the target requests `[begin, end)` of the image from a `Reader`; the source's `Exporter`
sends it from the memory of the tensors; it arrives in the memory of the target's tensors, where the target
verifies it. There is no intermediate buffer.

On the **source**, `Transport.export` makes an image readable and checks the `AccessGate` before each read. On
the **target**, `Transport.connect` turns the endpoint returned by the source's peer service into a `Reader`.
A new transport is one module with these three classes, plus a line in the table of
`rfork.transport.selection`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

from rfork.errors import SourceUnavailable
from rfork.image.memory import Image, Segment

CONNECT_TIMEOUT_S: Final = 2.0
"""Timeout of one connection attempt: a lost SYN packet is retransmitted after 1 s."""

TokenSource = Callable[[], str]
"""Return the newest lease token of a route; tokens are renewed during a fork."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of one exported image on one transport, returned by the source's peer service.

    `parameters` are defined by the transport. `segments` are memory addresses on the source, for transports
    that read remote memory by address; empty for others.
    """

    transport: str
    parameters: Mapping[str, str]
    segments: tuple[Segment, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Availability:
    """Availability of a transport on this machine, with the reason; shown by `rfork doctor`."""

    usable: bool
    reason: str
    hint: str = ""


class ControlStream(Protocol):
    """Ordered, bidirectional messages between a reader and its source's exporter, over the peer service.

    It carries what both sides must agree on during a transfer, never the bytes of the image. Each end has one
    `ControlStream`. Only one thread may receive at a time; any thread may send or close.
    """

    def send(self, message: bytes) -> None:
        """Send at most 64 KiB; return before delivery. Raise SourceUnavailable if the stream is closed."""
        ...

    def receive(self, deadline: float) -> bytes:
        """Return the next message. `deadline` is a `time.monotonic()` value.

        Raises SourceUnavailable if either side closed the stream or died, SourceTimeout at the deadline, and
        on the source any error of the lease check.
        """
        ...

    def close(self) -> None:
        """Close the stream for both sides. Idempotent."""
        ...


OpenControlStream = Callable[[], ControlStream]
"""Open a control stream to the exporter of the channel. Runs on the target; raises as `ControlStream.receive`
does.
"""


def no_control_stream() -> ControlStream:
    """`OpenControlStream` for readers that need no control stream."""
    raise SourceUnavailable("this channel has no control stream")


class AccessGate(Protocol):
    """Access control of the source. Every exporter checks each request with it. Runs on the source."""

    def authorize(self, token: str, begin: int, end: int) -> str:
        """Check a token and a byte range, and return the fork_id of the lease.

        Raises LeaseRejected (missing, expired or forged token), SourceWeightsChanged (token of an older
        generation) or SourceBusy (the range is not verified on the source yet).
        """
        ...

    def read_guard(self, token: str, begin: int, end: int, abort: Callable[[], None]) -> AbstractContextManager[None]:
        """Authorize the range and keep its bytes unchanged within the context. Raises as `authorize`.

        Every read of the image's memory runs in this context. A thread that wants to change the bytes waits
        for it and, after a short timeout, calls `abort` on its own thread: the context must then end
        immediately.
        """
        ...

    def acquire_bytes(self, max_bytes: int, fork_id: str) -> int:
        """Wait until the source's egress budget allows some of `max_bytes` bytes, and return how many.

        The budget is shared fairly between forks, however many connections each has.

        Under a rate limit the returned amount is small, so that a throttled reader still receives bytes often
        enough not to mistake the source for a stalled one.
        """
        ...

    def version_tag(self) -> str:
        """Identifier of the current bytes; changes with the weights and with their generation."""
        ...


class Exporter(Protocol):
    """One image, exported over one transport. Runs on the source."""

    def endpoint(self) -> Endpoint:
        """Return the address and the parameters that a reader needs."""
        ...

    def ready(self, deadline: float) -> bool:
        """Wait until preparation has finished, or until `deadline`; return True if it has finished.

        `authorize_peer` reports if the preparation failed.
        """
        ...

    def authorize_peer(self, channel_id: str, address: str) -> None:
        """Allow the reader of this channel, at this IP address, to read from now on.

        Does nothing for a transport whose reads each carry a token. Raises SourceBusy.
        """
        ...

    def revoke_peer(self, channel_id: str) -> None:
        """Revoke the access of a channel. An unknown channel is not an error."""
        ...

    def run_control_stream(self, channel_id: str, stream: ControlStream) -> None:
        """Serve the control stream of this channel until either side closes it.

        Runs on a separate thread for each stream. Exporters without a control protocol use
        `StatelessExporter`.
        """
        ...

    def close(self) -> None:
        """Stop serving; return when no reader accesses the image's memory any more. Idempotent."""
        ...


class StatelessExporter:
    """Exporter methods that do nothing, for transports whose reads carry a token and need no control stream."""

    def ready(self, deadline: float) -> bool:
        """See `Exporter.ready`."""
        return True

    def authorize_peer(self, channel_id: str, address: str) -> None:
        """See `Exporter.authorize_peer`."""

    def revoke_peer(self, channel_id: str) -> None:
        """See `Exporter.revoke_peer`."""

    def run_control_stream(self, channel_id: str, stream: ControlStream) -> None:
        """See `Exporter.run_control_stream`."""
        stream.close()


class Reader(Protocol):
    """Reads one source's image into the target's image. Runs on the target; thread-safe."""

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` from the source into the target image's memory.

        `deadline` is a `time.monotonic()` value. Returns or raises only when no more bytes of this read can
        arrive, so the caller may immediately request the range from another source.

        Raises SourceUnavailable, SourceTimeout, SourceCorrupt (too few bytes), SourceWeightsChanged,
        SourceBusy or LeaseRejected.
        """
        ...

    def set_rate_limit(self, rate: int | None) -> None:
        """Limit all reads together to `rate` bytes per second; None removes the limit.

        The source requests this if it cannot throttle its readers. It is cooperative: nothing enforces it but
        the reader. Does nothing if the source throttles.
        """
        ...

    def close(self) -> None:
        """Close all connections; reads in progress raise SourceUnavailable. Idempotent."""
        ...


class Transport(Protocol):
    """One mechanism to transfer bytes. Stateless: an instance may export and connect many images."""

    @property
    def name(self) -> str:
        """Name in settings, plans and reports."""
        ...

    @property
    def one_sided(self) -> bool:
        """True if reads run no code on the source, which then requests its readers to limit their own rate."""
        ...

    @property
    def connect_timeout_s(self) -> float:
        """Time that `connect` may need in the worst case; it always has at least `source_idle_timeout_s`."""
        ...

    def availability(self) -> Availability:
        """Report if the transport can run on this machine. Never raises, never opens a port."""
        ...

    def export(self, image: Image, gate: AccessGate) -> Exporter:
        """Source side: make `image` readable to the readers that `gate` authorizes.

        Raises TransportUnavailable or a subclass if this image cannot be exported over this transport; the
        source then offers the other transports.
        """
        ...

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        open_control_stream: OpenControlStream = no_control_stream,
    ) -> Reader:
        """Target side: return a reader that fills `image` from `endpoint`. Raises as `Reader.read` does.

        Raises TransportUnavailable or a subclass if the transport cannot work between these two instances:
        the target then tries the next common transport, and no instance is blamed. So detect here everything
        that can be detected before the first read.
        """
        ...
