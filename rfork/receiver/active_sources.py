"""The sources of one fork: whom it reads from now, who failed and how, and what each gave.

Runs on the target. The puller holds its lock around every call here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from rfork.errors import Fault, RforkError, SourceUnreachable, SourceWeightsChanged, TransportUnavailable
from rfork.image import ranges
from rfork.logs import logger
from rfork.receiver.chunk_scheduler import ChunkScheduler
from rfork.receiver.chunk_verifier import ChunkVerifier
from rfork.receiver.peer_source import PeerSource
from rfork.receiver.report import SourceShare, short_id
from rfork.receiver.source import ChunkSource, SourceListener
from rfork.receiver.storage_source import StorageSource
from rfork.schema import ChunkAssignment, Lease, Route, SourceFault, StorageAssignment
from rfork.storage.base import storage_name
from rfork.transport.base import CONNECT_S

log = logger(__name__)

MAX_FAILURES = 3
"""A source that failed this often is not asked again by this fork, whoever was at fault."""
MOVE_AFTER_S = 0.5
"""A source that has given nothing for so long may lose its chunks to others that have nothing to read."""


class SourceFactoryProtocol(Protocol):
    """Makes the (not yet started) feeds of a plan."""

    def open_peer(self, route: Route, listener: SourceListener) -> PeerSource:
        """The feed of one route."""
        ...

    def open_storage(self, read: StorageAssignment, listener: SourceListener) -> StorageSource:
        """The feed of this instance's own storage."""
        ...

    def exclude(self, name: str) -> None:
        """The storage of that name failed: it is not to be offered again."""
        ...


