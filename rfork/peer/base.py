"""Interface of a source's peer service, as a target calls it. Runs on the target.

`rfork.peer.client` implements it over gRPC, `rfork.testing.peers` within one process for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from rfork.image.layout import Layout, Manifest
from rfork.image.ranges import Range
from rfork.transport.base import ControlStream, Endpoint, TokenSource


@dataclass(frozen=True, slots=True)
class StorageActivity:
    """A read of storage by the source, or (`relayed`) by a source upstream.

    `idle_s`: seconds since it last made progress.
    """

    idle_s: float
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """One progress message from a source: the chunks that became readable; none in a keep-alive.

    A source with a manifest sends its `weights_id`. One without (it, or a source upstream, still reads
    storage) sends the digest of each chunk (16 bytes; in the order of `chunks`) and a `provisional_id`:
    chunks with different provisional ids must not be mixed. The part of `provisional_id` before the ``-``
    identifies the files. `storage_activity` is set while the source, or one upstream, reads from storage.
    `rate` is the rate in bytes per second to which this target must limit itself from now on (see
    `Reader.set_rate_limit`).
    """

    chunks: tuple[Range, ...]
    draining: bool
    digests: tuple[bytes, ...] = ()
    provisional_id: str | None = None
    weights_id: str | None = None
    storage_activity: StorageActivity | None = None
    rate: int | None = None


BOX_IDLE_S: Final = 60.0
"""Time without a reader, or a request, after which a source closes an image of boxes."""


class BoxImage(NamedTuple):
    """Identity of an image of boxes of checkpoint tensors. The planner knows its instances."""

    model: str
    """Its name at the planner."""
    version: str
    """Version of the weights that the boxes were copied from."""
    layout_id: str
    image_bytes: int


class Peer(Protocol):
    """Peer service of one source. Thread-safe. `deadline`s are `time.monotonic()` values.

    Every method raises SourceUnavailable, SourceTimeout, SourceBusy, SourceWeightsChanged, SourceCorrupt,
    LayoutMismatch or LeaseRejected.
    """

    def manifest(self, layout: Layout, deadline: float) -> Manifest:
        """Return the source's manifest for an image with the target's layout `layout`."""
        ...

    def full_manifest(self, deadline: float) -> Manifest:
        """Return the source's manifest with all its tensors, for any layout."""
        ...

    def placement(self, deadline: float) -> bytes:
        """Return the source's encoded placement map. Raises LayoutMismatch if it has none."""
        ...

    def open_boxes(self, boxes: bytes, deadline: float) -> BoxImage:
        """Let the source serve these encoded boxes as an image, which may take minutes; return its identity.

        Raises LayoutMismatch, with the name of a box, if the source does not have it.
        """
        ...

    def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
        """Acquire a reader slot; return the channel's id and the endpoint."""
        ...

    def close_channel(self, channel_id: str, deadline: float) -> None:
        """Release a channel that is not used any more."""
        ...

    def open_control_stream(self, channel_id: str) -> ControlStream:
        """Open a control stream to the channel's exporter; errors are raised by `receive`."""
        ...

    def watch(self, channel_id: str, keep_alive_s: float) -> Iterator[Progress]:
        """Yield progress messages until either side closes the channel."""
        ...

    def renew(self, deadline: float) -> None:
        """Send the newest token to the source, so that it keeps the reader slot."""
        ...

    def close(self) -> None:
        """Close the connection; the source releases the slot. Ends a running `watch`."""
        ...


Dial = Callable[[str, TokenSource], Peer]
"""Connect to the peer service at an address (host:port), with tokens from the token source."""
