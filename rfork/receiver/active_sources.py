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
from rfork.transport.base import CONNECT_TIMEOUT_S

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
        scheduler: ChunkScheduler,
        verifier: ChunkVerifier,
        source_factory: SourceFactoryProtocol,
        listener: SourceListener,
    ) -> None:
        self.reasons: list[RforkError] = []
        self._scheduler = scheduler
        self._verifier = verifier
        self._source_factory = source_factory
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
            source = self._active.get(route.source_id)
            if isinstance(source, PeerSource):
                source.renew(route.lease)
            else:
                self._add(route.source_id, self._source_factory.open_peer(route, self._listener))
        wanted = {route.source_id: route.chunks for route in routes}
        for read in reads:
            name = storage_name(read.kind, read.uri)
            if name not in self._active:
                self._add(name, self._source_factory.open_storage(read, self._listener))
            wanted[name] = ranges.normalise((*wanted.get(name, ()), *read.chunks))
        self._scheduler.assign(wanted)
        for source_id in [name for name in self._active if not self._scheduler.has_assigned(name)]:
            self._retire(source_id)

    def _add(self, source_id: str, source: ChunkSource) -> None:
        # What an earlier feed of this source offered is void: nothing can be read before this one is up.
        self._scheduler.fail(source_id)
        self._active[source_id] = source
        source.start()

    def close_all(self) -> None:
        """Read from nobody any more."""
        for source_id in list(self._active):
            self._scheduler.fail(source_id)
            self._retire(source_id)

    def find(self, source_id: str) -> ChunkSource | None:
        """The feed of a source that is read from now."""
        return self._active.get(source_id)

    def renew(self, leases: Mapping[str, Lease]) -> None:
        """Newer lease tokens, by source."""
        for source_id, lease in leases.items():
            source = self._active.get(source_id)
            if isinstance(source, PeerSource):
                source.renew(lease)

    def fail(self, source: ChunkSource, error: RforkError) -> None:
        """Give up on a source, and keep its fault for the planner."""
        if self._active.get(source.source_id) is not source:
            return  # it failed already, and this is the echo on another thread
        self._scheduler.fail(source.source_id)
        self._retire(source.source_id)
        source.reading.fail(error)
        if isinstance(source, StorageSource):
            self.fail_storage(source.source_id, source.instance_id, error)
            return
        failures = self._failures[source.source_id] = self._failures.get(source.source_id, 0) + 1
        fault = error.fault if error.fault == "source" or failures < MAX_FAILURES else "network"
        self._record_fault(source.source_id, source.instance_id, fault, error)

    def fail_storage(self, name: str, instance_id: str, error: RforkError) -> None:
        """This instance cannot read the storage of that name: somebody else has to, or it reads another."""
        self._source_factory.exclude(name)
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
        for source_id, source in list(self._active.items()):
            stall = source.check(now, starved=self._scheduler.is_starved(source_id))
            if stall is not None and self._scheduler.has_assigned(source_id):
                self.fail(source, stall)

    def find_stragglers(self, now: float) -> bool:
        """Find the sources that give nothing while others do; returns whether there are new ones.

        Others may read their chunks after `MOVE_AFTER_S`. After `CONNECT_TIMEOUT_S` one is given up whose remaining
        chunks cannot be moved, since they are being read from it: others can give them all.
        """
        silent = {
            name: source
            for name, source in self._active.items()
            if isinstance(source, PeerSource) and source.has_no_bytes and now - source.began_at >= MOVE_AFTER_S
        }
        others = [name for name in self._active if name not in silent and name in self._shares]
        before, self._scheduler.late = self._scheduler.late, frozenset(silent if others else ())
        if others and not any(self._scheduler.has_assigned(name) for name in others):
            for name, source in silent.items():
                if self._scheduler.has_assigned(name) and now - source.began_at >= CONNECT_TIMEOUT_S:
                    self.fail(source, SourceUnreachable(f"{source.address}: no byte came within {CONNECT_TIMEOUT_S:g} s"))
        return bool(self._scheduler.late - before)

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
        for source_id, part in self._scheduler.shares.items():
            if (source := self._active.get(source_id)) is not None:
                before = chunks.get(source.instance_id, ())
                chunks[source.instance_id] = ranges.normalise((*before, *part))
        return tuple(ChunkAssignment(source_id=name, chunks=part) for name, part in chunks.items())

    @property
    def storage_activity(self) -> tuple[float, bool] | None:
        """When storage that something is wanted of, be it own or a source's, last gave something.

        And whether it is that of a source.
        """
        wanted = [source for name, source in self._active.items() if self._scheduler.has_assigned(name)]
        found = [
            (source.last_storage_activity_at, isinstance(source, PeerSource))
            for source in wanted
            if source.last_storage_activity_at is not None
        ]
        return max(found, default=None)

    @property
    def last_storage_block_at(self) -> float | None:
        """When own storage that something is wanted of last gave a block; None: none has."""
        wanted = [source for name, source in self._active.items() if self._scheduler.has_assigned(name)]
        found = [source.last_block_at for source in wanted if isinstance(source, StorageSource)]
        return max((at for at in found if at is not None), default=None)

    @property
    def any_active(self) -> bool:
        """Whether a source is left, if only to say what its image holds."""
        return bool(self._active)

    def others_have_work(self, source: ChunkSource) -> bool:
        """Whether another source is left that something is wanted of."""
        return any(other is not source and self._scheduler.has_assigned(name) for name, other in self._active.items())

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
        return any(self._scheduler.has_assigned(source_id) for source_id in self._active)

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
        source = self._active.pop(source_id)
        self._verifier.remove_source(source_id)
        self._retired.append(source)
        self._closing.append(source)
