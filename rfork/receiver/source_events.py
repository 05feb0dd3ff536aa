"""What the planner and the sources of a fork say, the latter on their threads, and what becomes of it.

Runs on the target. Each call of a source takes the puller's lock, and rings its bell where there is
something to read, or to plan anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from rfork.errors import RforkError, SourceUnavailable, SourceWeightsChanged, TransportUnavailable
from rfork.image import ranges
from rfork.image.chunk_state import ChunkState
from rfork.image.manifest import Manifest
from rfork.image.ranges import Range
from rfork.logs import logger
from rfork.receiver.active_sources import ActiveSources, SourceFactoryProtocol
from rfork.receiver.chunk_scheduler import ChunkScheduler
from rfork.receiver.chunk_verifier import ChunkVerifier
from rfork.receiver.deadline import Deadline
from rfork.receiver.source import ChunkSource
from rfork.receiver.spool_source import SpoolSource
from rfork.schema import Plan
from rfork.storage.base import storage_name

log = logger(__name__)


class SourceEventHandler:
    """See `rfork.receiver.source.SourceListener`; keeps the sources, as whoever has ended is told from who has not."""

    def __init__(
        self,
        changed: threading.Condition,
        chunk_state: ChunkState,
        scheduler: ChunkScheduler,
        verifier: ChunkVerifier,
        source_factory: SourceFactoryProtocol,
        spool_source: SpoolSource,
        deadline: Deadline,
    ) -> None:
        """`changed` is the puller's lock and its bell; `deadline` the fork's own."""
        self.sources = ActiveSources(scheduler, verifier, source_factory, self)
        self.stopping = False
        """Whether the fork is over: who fails now is not at fault."""
        self.expected: str | None = None
        """The weights_id of the plan."""
        self._abandoned_weights_id: str | None = None
        """The weights_id of what was dropped since the plan."""
        self._version: str | None = None
        """The version of the plan."""
        self._cond = changed
        self._chunk_state = chunk_state
        self._scheduler = scheduler
        self._verifier = verifier
        self._spool_source = spool_source
        self._deadline = deadline
        self._count = len(chunk_state.chunks)

    # -- what the puller does; it holds the lock -------------------------------------------------------

    def apply_plan(self, plan: Plan) -> None:
        """Follow a plan."""
        self.expected, self._abandoned_weights_id, self._version = plan.weights_id, None, plan.version
        self.sources.apply_plan(plan.routes, plan.storage)
        log.info(
            "planned",
            fork=plan.fork_id,
            routes={route.source_id[:8]: format_ranges(route.chunks) for route in plan.routes},
            storage={storage_name(read.kind, read.uri): format_ranges(read.chunks) for read in plan.storage},
            reason=plan.reason,
        )
        self._cond.notify_all()

    @property
    def weights_changing(self) -> bool:
        """Whether the weights that were read change at their source: others will soon be had there."""
        known = (
            self._verifier.manifest is not None or self.expected is not None or self._abandoned_weights_id is not None
        )
        return known and self.sources.weights_changing

    def restart(self) -> bool:
        """Drop what was begun of weights that nobody gives any more; whether there was anything."""
        manifest = self._verifier.manifest
        if manifest is None:
            return False
        self._abandoned_weights_id = manifest.weights_id
        if chunks := self._verifier.restart():
            why = f"the weights changed at the source: started over, {chunks} chunks are compared anew"
            log.warning("started over", chunks=chunks, weights_id=self._abandoned_weights_id)
            self.sources.reasons.append(SourceWeightsChanged(why))
        return True

    def is_other_version(self, plan: Plan) -> bool:
        """Whether a plan is of other weights than those that were begun: of another version."""
        manifest = self._verifier.manifest
        if manifest is None:
            return False
        if plan.weights_id is None:
            return plan.version != self._version
        return plan.weights_id != manifest.weights_id

    def is_stale_plan(self, plan: Plan) -> bool:
        """Whether a plan names the weights that were dropped, and some that have yet to drop them too.

        Who holds all of them leads on: they were changed back.
        """
        parts = [part for route in plan.routes for part in route.chunks]
        parts += [part for read in plan.storage for part in read.chunks]
        partial = ranges.count(ranges.normalise(parts)) < self._count
        return plan.weights_id is not None and plan.weights_id == self._abandoned_weights_id and partial

    # -- what sources say, on their threads ------------------------------------------------------------

    def on_manifest(self, source: ChunkSource, manifest: Manifest) -> None:
        """See `rfork.receiver.source.SourceListener`; every source must hold the bytes that the first one named."""
        with self._cond:
            self._require_active(source)
            known = self._verifier.manifest
            begun = len(self._chunk_state) > 0 or self._scheduler.in_flight > 0
            expected = known.weights_id if known and begun else self.expected
            if expected not in (None, manifest.weights_id):
                raise SourceWeightsChanged(
                    f"{source.address}: holds weights {manifest.weights_id}, this fork is of {expected}"
                )
            self._verifier.set_manifest(manifest)
            if known is None or known.weights_id != manifest.weights_id:
                self._spool_source.set_manifest(manifest)
            self._cond.notify_all()

    def on_provisional_digests(self, source: ChunkSource, provisional_id: str, digests: Mapping[int, bytes]) -> None:
        """See `rfork.receiver.source.SourceListener`."""
        with self._cond:
            self._require_active(source)
            alone = not self.sources.others_have_work(source)
            self._verifier.add_provisional_digests(source.source_id, provisional_id, digests, alone=alone)

    def on_chunks_available(self, source: ChunkSource, chunks: tuple[Range, ...]) -> None:
        """See `rfork.receiver.source.SourceListener`."""
        with self._cond:
            if self.sources.find(source.source_id) is source:
                self._scheduler.mark_available(source.source_id, chunks)
                self._cond.notify_all()

    def next_chunks(self, source: ChunkSource, count: int) -> tuple[Sequence[int], Sequence[int]]:
        """See `rfork.receiver.source.SourceListener`."""
        with self._cond:
            if self.sources.find(source.source_id) is not source:
                return (), ()
            return self._scheduler.upcoming(source.source_id, count)

    def on_transport_unavailable(self, source: ChunkSource, error: TransportUnavailable) -> None:
        """See `rfork.receiver.source.SourceListener`."""
        log.warning(
            "transport cannot be used",
            source=source.address,
            error=error.kind,
            detail=str(error),
            hint=error.hint,
        )
        with self._cond:
            self.sources.record_unavailable_transport(error)

    def on_failure(self, source: ChunkSource, error: RforkError) -> None:
        """See `rfork.receiver.source.SourceListener`."""
        with self._cond:
            self.fail(source, error)

    def digests_to_compare(self) -> Mapping[int, bytes]:
        """See `rfork.receiver.source.SourceListener`."""
        with self._cond:
            return self._verifier.digests_to_compare()

    def on_local_files(
        self, source: ChunkSource, origin: str, compared: Mapping[int, bytes], *, agrees: bool
    ) -> Mapping[int, bytes]:
        """See `rfork.receiver.source.SourceListener`."""
        with self._cond:
            self._require_active(source)
            left = self._verifier.verify_local_files(source.source_id, origin, compared, agrees=agrees)
            self._cond.notify_all()
            return left

    def _require_active(self, source: ChunkSource) -> None:
        if self.sources.find(source.source_id) is not source:
            raise SourceUnavailable(f"{source.address}: was given up")

    def fail(self, source: ChunkSource, error: RforkError) -> None:
        """Give up on a source; the caller holds the lock. Past the deadline nobody but time is at fault."""
        if not self.stopping and time.monotonic() < self._deadline.monotonic_time:
            self.sources.fail(source, error)
        self._cond.notify_all()


def format_ranges(parts: tuple[Range, ...]) -> str:
    """Chunk ranges as people read them: ``0-63,80-127``."""
    return ",".join(f"{begin}-{end - 1}" for begin, end in parts)
