"""The sources of one fork: whom it reads from now, who failed and how, and what each gave.

Runs on the target. The puller holds its lock around every call here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from rfork.errors import Fault, RforkError, SourceChanged, SourceUnreachable, TransportUnusable
from rfork.fork.digests import Digests
from rfork.fork.feed import Feed
from rfork.fork.giver import Giver, Listener
from rfork.fork.report import SourceShare, short
from rfork.fork.schedule import Schedule
from rfork.fork.storage_feed import StorageFeed
from rfork.image import ranges
from rfork.logs import logger
from rfork.storage.base import name_of
from rfork.transport.base import CONNECT_S
from rfork.wire import Lease, Route, Share, SourceFault, StorageRead

log = logger(__name__)

MOST_FAILURES = 3
"""A source that failed this often is not asked again by this fork, whoever was at fault."""
MOVE_AFTER_S = 0.5
"""A source that has given nothing for so long may lose its chunks to others that have nothing to read."""


class Open(Protocol):
    """Makes the (not yet started) feeds of a plan."""

    def peer(self, route: Route, listener: Listener) -> Feed:
        """The feed of one route."""
        ...

    def storage(self, read: StorageRead, listener: Listener) -> StorageFeed:
        """The feed of this instance's own storage."""
        ...

    def give_up(self, name: str) -> None:
        """The storage of that name failed: it is not to be offered again."""
        ...


