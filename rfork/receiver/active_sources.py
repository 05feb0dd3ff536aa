"""The active sources of one fork, their failures, and the bytes that each served.

Runs on the target. The transfer holds its lock around every call here.
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
"""A fork does not retry a source after this many failures, regardless of the fault."""
MOVE_AFTER_S = 0.5
"""If a source has served nothing for this long, its chunks may be read from idle sources."""


class SourceFactoryProtocol(Protocol):
    """Creates the sources of a plan, not yet started."""

    def open_peer(self, route: Route, listener: SourceListener) -> PeerSource:
        """Return the source for one route."""
        ...

    def open_storage(self, read: StorageAssignment, listener: SourceListener) -> StorageSource:
        """Return the source for this instance's own storage."""
        ...

    def exclude(self, name: str) -> None:
        """Do not offer the storage of this name again: it failed."""
        ...


class ActiveSources:
    """Opens, renews, fails and closes the sources of one fork, as the plan and their state require."""

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
        self._failure_counts: dict[str, int] = {}
        self._faults: list[SourceFault] = []
        self._shares: dict[str, SourceShare] = {}

    def apply_plan(self, routes: Sequence[Route], reads: Sequence[StorageAssignment]) -> None:
        """Follow a plan: keep or open the sources that it names, and close those without assigned chunks."""
        for route in routes:
            source = self._active.get(route.source_id)
            if isinstance(source, PeerSource):
                source.renew(route.lease)
            else:
                self._add(route.source_id, self._source_factory.open_peer(route, self._listener))
        assigned = {route.source_id: route.chunks for route in routes}
        for read in reads:
            name = storage_name(read.kind, read.uri)
            if name not in self._active:
                self._add(name, self._source_factory.open_storage(read, self._listener))
            assigned[name] = ranges.normalise((*assigned.get(name, ()), *read.chunks))
        self._scheduler.assign(assigned)
        for source_id in [name for name in self._active if not self._scheduler.has_assigned(name)]:
            self._retire(source_id)

    def close_all(self) -> None:
        """Stop reading from all sources."""
        for source_id in list(self._active):
            self._scheduler.fail(source_id)
            self._retire(source_id)

    def find(self, source_id: str) -> ChunkSource | None:
        """Return the active source of this id."""
        return self._active.get(source_id)

    def renew(self, leases: Mapping[str, Lease]) -> None:
        """Replace the lease tokens, by source."""
        for source_id, lease in leases.items():
            source = self._active.get(source_id)
            if isinstance(source, PeerSource):
                source.renew(lease)

    def fail(self, source: ChunkSource, error: RforkError) -> None:
        """Give up on a source, and record its fault for the planner."""
        if self._active.get(source.source_id) is not source:
            return  # already failed; a second report from another thread
        self._scheduler.fail(source.source_id)
        self._retire(source.source_id)
        source.source_span.fail(error)
        if isinstance(source, StorageSource):
            self.fail_storage(source.source_id, source.instance_id, error)
            return
        failures = self._failure_counts.get(source.source_id, 0) + 1
        self._failure_counts[source.source_id] = failures
        fault = error.fault if error.fault == "source" or failures < MAX_FAILURES else "network"
        self._record_fault(source.source_id, source.instance_id, fault, error)

    def fail_storage(self, name: str, instance_id: str, error: RforkError) -> None:
        """Record that this instance cannot read the storage of that name.

        Another instance must read it, or this one reads other storage.
        """
        self._source_factory.exclude(name)
        self._record_fault(name, instance_id, "storage", error)

    def record_unavailable_transport(self, error: TransportUnavailable) -> None:
        """Record once that a transport cannot be used with a source. No party is blamed: other targets reach it."""
        if all(str(error) != str(reason) for reason in self.reasons):
            self.reasons.append(error)

    def fail_stalled(self, now: float) -> None:
        """Give up on sources that have assigned chunks and are silent or make no progress."""
        for source_id, source in list(self._active.items()):
            stall = source.check(now, starved=self._scheduler.is_starved(source_id))
            if stall is not None and self._scheduler.has_assigned(source_id):
                self.fail(source, stall)

    def find_stragglers(self, now: float) -> bool:
        """Find the sources that serve nothing while others do. Returns whether there are new ones.

        After `MOVE_AFTER_S`, other sources may serve their chunks. After `CONNECT_TIMEOUT_S`, a source is
        given up if its remaining chunks cannot be moved because they are being read from it: the other
        sources can serve all of them.
        """
        silent = {
            name: source
            for name, source in self._active.items()
            if isinstance(source, PeerSource) and source.has_no_bytes and now - source.began_at >= MOVE_AFTER_S
        }
        serving = [name for name in self._active if name not in silent and name in self._shares]
        previously_late, self._scheduler.late = self._scheduler.late, frozenset(silent if serving else ())
        if serving and not any(self._scheduler.has_assigned(name) for name in serving):
            for name, source in silent.items():
                if self._scheduler.has_assigned(name) and now - source.began_at >= CONNECT_TIMEOUT_S:
                    self.fail(
                        source, SourceUnreachable(f"{source.address}: no byte received within {CONNECT_TIMEOUT_S:g} s")
                    )
        return bool(self._scheduler.late - previously_late)

    def record_verified(self, source_id: str, host: str, transport: str, chunks: int, nbytes: int) -> None:
        """Count chunks from this source that were verified."""
        share = self._shares.get(source_id) or SourceShare(source_id, host, transport, 0, 0)
        self._shares[source_id] = replace(
            share,
            transport=transport,
            verified_chunks=share.verified_chunks + chunks,
            verified_bytes=share.verified_bytes + nbytes,
        )

    @property
    def current_assignments(self) -> tuple[ChunkAssignment, ...]:
        """Chunks by source under the current plan; this instance's own id stands for its storage."""
        chunks: dict[str, tuple[ranges.Range, ...]] = {}
        for source_id, share in self._scheduler.shares.items():
            if (source := self._active.get(source_id)) is not None:
                chunks[source.instance_id] = ranges.normalise((*chunks.get(source.instance_id, ()), *share))
        return tuple(ChunkAssignment(source_id=name, chunks=assigned) for name, assigned in chunks.items())

    @property
    def storage_activity(self) -> tuple[float, bool] | None:
        """Time of the last storage activity, and whether it was upstream; None without such storage.

        Storage with assigned chunks counts, of this instance or of a source upstream.
        """
        activities = [
            (source.last_storage_activity_at, isinstance(source, PeerSource))
            for source in self._with_assigned_chunks()
            if source.last_storage_activity_at is not None
        ]
        return max(activities, default=None)

    @property
    def last_storage_block_at(self) -> float | None:
        """Time of the last block from local storage with assigned chunks; None before the first block."""
        block_times = [
            source.last_block_at
            for source in self._with_assigned_chunks()
            if isinstance(source, StorageSource) and source.last_block_at is not None
        ]
        return max(block_times, default=None)

    @property
    def has_active(self) -> bool:
        """True if any source is left, even one that can only send its manifest."""
        return bool(self._active)

    def others_have_work(self, source: ChunkSource) -> bool:
        """Return whether another active source has assigned chunks."""
        return any(other is not source and self._scheduler.has_assigned(name) for name, other in self._active.items())

    @property
    def shares(self) -> tuple[SourceShare, ...]:
        """Chunks and bytes that each source served, sorted by bytes in descending order."""
        return tuple(sorted(self._shares.values(), key=lambda share: -share.verified_bytes))

    @property
    def weights_changing(self) -> bool:
        """True if the last failure was a change of the source's weights: it may soon serve the new ones."""
        failures = (reason for reason in reversed(self.reasons) if not isinstance(reason, TransportUnavailable))
        return isinstance(next(failures, None), SourceWeightsChanged)

    @property
    def has_work(self) -> bool:
        """True if an active source has assigned chunks."""
        return any(self._scheduler.has_assigned(source_id) for source_id in self._active)

    @property
    def faults(self) -> tuple[SourceFault, ...]:
        """Faults that were not yet reported to the planner."""
        return tuple(self._faults)

    def mark_reported(self, faults: Sequence[SourceFault]) -> None:
        """Remove faults, the oldest ones, that were reported to the planner."""
        del self._faults[: len(faults)]

    @property
    def has_retired(self) -> bool:
        """True if `pop_retired` would return any source."""
        return bool(self._closing)

    def pop_retired(self) -> list[ChunkSource]:
        """Return the sources retired since the last call, for the caller to close without the lock."""
        closing, self._closing = self._closing, []
        return closing

    @property
    def all_sources(self) -> tuple[ChunkSource, ...]:
        """All sources opened so far, to close and join at the end."""
        return (*self._active.values(), *self._retired)

    def _with_assigned_chunks(self) -> list[ChunkSource]:
        return [source for name, source in self._active.items() if self._scheduler.has_assigned(name)]

    def _add(self, source_id: str, source: ChunkSource) -> None:
        # Chunks that an earlier connection to this source offered are void: nothing can be read until this
        # one is open.
        self._scheduler.fail(source_id)
        self._active[source_id] = source
        source.start()

    def _retire(self, source_id: str) -> None:
        source = self._active.pop(source_id)
        self._verifier.remove_source(source_id)
        self._retired.append(source)
        self._closing.append(source)

    def _record_fault(self, name: str, instance_id: str, fault: Fault, error: RforkError) -> None:
        log.warning("source failed", source=short_id(name), error=error.kind, detail=str(error))
        self.reasons.append(error)
        self._faults.append(
            SourceFault(instance_id=instance_id, fault=fault, error=error.kind, detail=str(error)[:1000])
        )
