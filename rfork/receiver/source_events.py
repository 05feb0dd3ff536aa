"""Handles callbacks from sources and new plans.

Runs on the target. Callbacks run on the sources' threads, acquire the transfer's lock, and notify its
condition variable if there is something to read or to replan.
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
    """Implements `rfork.receiver.source.SourceListener` for a transfer, and owns the active sources."""

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
        """`changed` is the transfer's condition variable; `deadline` the fork's."""
        self.sources = ActiveSources(scheduler, verifier, source_factory, self)
        self.stopping = False
        """True if the fork has ended: later failures are not the sources' fault."""
        self.expected: str | None = None
        """The weights_id of the plan."""
        self._abandoned_weights_id: str | None = None
        """The weights_id of the weights dropped since the plan."""
        self._version: str | None = None
        """The version of the plan."""
        self._cond = changed
        self._chunk_state = chunk_state
        self._scheduler = scheduler
        self._verifier = verifier
        self._spool_source = spool_source
        self._deadline = deadline
        self._count = len(chunk_state.chunks)

    # -- calls from the transfer, which holds the lock -------------------------------------------------------

    def apply_plan(self, plan: Plan) -> None:
        """Follow a plan."""
        self.expected, self._abandoned_weights_id, self._version = plan.weights_id, None, plan.version
        self.sources.apply_plan(plan.routes, plan.storage)
        log.info(
            "plan received",
            fork=plan.fork_id,
            routes={route.source_id[:8]: format_ranges(route.chunks) for route in plan.routes},
            storage={storage_name(read.kind, read.uri): format_ranges(read.chunks) for read in plan.storage},
            reason=plan.reason,
        )
        self._cond.notify_all()

    @property
    def weights_changing(self) -> bool:
        """True if the weights are changing at their source, which will soon serve others."""
        known = (
            self._verifier.manifest is not None or self.expected is not None or self._abandoned_weights_id is not None
        )
        return known and self.sources.weights_changing

    def restart(self) -> bool:
        """Drop weights that no source serves any more; returns whether any were begun."""
        manifest = self._verifier.manifest
        if manifest is None:
            return False
        self._abandoned_weights_id = manifest.weights_id
        if chunks := self._verifier.restart():
            reason = f"the weights changed at the source: started over, {chunks} chunks are compared again"
            log.warning(
                "weights changed at the source, starting over", chunks=chunks, weights_id=self._abandoned_weights_id
            )
            self.sources.reasons.append(SourceWeightsChanged(reason))
        return True

    def is_other_version(self, plan: Plan) -> bool:
        """Return whether a plan has other weights than those that were begun."""
        manifest = self._verifier.manifest
        if manifest is None:
            return False
        if plan.weights_id is None:
            return plan.version != self._version
        return plan.weights_id != manifest.weights_id

    def is_stale_plan(self, plan: Plan) -> bool:
        """Return whether a plan names the dropped weights, and only sources that have yet to drop them too.

        Sources that together have all chunks are valid: the weights were changed back.
        """
        parts = [part for route in plan.routes for part in route.chunks]
        parts += [part for read in plan.storage for part in read.chunks]
        partial = ranges.count(ranges.normalise(parts)) < self._count
        return plan.weights_id is not None and plan.weights_id == self._abandoned_weights_id and partial

    # -- callbacks from sources, on their threads ------------------------------------------------------------

    def on_manifest(self, source: ChunkSource, manifest: Manifest) -> None:
        """See `rfork.receiver.source.SourceListener`.

        All sources must have the weights that the first one named.
        """
        with self._cond:
            self._require_active(source)
            known = self._verifier.manifest
            begun = len(self._chunk_state) > 0 or self._scheduler.in_flight > 0
            expected = known.weights_id if known and begun else self.expected
            if expected not in (None, manifest.weights_id):
                raise SourceWeightsChanged(
                    f"{source.address}: the source has weights {manifest.weights_id}, but this fork reads {expected}"
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
            raise SourceUnavailable(f"{source.address}: the source was removed")

    def fail(self, source: ChunkSource, error: RforkError) -> None:
        """Give up on a source; the caller holds the lock. After the deadline, no source is blamed."""
        if not self.stopping and time.monotonic() < self._deadline.monotonic_time:
            self.sources.fail(source, error)
        self._cond.notify_all()


def format_ranges(parts: tuple[Range, ...]) -> str:
    """Format chunk ranges for logs: ``0-63,80-127``."""
    return ",".join(f"{begin}-{end - 1}" for begin, end in parts)
