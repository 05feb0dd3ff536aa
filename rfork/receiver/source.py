"""The seam between a fork and what it reads from: peers, and this instance's own storage.

Runs on the target. Each giver has a thread of its own, which tells the puller what can be read; the
puller's workers read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rfork.errors import RforkError, TransportUnavailable
from rfork.image.manifest import Manifest
from rfork.image.ranges import Range
from rfork.receiver.source_span import SourceSpan


class ChunkSource(Protocol):
    """One source of a fork: `rfork.receiver.peer_source.PeerSource` or `rfork.receiver.storage_source.StorageSource`."""

    source_id: str
    """The word for it in the schedule and in reports."""
    instance_id: str
    """Who is told to the planner: the source, or this instance itself for its storage."""
    host: str
    address: str
    transport: str
    reading: SourceSpan
    is_relay: bool
    """Whether `last_storage_activity_at` is of somebody that it waits for, and not its own."""
    last_progress_at: float
    """When it last gave something new, on `time.monotonic()`'s clock."""

    @property
    def last_storage_activity_at(self) -> float | None:
        """When the storage that it reads, or waits for, last gave something; None: there is none."""
        ...

    def start(self) -> None:
        """Begin on its own thread."""
        ...

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Fill image range `[begin, end)` by `deadline`, a `time.monotonic()` value."""
        ...

    def check(self, now: float, *, starved: bool) -> RforkError | None:
        """Why it counts as stalled at `now`, if it does."""
        ...

    def close(self) -> None:
        """Give nothing more; reads under way end."""
        ...

    def join(self) -> None:
        """Wait until its thread has ended; after `close`."""
        ...


class SourceListener(Protocol):
    """The puller, as its sources see it; called on their threads.

    `on_manifest`, `on_provisional_digests` and `on_local_files` may raise what ends the source.
    """

    def on_manifest(self, source: ChunkSource, manifest: Manifest) -> None:
        """What the source's image holds."""
        ...

    def on_provisional_digests(self, source: ChunkSource, provisional_id: str, digests: Mapping[int, bytes]) -> None:
        """The peer's manifest is not known yet: these chunks of its `draft` have these digests.

        Said before they are offered.
        """
        ...

    def digests_to_compare(self) -> Mapping[int, bytes]:
        """Digests of the chunks that files have to hold too, before others are read from them."""
        ...

    def on_local_files(
        self, source: ChunkSource, origin: str, compared: Mapping[int, bytes], *, agrees: bool
    ) -> Mapping[int, bytes]:
        """The manifest of this instance's files is not known; whether they hold all of `compared`.

        Returns what has to be compared besides; nothing: go on.
        """
        ...

    def on_chunks_available(self, source: ChunkSource, chunks: tuple[Range, ...]) -> None:
        """These chunks can be read from now on."""
        ...

    def next_chunks(self, source: ChunkSource, count: int) -> tuple[Sequence[int], Sequence[int]]:
        """The chunks that are read from the source now, and those, `count` at most, that are read next."""
        ...

    def on_transport_unavailable(self, source: ChunkSource, error: TransportUnavailable) -> None:
        """A transport cannot be used with this source; the next one is tried, and nobody is blamed."""
        ...

    def on_failure(self, source: ChunkSource, error: RforkError) -> None:
        """The source has ended by itself."""
        ...
