"""The seam between a fork and what it reads from: peers, and this instance's own storage.

Runs on the target. Each giver has a thread of its own, which tells the puller what can be read; the
puller's workers read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rfork.errors import RforkError, TransportUnusable
from rfork.fork.reading import Reading
from rfork.image.manifest import Manifest
from rfork.image.ranges import Range


class Giver(Protocol):
    """One source of a fork: `rfork.fork.feed.Feed` or `rfork.fork.storage_feed.StorageFeed`."""

    source_id: str
    """The word for it in the schedule and in reports."""
    instance_id: str
    """Who is told to the planner: the source, or this instance itself for its storage."""
    host: str
    address: str
    transport: str
    reading: Reading
    relayed: bool
    """Whether `read_at` is of somebody that it waits for, and not its own."""
    advanced_at: float
    """When it last gave something new, on `time.monotonic()`'s clock."""

    @property
    def read_at(self) -> float | None:
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


class Listener(Protocol):
    """The puller, as its sources see it; called on their threads.

    `on_manifest`, `on_draft` and `on_files` may raise what ends the source.
    """

    def on_manifest(self, feed: Giver, manifest: Manifest) -> None:
        """What the source's image holds."""
        ...

    def on_draft(self, feed: Giver, draft: str, digests: Mapping[int, bytes]) -> None:
        """The peer's manifest is not known yet: these chunks of its `draft` have these digests.

        Said before they are offered.
        """
        ...

    def held(self) -> Mapping[int, bytes]:
        """Digests of the chunks that files have to hold too, before others are read from them."""
        ...

    def on_files(
        self, feed: Giver, origin: str, compared: Mapping[int, bytes], *, agrees: bool
    ) -> Mapping[int, bytes]:
        """The manifest of this instance's files is not known; whether they hold all of `compared`.

        Returns what has to be compared besides; nothing: go on.
        """
        ...

    def on_offer(self, feed: Giver, chunks: tuple[Range, ...]) -> None:
        """These chunks can be read from now on."""
        ...

    def upcoming(self, feed: Giver, count: int) -> tuple[Sequence[int], Sequence[int]]:
        """The chunks that are read from the source now, and those, `count` at most, that are read next."""
        ...

    def on_detour(self, feed: Giver, error: TransportUnusable) -> None:
        """A transport cannot be used with this source; the next one is tried, and nobody is blamed."""
        ...

    def on_failure(self, feed: Giver, error: RforkError) -> None:
        """The source has ended by itself."""
        ...