class Sources:
    """Keeps the feeds in step with the plan and the schedule."""

    def __init__(self, schedule: Schedule, digests: Digests, opening: Open, listener: Listener) -> None:
        self.reasons: list[RforkError] = []
        self._schedule = schedule
        self._digests = digests
        self._opening = opening
        self._listener = listener
        self._feeds: dict[str, Giver] = {}
        self._retired: list[Giver] = []
        self._closing: list[Giver] = []
        self._failures: dict[str, int] = {}
        self._faults: list[SourceFault] = []
        self._shares: dict[str, SourceShare] = {}

    def adopt(self, routes: Sequence[Route], reads: Sequence[StorageRead]) -> None:
        """Follow a plan: feeds that it names are kept or opened, those that nothing is wanted of end."""
        for route in routes:
            feed = self._feeds.get(route.source_id)
            if isinstance(feed, Feed):
                feed.renew(route.lease)
            else:
                self._add(route.source_id, self._opening.peer(route, self._listener))
        wanted = {route.source_id: route.chunks for route in routes}
        for read in reads:
            name = name_of(read.kind, read.uri)
            if name not in self._feeds:
                self._add(name, self._opening.storage(read, self._listener))
            wanted[name] = ranges.normalise((*wanted.get(name, ()), *read.chunks))
        self._schedule.adopt(wanted)
        for source_id in [name for name in self._feeds if not self._schedule.wanted_from(name)]:
            self._retire(source_id)

    def _add(self, source_id: str, feed: Giver) -> None:
        # What an earlier feed of this source offered is void: nothing can be read before this one is up.
        self._schedule.fail(source_id)
        self._feeds[source_id] = feed
        feed.start()

    def retire_all(self) -> None:
        """Read from nobody any more."""
        for source_id in list(self._feeds):
            self._schedule.fail(source_id)
            self._retire(source_id)

    def find(self, source_id: str) -> Giver | None:
        """The feed of a source that is read from now."""
        return self._feeds.get(source_id)

    def renew(self, leases: Mapping[str, Lease]) -> None:
        """Newer lease tokens, by source."""
        for source_id, lease in leases.items():
            feed = self._feeds.get(source_id)
            if isinstance(feed, Feed):
                feed.renew(lease)

    def fail(self, feed: Giver, error: RforkError) -> None:
        """Give up on a source, and keep its fault for the planner."""
        if self._feeds.get(feed.source_id) is not feed:
            return  # it failed already, and this is the echo on another thread
        self._schedule.fail(feed.source_id)
        self._retire(feed.source_id)
        feed.reading.fail(error)
        if isinstance(feed, StorageFeed):
            self.fail_storage(feed.source_id, feed.instance_id, error)
            return
        failures = self._failures[feed.source_id] = self._failures.get(feed.source_id, 0) + 1
        fault = error.fault if error.fault == "source" or failures < MOST_FAILURES else "network"
        self._blame(feed.source_id, feed.instance_id, fault, error)

    def fail_storage(self, name: str, instance_id: str, error: RforkError) -> None:
        """This instance cannot read the storage of that name: somebody else has to, or it reads another."""
        self._opening.give_up(name)
        self._blame(name, instance_id, "storage", error)

    def note(self, error: TransportUnusable) -> None:
        """A transport cannot be used with a source that others reach: said once, and nobody is blamed."""
        if all(str(error) != str(each) for each in self.reasons):
            self.reasons.append(error)

    def _blame(self, name: str, instance_id: str, fault: Fault, error: RforkError) -> None:
        log.warning("source failed", source=short(name), error=error.kind, detail=str(error))
        self.reasons.append(error)
        self._faults.append(
            SourceFault(instance_id=instance_id, fault=fault, error=error.kind, detail=str(error)[:1000])
        )

    def fail_stalled(self, now: float) -> None:
        """Give up on sources that something is wanted of and that are silent or stand still."""
        for source_id, feed in list(self._feeds.items()):
            stall = feed.check(now, starved=self._schedule.starved(source_id))
            if stall is not None and self._schedule.wanted_from(source_id):
                self.fail(feed, stall)

    def look_for_late(self, now: float) -> bool:
        """Find the sources that give nothing while others do; returns whether there are new ones.

        Others may read their chunks after `MOVE_AFTER_S`. After `CONNECT_S` one is given up whose remaining
        chunks cannot be moved, since they are being read from it: others can give them all.
        """
        silent = {
            name: feed
            for name, feed in self._feeds.items()
            if isinstance(feed, Feed) and feed.unanswered and now - feed.began_at >= MOVE_AFTER_S
        }
        others = [name for name in self._feeds if name not in silent and name in self._shares]
        before, self._schedule.late = self._schedule.late, frozenset(silent if others else ())
        if others and not any(self._schedule.wanted_from(name) for name in others):
            for name, feed in silent.items():
                if self._schedule.wanted_from(name) and now - feed.began_at >= CONNECT_S:
                    self.fail(feed, SourceUnreachable(f"{feed.address}: no byte came within {CONNECT_S:g} s"))
        return bool(self._schedule.late - before)

    def credit(self, source_id: str, host: str, transport: str, chunks: int, nbytes: int) -> None:
        """This many chunks from this source are verified."""
        share = self._shares.get(source_id) or SourceShare(source_id, host, transport, 0, 0)
        self._shares[source_id] = replace(
            share,
            transport=transport,
            verified_chunks=share.verified_chunks + chunks,
            verified_bytes=share.verified_bytes + nbytes,
        )

    @property
    def current(self) -> tuple[Share, ...]:
        """What is read from whom by the plan there is; this instance's own id stands for its storage."""
        chunks: dict[str, tuple[ranges.Range, ...]] = {}
        for source_id, part in self._schedule.shares.items():
            if (feed := self._feeds.get(source_id)) is not None:
                before = chunks.get(feed.instance_id, ())
                chunks[feed.instance_id] = ranges.normalise((*before, *part))
        return tuple(Share(source_id=name, chunks=part) for name, part in chunks.items())

    @property
    def reading(self) -> tuple[float, bool] | None:
        """When storage that something is wanted of, be it own or a source's, last gave something.

        And whether it is that of a source.
        """
        wanted = [feed for name, feed in self._feeds.items() if self._schedule.wanted_from(name)]
        found = [(feed.read_at, isinstance(feed, Feed)) for feed in wanted if feed.read_at is not None]
        return max(found, default=None)

    @property
    def gave_at(self) -> float | None:
        """When own storage that something is wanted of last gave a block; None: none has."""
        wanted = [feed for name, feed in self._feeds.items() if self._schedule.wanted_from(name)]
        found = [feed.gave_at for feed in wanted if isinstance(feed, StorageFeed)]
        return max((at for at in found if at is not None), default=None)

    @property
    def any_left(self) -> bool:
        """Whether a source is left, if only to say what its image holds."""
        return bool(self._feeds)

    def giving_besides(self, feed: Giver) -> bool:
        """Whether another source is left that something is wanted of."""
        return any(
            other is not feed and self._schedule.wanted_from(name) for name, other in self._feeds.items()
        )

    @property
    def shares(self) -> tuple[SourceShare, ...]:
        """What each source gave so far, most first."""
        return tuple(sorted(self._shares.values(), key=lambda share: -share.verified_bytes))

    @property
    def changing(self) -> bool:
        """Whether the last that failed did so as its weights changed: it may soon give others."""
        failures = (each for each in reversed(self.reasons) if not isinstance(each, TransportUnusable))
        return isinstance(next(failures, None), SourceChanged)

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

    def take_retired(self) -> list[Giver]:
        """Feeds that ended since the last call, for the caller to close without the lock."""
        closing, self._closing = self._closing, []
        return closing

    @property
    def everyone(self) -> tuple[Giver, ...]:
        """All feeds that ever were, to be closed and joined at the end."""
        return (*self._feeds.values(), *self._retired)

    def _retire(self, source_id: str) -> None:
        feed = self._feeds.pop(source_id)
        self._digests.forget(source_id)
        self._retired.append(feed)
        self._closing.append(feed)
