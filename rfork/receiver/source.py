"""Interface between a fork and its sources: peers, and this instance's own storage.

Runs on the target. Each source has its own thread, which reports readable chunks to the transfer; the
transfer's workers read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rfork.errors import RforkError, TransportUnavailable
from rfork.image.manifest import Manifest
from rfork.image.ranges import Range
from rfork.receiver.source_span import SourceSpan


class ChunkSource(Protocol):
    """One source of a fork, implemented by `PeerSource` and `StorageSource`."""

    source_id: str
    """Its id in the scheduler and in reports."""
    instance_id: str
    """Its id for the planner: the source, or this instance for its own storage."""
    host: str
    address: str
    transport: str
    source_span: SourceSpan
    is_relay: bool
    """True if `last_storage_activity_at` is of another instance that it waits for."""
    last_progress_at: float
    """Time of its last new chunk, as a `time.monotonic()` value."""

    @property
    def last_storage_activity_at(self) -> float | None:
        """Time of the last activity of the storage that it reads or waits for; None if there is none."""
        ...

    def start(self) -> None:
        """Start its thread."""
        ...

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Fill image range `[begin, end)` by `deadline`, a `time.monotonic()` value."""
        ...

    def check(self, now: float, *, starved: bool) -> RforkError | None:
        """Return the error if it counts as stalled at `now`, otherwise None."""
        ...

    def close(self) -> None:
        """Stop serving; reads in flight end."""
        ...

    def join(self) -> None:
        """Wait until its thread has ended; call it after `close`."""
        ...


class SourceListener(Protocol):
    """Interface of the transfer for its sources, called on their threads.

    `on_manifest`, `on_provisional_digests` and `on_local_files` may raise an error that ends the source.
    """

    def on_manifest(self, source: ChunkSource, manifest: Manifest) -> None:
        """Handle the manifest of the source's image."""
        ...

    def on_provisional_digests(self, source: ChunkSource, provisional_id: str, digests: Mapping[int, bytes]) -> None:
        """Handle digests of chunks whose manifest the peer does not know yet, before they are offered."""
        ...

    def digests_to_compare(self) -> Mapping[int, bytes]:
        """Return digests of chunks that files must contain too, before others are read from them."""
        ...

    def on_local_files(
        self, source: ChunkSource, origin: str, compared: Mapping[int, bytes], *, agrees: bool
    ) -> Mapping[int, bytes]:
        """Handle the comparison of this instance's files, whose manifest is unknown, with `compared` digests.

        `agrees`: they contain all of them. Returns digests to compare in addition; if there are none, the source
        continues.
        """
        ...

    def on_chunks_available(self, source: ChunkSource, chunks: tuple[Range, ...]) -> None:
        """Handle chunks that can be read from now on."""
        ...

    def next_chunks(self, source: ChunkSource, count: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the chunks in flight from the source, and at most `count` that are read next."""
        ...

    def on_transport_unavailable(self, source: ChunkSource, error: TransportUnavailable) -> None:
        """Handle a transport that cannot be used with this source. The next is tried, and no party is blamed."""
        ...

    def on_failure(self, source: ChunkSource, error: RforkError) -> None:
        """Handle the failure of the source."""
        ...
