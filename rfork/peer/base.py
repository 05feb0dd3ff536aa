"""The peer seam: what a target asks of one source before and while it reads. Runs on the target.

`rfork.peer.client` speaks gRPC; `rfork.testing.peers` calls a seed in the same process, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from rfork.image.layout import Layout
from rfork.image.manifest import Manifest
from rfork.image.ranges import Range
from rfork.transport.base import ControlStream, Endpoint, TokenSource


@dataclass(frozen=True, slots=True)
class StorageActivity:
    """Storage that the source, or (`relayed`) whom it waits for, reads: seconds since it gave something."""

    idle_s: float
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """What a source said: the chunks that became readable; none in a keep-alive.

    A source that knows its manifest says its `weights_id`. One that does not (someone it reads from
    still reads storage) says with each chunk its digest (16 bytes; in the order of `chunks`), and in
    `provisional_id` what these belong to: chunks of two drafts are not to be mixed. The part of `provisional_id` before
    the ``-`` is the origin of the files. `storage_activity`: it, or whom it waits for, reads from storage now.
    `rate`: bytes a second that this target is asked to take at most, from now on (see `Reader.hold_to`).
    """

    chunks: tuple[Range, ...]
    draining: bool
    digests: tuple[bytes, ...] = ()
    provisional_id: str | None = None
    weights_id: str | None = None
    storage_activity: StorageActivity | None = None
    rate: int | None = None


class Peer(Protocol):
    """One source's peer service; thread-safe. `deadline`s are `time.monotonic()` values.

    Every method raises SourceUnavailable, SourceTimeout, SourceBusy, SourceWeightsChanged, SourceCorrupt,
    LayoutMismatch or LeaseRejected.
    """

    def manifest(self, own: Layout, deadline: float) -> Manifest:
        """The source's manifest, for an image of the target's `own` layout."""
        ...

    def full_manifest(self, deadline: float) -> Manifest:
        """The source's manifest with all its tensors, whatever their layout."""
        ...

    def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
        """Take a reader's place; returns the channel's id and how to read."""
        ...

    def close_channel(self, channel_id: str, deadline: float) -> None:
        """Give a channel back that nothing is read by."""
        ...

    def open_control_stream(self, channel_id: str) -> ControlStream:
        """A line to what gives this channel its bytes; what is wrong with it is found out by `receive`."""
        ...

    def watch(self, channel_id: str, keep_alive_s: float) -> Iterator[Progress]:
        """What the source can give, as it says it; ends when the channel is closed on either side."""
        ...

    def renew(self, deadline: float) -> None:
        """Show the source the newest token, so that it keeps the reader's place."""
        ...

    def close(self) -> None:
        """Drop the connection; the source gives the place to others. Ends a `watch` under way."""
        ...


Dial = Callable[[str, TokenSource], Peer]
"""Reaches the peer service at an address (host:port), showing tokens from the token source."""
