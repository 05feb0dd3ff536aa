"""Fills an image from the sources of a plan, verifies each chunk, and replans when needed.

Runs on the target. Sources are peers and, if the planner elected this instance, its own storage. Worker
threads read and verify chunks; one thread per source tracks the chunks that it can serve; the caller's thread
supervises both.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from rfork.errors import (
    DeadlineExceeded,
    NoSource,
    PlannerRejected,
    PlannerUnreachable,
    RforkError,
)
from rfork.image.chunk_state import ChunkState
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.receiver.active_sources import SourceFactoryProtocol
from rfork.receiver.chunk_scheduler import ChunkScheduler
from rfork.receiver.chunk_verifier import ChunkVerifier, ServingState
from rfork.receiver.deadline import Deadline
from rfork.receiver.elected_loader import ElectedLoader, RunLoader
from rfork.receiver.read_workers import ReadWorkers
from rfork.receiver.report import SourceShare, TransferStats
from rfork.receiver.source_events import SourceEventHandler
from rfork.receiver.spool_source import SpoolSource
from rfork.schema import ChunkAssignment, Lease, Plan, SourceFault
from rfork.settings import InstanceSettings
from rfork.storage.spool import Spool

log = logger(__name__)

POLL_INTERVAL_S = 0.25
"""Interval of the checks for stalls, silence and the deadline; events are handled immediately."""
SUSPEND_THRESHOLD_S = 2 * POLL_INTERVAL_S
"""After this long without a check, this process was suspended (stopped, or blocked on the interpreter lock)."""
FIRST_RETRY_S = 0.2
MIN_REPLAN_INTERVAL_S = 0.05
PARTIAL_PLAN_RETRY_S = 0.8
"""Interval of plan requests while some chunks have a source and others have none."""

Replan = Callable[[tuple[SourceFault, ...], tuple[ChunkAssignment, ...]], Plan]
"""Requests a plan, given the faults since the last plan and the current assignments."""


class Transfer:
    """The transfer of one fork. Call `run` once.

    `source_factory` creates the sources of a plan; `replan` requests a plan from the planner; `run_loader` is
    called on the caller's thread if the planner elected this instance to run its loader; `serving_state`
    receives the manifest before the first chunk verified against it is served. `identity` is this instance's
    id and host; `spool` is used as described in `rfork.receiver.spool_source`. Without a manifest, a fork
    that did not read all its chunks from its own files waits at the end for the source that did: only that
    one can confirm that they belong together.
    """

    def __init__(
        self,
        image: Image,
        chunk_state: ChunkState,
        settings: InstanceSettings,
        *,
        identity: tuple[str, str],
        source_factory: SourceFactoryProtocol,
        replan: Replan,
        run_loader: RunLoader,
        serving_state: ServingState,
        deadline: Deadline,
        spool: Spool | None = None,
    ) -> None:
        self._chunk_state = chunk_state
        self._settings = settings
        self._replan = replan
        self._serving_state = serving_state
        self._deadline = deadline
        self._chunks = image.layout.chunks
        self._changed = threading.Condition()
        self._scheduler = ChunkScheduler(len(self._chunks), chunk_state.verified)
        self._verifier = ChunkVerifier(image, chunk_state, self._scheduler, serving_state)
        self._spool_source = SpoolSource(
            spool, image, chunk_state, settings, self._scheduler, self._verifier, self._changed
        )
        self._event_handler = SourceEventHandler(
            self._changed, chunk_state, self._scheduler, self._verifier, source_factory, self._spool_source, deadline
        )
        self._sources = self._event_handler.sources
        self._workers = ReadWorkers(
            image, chunk_state, settings, self._scheduler, self._verifier, self._event_handler, self._changed, deadline
        )
        self._elected_loader = ElectedLoader(
            chunk_state,
            self._scheduler,
            self._verifier,
            self._sources,
            serving_state,
            run_loader,
            self._changed,
            identity,
        )
        self._complete_since: float | None = None
        self._last_poll = self._timeouts_apply_from = -math.inf
        self._was_suspended = False
        self._plans = 0
        self._replan_reason: str | None = None

    # -- the caller's thread --------------------------------------------------------------------

    def run(self) -> TransferStats:
        """Fill the image; returns once every chunk is verified.

        Raises DeadlineExceeded, NoSource (the planner knows none, or all that it knows failed),
        PlannerUnreachable or PlannerRejected. Nothing is written to the image after it returns or raises.
        """
        self._workers.start()
        self._spool_source.start()
        try:
            self._supervise()
        finally:
            with self._changed:
                self._event_handler.stopping = True
                sources = self._sources.all_sources
            self._workers.stop()
            self._spool_source.stop()
            for source in sources:
                source.close()
            self._workers.join()
            for source in sources:
                source.join()
            self._serving_state.report_storage_activity(None)
        return self.stats

    @property
    def stats(self) -> TransferStats:
        """Statistics so far, also of a failed transfer."""
        repeated = sum(
            times * (self._chunks[chunk][1] - self._chunks[chunk][0])
            for chunk, times in self._scheduler.rereads.items()
        )
        shares = sorted((*self.shares, *self._spool_source.share), key=lambda share: -share.verified_bytes)
        replans = max(0, self._plans - 1)
        return TransferStats(self.bytes_read, repeated, replans, tuple(shares), self._spool_source.seconds)

    @property
    def shares(self) -> tuple[SourceShare, ...]:
        """Chunks and bytes that each source served so far, by bytes in descending order."""
        with self._changed:
            return self._sources.shares

    @property
    def reasons(self) -> tuple[RforkError, ...]:
        """Each failure of a source so far, in order."""
        with self._changed:
            return tuple(self._sources.reasons)

    @property
    def bytes_read(self) -> int:
        """Bytes of the chunks that have arrived, valid or not."""
        return self.measurable_bytes + self._elected_loader.bytes_read

    @property
    def measurable_bytes(self) -> int:
        """Bytes of the chunks that were counted as they arrived; those of a loader are known only at its end."""
        return self._workers.bytes_read

    def update_leases(self, leases: Mapping[str, Lease]) -> None:
        """Replace the lease tokens, by source."""
        with self._changed:
            self._sources.renew(leases)

    def request_replan(self, reason: str) -> None:
        """Request a new plan soon; the current one stays in use until then."""
        with self._changed:
            if self._replan_reason is None:
                log.info("requesting a new plan", reason=reason)
            self._replan_reason = reason
            self._changed.notify_all()

    def _supervise(self) -> None:
        no_source_since: float | None = None
        retry_at = 0.0
        while True:
            with self._changed:
                retired = self._sources.pop_retired()
            # Outside the lock: closing a reader waits until none of its reads can write any more.
            for source in retired:
                source.close()
            with self._changed:
                if self._scheduler.complete and self._verifier.finalize_manifest():
                    return
                now = time.monotonic()
                self._check_timeouts(now)
                if self._sources.has_retired:
                    continue
                due = self._scheduler.unassigned or self._replan_reason is not None
                if self._scheduler.complete or not due or now < retry_at:
                    until = now + POLL_INTERVAL_S if self._scheduler.complete or not due else retry_at
                    self._changed.wait(
                        max(0.01, min(until, now + POLL_INTERVAL_S, self._deadline.monotonic_time) - now)
                    )
                    continue
            plan, refusal = self._request_plan()
            now = time.monotonic()
            loader_read = next((read for read in plan.storage if read.kind == "loader"), None) if plan else None
            if loader_read is not None and not self._scheduler.complete:
                self._plans += 1
                self._replan_reason = None
                self._spool_source.stop()  # the loader writes every byte
                self._elected_loader.load(loader_read)
                no_source_since, retry_at = None, time.monotonic() + FIRST_RETRY_S
                continue
            with self._changed:
                if plan is not None and (plan.routes or plan.storage) and not self._event_handler.is_stale_plan(plan):
                    if self._event_handler.is_other_version(plan):
                        if self._scheduler.in_flight:
                            retry_at = (
                                now + MIN_REPLAN_INTERVAL_S
                            )  # reads in flight must not count for the next weights
                            continue
                        self._event_handler.restart()
                    self._plans += 1
                    self._replan_reason, no_source_since = None, None
                    self._event_handler.apply_plan(plan)
                    plan_retry_s = plan.retry_after_s if self._scheduler.unassigned else MIN_REPLAN_INTERVAL_S
                    retry_at = now + max(
                        MIN_REPLAN_INTERVAL_S, PARTIAL_PLAN_RETRY_S if plan_retry_s is None else plan_retry_s
                    )
                    continue
                if self._scheduler.in_flight or self._sources.has_work or not self._scheduler.unassigned:
                    retry_at = now + PARTIAL_PLAN_RETRY_S  # other sources still serve, so this is not urgent
                    continue
                plan_retry_s = plan.retry_after_s if plan is not None else FIRST_RETRY_S
                changing = self._event_handler.weights_changing
                if changing and plan_retry_s is None and self._event_handler.restart():
                    continue  # the next request accepts any weights
                no_source_since = no_source_since or now
                should_retry = changing or (plan_retry_s is not None and (plan is not None or self._plans > 0))
                if not should_retry or now - no_source_since >= self._settings.no_source_timeout_s:
                    raise refusal
                retry_at = now + (plan_retry_s or FIRST_RETRY_S)

    def _check_timeouts(self, now: float) -> None:
        """Apply timeouts; the caller holds the lock. Raises DeadlineExceeded."""
        last_block_at = self._sources.last_storage_block_at
        if last_block_at is not None:
            self._deadline.extend(last_block_at + self._settings.storage_idle_timeout_s)
        if now >= self._deadline.monotonic_time:
            raise DeadlineExceeded(
                f"the deadline passed with {len(self._chunk_state)} of {len(self._chunks)} chunks verified",
                hint="find what slowed the sources down (`rfork explain`), or raise RFORK_DEADLINE_S",
            )
        if self._timeouts_apply(now):
            self._spool_source.poll(now, self.bytes_read)
            self._sources.fail_stalled(now)
            if self._sources.find_stragglers(now):
                self._changed.notify_all()
        at, relayed = self._sources.storage_activity or (None, False)
        self._serving_state.report_storage_activity((lambda: at) if at is not None else None, relayed=relayed)
        if not self._scheduler.complete:
            self._complete_since = None
            return
        # All chunks are verified, but not yet known to belong together: the storage reader will confirm it.
        self._complete_since = self._complete_since or now
        if not self._sources.has_active or now - self._complete_since > 3 * self._settings.source_idle_timeout_s:
            self._complete_since = None
            self._verifier.invalidate_unconfirmed()

    def _timeouts_apply(self, now: float) -> bool:
        """Return whether silence counts: not right after this process was suspended.

        Its threads first need a moment to process what the sources sent meanwhile.
        """
        late, self._last_poll = SUSPEND_THRESHOLD_S < now - self._last_poll < math.inf, now
        if late and not self._was_suspended:
            self._was_suspended, self._timeouts_apply_from = True, now + POLL_INTERVAL_S
        if now < self._timeouts_apply_from:
            return False
        self._was_suspended = False
        return True

    def _request_plan(self) -> tuple[Plan | None, RforkError]:
        """Request a plan once; returns it, and the error to raise if it has no route."""
        with self._changed:
            faults, current = self._sources.faults, self._sources.current_assignments
        try:
            plan = self._replan(faults, current)
        except (NoSource, PlannerUnreachable, PlannerRejected) as error:
            return None, error
        with self._changed:
            self._sources.mark_reported(faults)
        return plan, NoSource(plan.reason or "the planner knows no source")
