"""The sources of one fork: whom it reads from now, who failed and how, and what each gave.

Runs on the target. The puller holds its lock around every call here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rfork.errors import RforkError
from rfork.fork.feed import Feed, FeedListener
from rfork.fork.report import SourceShare
from rfork.fork.schedule import Schedule
from rfork.logs import logger
from rfork.wire import Lease, Route, SourceFault

log = logger(__name__)

MOST_FAILURES = 3
"""A source that failed this often is not asked again by this fork, whoever was at fault."""

OpenFeed = Callable[[Route, FeedListener], Feed]


class Sources:
    """Keeps the feeds in step with the plan and the schedule."""

    def __init__(self, schedule: Schedule, open_feed: OpenFeed, listener: FeedListener) -> None:
        self.reasons: list[RforkError] = []
        self._schedule = schedule
        self._open_feed = open_feed
        self._listener = listener
        self._feeds: dict[str, Feed] = {}
        self._retired: list[Feed] = []
        self._closing: list[Feed] = []
        self._failures: dict[str, int] = {}
        self._faults: list[SourceFault] = []
        self._shares: dict[str, SourceShare] = {}

    def adopt(self, routes: Sequence[Route]) -> None:
        """Follow a plan: feeds that it names are kept or opened, those that nothing is wanted of end."""
        for route in routes:
            feed = self._feeds.get(route.source_id)
            if feed is not None:
                feed.renew(route.lease)
                continue
            # What an earlier feed of this source offered is void: nothing can be read before this one is up.
            self._schedule.fail(route.source_id)
            feed = self._open_feed(route, self._listener)
            self._feeds[route.source_id] = feed
            feed.start()
        self._schedule.adopt({route.source_id: route.chunks for route in routes})
        for source_id in [name for name in self._feeds if not self._schedule.wanted_from(name)]:
            self._retire(source_id)

    def find(self, source_id: str) -> Feed | None:
        """The feed of a source that is read from now."""
        return self._feeds.get(source_id)

    def renew(self, leases: Mapping[str, Lease]) -> None:
        """Newer lease tokens, by source."""
        for source_id, lease in leases.items():
            if source_id in self._feeds:
                self._feeds[source_id].renew(lease)

    def fail(self, feed: Feed, error: RforkError) -> None:
        """Give up on a source, and keep its fault for the planner."""
        if self._feeds.get(feed.source_id) is not feed:
            return  # it failed already, and this is the echo on another thread
        log.warning("source failed", source=feed.source_id[:8], error=error.kind, detail=str(error))
        self.reasons.append(error)
        self._failures[feed.source_id] = failures = self._failures.get(feed.source_id, 0) + 1
        fault = error.fault if error.fault == "source" or failures < MOST_FAILURES else "network"
        self._faults.append(
            SourceFault(instance_id=feed.source_id, fault=fault, error=error.kind, detail=str(error)[:1000])
        )
        self._schedule.fail(feed.source_id)
        self._retire(feed.source_id)

    def fail_stalled(self, now: float) -> None:
        """Give up on sources that something is wanted of and that are silent or stand still."""
        for source_id, feed in list(self._feeds.items()):
            stall = feed.check(now, starved=self._schedule.starved(source_id))
            if stall is not None and self._schedule.wanted_from(source_id):
                self.fail(feed, stall)

    def credit(self, feed: Feed, nbytes: int) -> None:
        """A chunk of `nbytes` from this source is verified."""
        share = self._shares.get(feed.source_id)
        if share is None:
            share = SourceShare(feed.source_id, feed.host, feed.transport, 0, 0)
        self._shares[feed.source_id] = replace(
            share,
            transport=feed.transport,
            verified_chunks=share.verified_chunks + 1,
            verified_bytes=share.verified_bytes + nbytes,
        )

    @property
    def shares(self) -> tuple[SourceShare, ...]:
        """What each source gave so far, most first."""
        return tuple(sorted(self._shares.values(), key=lambda share: -share.verified_bytes))

    @property
    def giving(self) -> bool:
        """Whether a source is left that something is wanted of."""
        return any(self._schedule.wanted_from(source_id) for source_id in self._feeds)

    @property
    def faults(self) -> tuple[SourceFault, ...]:
        """Faults that the planner has not heard of yet."""
        return tuple(self._faults)

    def told(self, faults: Sequence[SourceFault]) -> None:
        """The planner has heard of these, the oldest."""
        del self._faults[: len(faults)]

    @property
    def any_retired(self) -> bool:
        """Whether `take_retired` has something to give."""
        return bool(self._closing)

    def take_retired(self) -> list[Feed]:
        """Feeds that ended since the last call, for the caller to close without the lock."""
        closing, self._closing = self._closing, []
        return closing

    @property
    def everyone(self) -> tuple[Feed, ...]:
        """All feeds that ever were, to be closed and joined at the end."""
        return (*self._feeds.values(), *self._retired)

    def _retire(self, source_id: str) -> None:
        feed = self._feeds.pop(source_id)
        self._retired.append(feed)
        self._closing.append(feed)