class ActiveSources:
    """Keeps the feeds in step with the plan and the schedule."""

    def __init__(
        self,
        schedule: ChunkScheduler,
        digests: ChunkVerifier,
        opening: SourceFactoryProtocol,
        listener: SourceListener,
    ) -> None:
        self.reasons: list[RforkError] = []
        self._schedule = schedule
        self._digests = digests
        self._opening = opening
        self._listener = listener
        self._active: dict[str, ChunkSource] = {}
        self._retired: list[ChunkSource] = []
        self._closing: list[ChunkSource] = []
        self._failures: dict[str, int] = {}
        self._faults: list[SourceFault] = []
        self._shares: dict[str, SourceShare] = {}

    def apply_plan(self, routes: Sequence[Route], reads: Sequence[StorageAssignment]) -> None:
        """Follow a plan: feeds that it names are kept or opened, those that nothing is wanted of end."""
        for route in routes:
            feed = self._active.get(route.source_id)
            if isinstance(feed, PeerSource):
                feed.renew(route.lease)
            else:
                self._add(route.source_id, self._opening.open_peer(route, self._listener))
        wanted = {route.source_id: route.chunks for route in routes}
        for read in reads:
            name = storage_name(read.kind, read.uri)
            if name not in self._active:
                self._add(name, self._opening.open_storage(read, self._listener))
            wanted[name] = ranges.normalise((*wanted.get(name, ()), *read.chunks))
        self._schedule.assign(wanted)
        for source_id in [name for name in self._active if not self._schedule.has_assigned(name)]:
            self._retire(source_id)

    def _add(self, source_id: str, feed: ChunkSource) -> None:
        # What an earlier feed of this source offered is void: nothing can be read before this one is up.
        self._schedule.fail(source_id)
        self._active[source_id] = feed
        feed.start()

    def close_all(self) -> None:
        """Read from nobody any more."""
        for source_id in list(self._active):
            self._schedule.fail(source_id)
            self._retire(source_id)

    def find(self, source_id: str) -> ChunkSource | None:
        """The feed of a source that is read from now."""
        return self._active.get(source_id)

    def renew(self, leases: Mapping[str, Lease]) -> None:
        """Newer lease tokens, by source."""
        for source_id, lease in leases.items():
            feed = self._active.get(source_id)
            if isinstance(feed, PeerSource):
                feed.renew(lease)

    def fail(self, feed: ChunkSource, error: RforkError) -> None:
        """Give up on a source, and keep its fault for the planner."""
        if self._active.get(feed.source_id) is not feed:
            return  # it failed already, and this is the echo on another thread
        self._schedule.fail(feed.source_id)
        self._retire(feed.source_id)
        feed.reading.fail(error)
        if isinstance(feed, StorageSource):
            self.fail_storage(feed.source_id, feed.instance_id, error)
            return
        failures = self._failures[feed.source_id] = self._failures.get(feed.source_id, 0) + 1
        fault = error.fault if error.fault == "source" or failures < MAX_FAILURES else "network"
        self._record_fault(feed.source_id, feed.instance_id, fault, error)

    def fail_storage(self, name: str, instance_id: str, error: RforkError) -> None:
        """This instance cannot read the storage of that name: somebody else has to, or it reads another."""
        self._opening.exclude(name)
        self._record_fault(name, instance_id, "storage", error)

    def record_unavailable_transport(self, error: TransportUnavailable) -> None:
        """A transport cannot be used with a source that others reach: said once, and nobody is blamed."""
        if all(str(error) != str(each) for each in self.reasons):
            self.reasons.append(error)

    def _record_fault(self, name: str, instance_id: str, fault: Fault, error: RforkError) -> None:
        log.warning("source failed", source=short_id(name), error=error.kind, detail=str(error))
        self.reasons.append(error)
        self._faults.append(
            SourceFault(instance_id=instance_id, fault=fault, error=error.kind, detail=str(error)[:1000])
        )

    def fail_stalled(self, now: float) -> None:
        """Give up on sources that something is wanted of and that are silent or stand still."""
        for source_id, feed in list(self._active.items()):
            stall = feed.check(now, starved=self._schedule.is_starved(source_id))
            if stall is not None and self._schedule.has_assigned(source_id):
                self.fail(feed, stall)

    def find_stragglers(self, now: float) -> bool:
        """Find the sources that give nothing while others do; returns whether there are new ones.

        Others may read their chunks after `MOVE_AFTER_S`. After `CONNECT_S` one is given up whose remaining
        chunks cannot be moved, since they are being read from it: others can give them all.
        """
        silent = {
            name: feed
            for name, feed in self._active.items()
            if isinstance(feed, PeerSource) and feed.has_no_bytes and now - feed.began_at >= MOVE_AFTER_S
        }
        others = [name for name in self._active if name not in silent and name in self._shares]
        before, self._schedule.late = self._schedule.late, frozenset(silent if others else ())
        if others and not any(self._schedule.has_assigned(name) for name in others):
            for name, feed in silent.items():
                if self._schedule.has_assigned(name) and now - feed.began_at >= CONNECT_S:
                    self.fail(feed, SourceUnreachable(f"{feed.address}: no byte came within {CONNECT_S:g} s"))
        return bool(self._schedule.late - before)

    def record_verified(self, source_id: str, host: str, transport: str, chunks: int, nbytes: int) -> None:
        """This many chunks from this source are verified."""
        share = self._shares.get(source_id) or SourceShare(source_id, host, transport, 0, 0)
        self._shares[source_id] = replace(
            share,
            transport=transport,
            verified_chunks=share.verified_chunks + chunks,
            verified_bytes=share.verified_bytes + nbytes,
        )

    @property
    def current_assignments(self) -> tuple[ChunkAssignment, ...]:
        """What is read from whom by the plan there is; this instance's own id stands for its storage."""
        chunks: dict[str, tuple[ranges.Range, ...]] = {}
        for source_id, part in self._schedule.shares.items():
            if (feed := self._active.get(source_id)) is not None:
                before = chunks.get(feed.instance_id, ())
                chunks[feed.instance_id] = ranges.normalise((*before, *part))
        return tuple(ChunkAssignment(source_id=name, chunks=part) for name, part in chunks.items())

    @property
    def storage_activity(self) -> tuple[float, bool] | None:
        """When storage that something is wanted of, be it own or a source's, last gave something.

        And whether it is that of a source.
        """
        wanted = [feed for name, feed in self._active.items() if self._schedule.has_assigned(name)]
        found = [
            (feed.last_storage_activity_at, isinstance(feed, PeerSource))
            for feed in wanted
            if feed.last_storage_activity_at is not None
        ]
        return max(found, default=None)

    @property
    def last_storage_block_at(self) -> float | None:
        """When own storage that something is wanted of last gave a block; None: none has."""
        wanted = [feed for name, feed in self._active.items() if self._schedule.has_assigned(name)]
        found = [feed.last_block_at for feed in wanted if isinstance(feed, StorageSource)]
        return max((at for at in found if at is not None), default=None)

    @property
    def any_active(self) -> bool:
        """Whether a source is left, if only to say what its image holds."""
        return bool(self._active)

    def others_have_work(self, feed: ChunkSource) -> bool:
        """Whether another source is left that something is wanted of."""
        return any(other is not feed and self._schedule.has_assigned(name) for name, other in self._active.items())

    @property
    def shares(self) -> tuple[SourceShare, ...]:
        """What each source gave so far, most first."""
        return tuple(sorted(self._shares.values(), key=lambda share: -share.verified_bytes))

    @property
    def weights_changing(self) -> bool:
        """Whether the last that failed did so as its weights changed: it may soon give others."""
        failures = (each for each in reversed(self.reasons) if not isinstance(each, TransportUnavailable))
        return isinstance(next(failures, None), SourceWeightsChanged)

    @property
    def has_work(self) -> bool:
        """Whether a source is left that something is wanted of."""
        return any(self._schedule.has_assigned(source_id) for source_id in self._active)

    @property
    def faults(self) -> tuple[SourceFault, ...]:
        """Faults that the planner has not heard of yet."""
        return tuple(self._faults)

    def mark_reported(self, faults: Sequence[SourceFault]) -> None:
        """The planner has heard of these, the oldest."""
        del self._faults[: len(faults)]

    @property
    def any_retired(self) -> bool:
        """Whether `pop_retired` has something to give."""
        return bool(self._closing)

    def pop_retired(self) -> list[ChunkSource]:
        """Feeds that ended since the last call, for the caller to close without the lock."""
        closing, self._closing = self._closing, []
        return closing

    @property
    def all_sources(self) -> tuple[ChunkSource, ...]:
        """All feeds that ever were, to be closed and joined at the end."""
        return (*self._active.values(), *self._retired)

    def _retire(self, source_id: str) -> None:
        feed = self._active.pop(source_id)
        self._digests.remove_source(source_id)
        self._retired.append(feed)
        self._closing.append(feed)
