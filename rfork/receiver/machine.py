"""State machine of one transfer: decides what is read from which source, and what each chunk must contain.

Runs on the target. Pure: no thread, clock, socket or lock. `TransferMachine.handle` receives one event and the
time, and returns the actions that follow; `rfork.receiver.runner` executes them. Sources are peers and, if the
planner elected this instance, its own storage; chunks of a previous process come from its spool.

A fork proceeds as follows. The machine requests a plan, opens the sources that it names, and reads chunks as the
sources offer them, each from one source at a time. A chunk counts once its digest is the expected one
(`rfork.receiver.verifier`). A source that fails, stalls or sends wrong bytes is closed and reported with the next
plan request; verified chunks are kept. The transfer ends once every chunk is verified and all are known to belong
together, or with an error that a fallback handles.

While peers are slow, the target measures its own storage, which then becomes one more source, or replaces the fork
(`rfork.receiver.own_load`).

A spool fills chunks whose recorded digest matches the first source's manifest. They are reserved before anything
can be read from that source. A disk may be slower than the network, so chunks that it would deliver later than
the sources would have served the complete image are left to the sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from typing_extensions import assert_never

from rfork.errors import (
    DeadlineExceeded,
    Fault,
    LayoutMismatch,
    NoSource,
    RforkError,
    SlowSources,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    SourceUnreachable,
    SourceWeightsChanged,
    StorageError,
    TargetError,
    TransportUnavailable,
)
from rfork.image import ranges
from rfork.image.layout import Layout, Manifest
from rfork.image.ranges import Range
from rfork.logs import logger
from rfork.receiver import events
from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler, ReadConcurrency
from rfork.receiver.events import Action, Event, SourceEvent
from rfork.receiver.own_load import OwnLoadMonitor, StorageScope, is_overdue
from rfork.receiver.report import RESUME_SOURCE_ID, SourceShare, TransferStats, short_id
from rfork.receiver.source_reads import ActiveRates, SourceReads
from rfork.receiver.verifier import KEPT_SOURCE_ID, ChunkVerifier, WrongDigest
from rfork.schema import ChunkAssignment, Plan, Route, SourceFault, StorageAssignment
from rfork.settings import InstanceSettings
from rfork.storage.base import storage_name
from rfork.transport.base import CONNECT_TIMEOUT_S
from rfork.weights_version import STATE_VERSION_HINT, UNSTATED

log = logger(__name__)

POLL_INTERVAL_S: Final = 0.25
"""Interval of the checks for stalls, silence and the deadline; events are handled immediately."""
SUSPEND_THRESHOLD_S: Final = 2 * POLL_INTERVAL_S
"""After this long without a tick, this process was suspended (stopped, or blocked on the interpreter lock)."""
FIRST_RETRY_S: Final = 0.2
MIN_REPLAN_INTERVAL_S: Final = 0.05
PARTIAL_PLAN_RETRY_S: Final = 0.8
"""Interval of plan requests while some chunks have a source and others have none."""
MAX_FAILURES: Final = 3
"""A fork does not retry a source after this many failures, regardless of the fault."""
RETRY_GROWTH: Final = 4
"""Growth of the pause before a source that is not to blame is used again."""
MOVE_AFTER_S: Final = 0.5
"""If a source has served nothing for this long, its chunks may be read from idle sources."""
SPOOL_WARMUP_S: Final = 1.0
"""Seconds after which the rates of the spool's disk and of the sources are known."""
OWN_STORAGE_READS: Final = 2
"""Concurrent reads from own storage besides those from peers: one is digested while the next one arrives."""
OWN_STORAGE_IDLE_TIMEOUT_S: Final = 2.0
"""Time without a block after which own storage is left again, as peers can serve its chunks."""
SLOW_SOURCES_HINT: Final = "find what slows the sources down (`rfork explain`)"
MAX_FAULT_DETAIL: Final = 1000
"""Maximum characters of an error that are reported to the planner."""


@dataclass(slots=True)
class _Source:
    """One opened source."""

    connection: int
    source_id: str
    """Its id in the scheduler and in reports."""
    instance_id: str
    """Its id for the planner: the source, or this instance for its own storage."""
    host: str
    address: str
    transport: str
    is_storage: bool
    opened_at: float
    received_at: float
    """Time of the last chunk that was read from it, or `opened_at`."""
    starved_at: float = -math.inf
    """Last time at which it had none of its assigned chunks yet."""
    is_dropped: bool = False
    """True if the newest plan assigns it nothing: it is closed after its last read."""
    activity: events.SourceActivity | None = None
    """Its last known activity, from the newest tick."""
    storage: events.StorageOpened | None = None
    """Description of local storage, once it is open."""
    compared: dict[int, bytes] = field(default_factory=dict)
    """Digests that its files were compared with."""
    is_joined: bool = False
    """True for own storage that is read besides peers, without a plan."""
    reads: SourceReads[int] = field(default_factory=SourceReads)
    """Its reads in flight, by chunk."""


class _Spool:
    """Reading of the spool of a previous process, one chunk at a time."""

    def __init__(self, records: Mapping[int, bytes] | None) -> None:
        self.records = dict(records or {})
        self.finished = records is None
        """True if nothing is read from it any more."""
        self.reading: ChunkRead | None = None
        self.began_at = 0.0
        """Time at which the read in progress began."""
        self.reserved_at = math.inf
        self.bytes_before = self.fetched_before = 0
        """Bytes read from the spool, and from the sources, before the reservation."""
        self.bytes_read = 0
        self.fetch_rate = 0.0
        """Maximum bytes per second of all sources together since the reservation."""
        self.seconds = 0.0


class TransferMachine:
    """The transfer of one fork. Call `start` once, then `handle` for each event until the action `Finish`.

    `wake_at` is when the next `Tick` is due. Times are those of one monotonic clock, in seconds.
    """

    def __init__(
        self,
        layout: Layout,
        settings: InstanceSettings,
        *,
        instance_id: str,
        deadline_at: float,
        spool_records: Mapping[int, bytes] | None = None,
        own_storage: StorageScope | None = None,
    ) -> None:
        """`spool_records` are the digests by chunk of the spool; None: there is no spool. `own_storage` is read while
        peers are slow; None: only if a plan names it.
        """
        self.deadline_at = deadline_at
        """Deadline of the fork. It is extended while this instance reads its own storage for waiting instances
        and makes progress: starting over elsewhere would take longer.
        """
        self.finished = False
        self.reasons: list[RforkError] = []
        """Each failure of a source so far, in order."""
        self.bytes_read = 0
        """Bytes of the chunks that have arrived, valid or not."""
        self._settings = settings
        self._instance_id = instance_id
        self._layout_id = layout.layout_id
        self._chunks = layout.chunks
        self._actions: list[Action] = []
        self._scheduler = ChunkScheduler(len(layout.chunks))
        self._verifier = ChunkVerifier(layout, self._scheduler, self._actions.append)
        self._concurrency = ReadConcurrency(settings.max_inflight_chunks)
        self._spool = _Spool(spool_records)
        self._loader: StorageAssignment | None = None
        self._loader_running = False
        self._loader_bytes = 0

        self._sources: dict[int, _Source] = {}
        """Every source opened so far, by connection."""
        self._active: dict[str, _Source] = {}
        """The open sources, by source id."""
        self._failures: dict[str, int] = {}
        self._faults: list[SourceFault] = []
        """Faults that were not yet reported to the planner."""
        self._shares: dict[str, SourceShare] = {}
        self._storage_activity: tuple[float, bool] | None = None
        self._peer_reads: SourceReads[tuple[int, int]] = SourceReads()
        """Reads in flight from all peers, by connection and chunk."""

        self._own_load = OwnLoadMonitor(own_storage)

        self._plans = 0
        self._requested: tuple[SourceFault, ...] | None = None
        """The faults in the plan request in progress; None: there is none."""
        self._replan_reason: str | None = None
        self._retry_at = 0.0
        self._no_source_since: float | None = None
        self._is_paused = False
        self._planned_weights_id: str | None = None
        self._planned_version: str | None = None
        self._version: str | None = None
        """Version that the instance was last named to adopt."""
        self._abandoned_weights_id: str | None = None
        """The weights_id of the weights dropped since the plan."""

        self._complete_since: float | None = None
        self._tick_at = self._timeouts_apply_from = -math.inf
        self._was_suspended = False

    # -- interface --------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """Return the first actions."""
        self._tick_at = now
        self._advance(now)
        return self._pop_actions()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Return the actions that follow from an event. After `Finish`, events have no effect."""
        if not self.finished:
            self._dispatch(event, now)
            self._advance(now)
        return self._pop_actions()

    def wake_at(self, now: float) -> float:
        """Return when the next `Tick` is due."""
        times = [max(self._tick_at, now - POLL_INTERVAL_S) + POLL_INTERVAL_S]
        if not self._loader_running:
            times.append(self.deadline_at)
        if self._plan_is_due and self._requested is None and self._loader is None:
            times.append(self._retry_at)
        if (since := self._own_load.first_sample_since) is not None and self._tick_at < since + POLL_INTERVAL_S:
            times.append(since + POLL_INTERVAL_S)
        return min(times)

    @property
    def stats(self) -> TransferStats:
        """Statistics so far, also of a failed transfer."""
        repeated = sum(
            times * (self._chunks[chunk][1] - self._chunks[chunk][0])
            for chunk, times in self._scheduler.rereads.items()
        )
        shares = sorted(self._shares.values(), key=lambda share: -share.verified_bytes)
        return TransferStats(
            self.bytes_read,
            repeated,
            max(0, self._plans - 1),
            tuple(shares),
            resume_s=self._spool.seconds,
            loader_bytes=self._loader_bytes,
            joined_storage=next((each.source_id for each in self._sources.values() if each.is_joined), None),
        )

    def active_rates(self, now: float) -> ActiveRates:
        """Return the rates of the open peers while chunks were being read from them."""
        rates = {
            source.source_id: source.reads.bytes_per_s(now) for source in self._active.values() if not source.is_storage
        }
        return ActiveRates(
            self._peer_reads.bytes_per_s(now), {name: rate for name, rate in rates.items() if rate is not None}
        )

    def _pop_actions(self) -> list[Action]:
        actions = self._actions.copy()
        self._actions.clear()
        return actions

    def _emit(self, action: Action) -> None:
        self._actions.append(action)

    # -- events -----------------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case events.Tick():
                self._tick(event, now)
            case events.PlanReceived(plan):
                self._receive_plan(plan, _no_source(plan.reason), now)
            case events.PlanFailed(error):
                self._receive_plan(None, error, now)
            case events.ReplanSuggested(reason):
                if self._replan_reason is None:
                    log.info("requesting a new plan", reason=reason)
                self._replan_reason = reason
            case events.LeasesRenewed(leases):
                for source_id, lease in leases.items():
                    source = self._active.get(source_id)
                    if source is not None and not source.is_storage:
                        self._emit(events.RenewLease(source.connection, lease))
            case events.ChunkReceived(connection, chunk, seconds):
                self._chunk_received(self._sources[connection], chunk, seconds, now)
            case events.ChunkDigested(connection, chunk, digest):
                self._chunk_digested(self._sources[connection], chunk, digest, now)
            case events.ReadFailed(connection, chunk, error):
                source = self._sources[connection]
                source.reads.failed(chunk, now)
                self._peer_reads.failed((connection, chunk), now)
                self._scheduler.dropped(ChunkRead(source.source_id, chunk))
                self._fail(source, error, now)
            case events.KeptChunkDigested(chunk, digest):
                self._finish_local(ChunkRead(KEPT_SOURCE_ID, chunk), digest)
            case events.SpoolChunkRead(chunk, digest, seconds):
                self._spool_chunk_read(chunk, digest, seconds)
            case events.SpoolFailed():
                self._stop_spool()
            case events.OwnLoadMeasured(own_load):
                self._own_load.measured(own_load)
                self._compare_own_load(now)
            case events.LoaderFinished(assignment, manifest):
                self._loader_running, self._loader = False, None
                self._loader_finished(assignment, manifest)
            case events.LoaderFailed(assignment, error):
                self._loader_running, self._loader = False, None
                self._record_storage_fault(storage_name(assignment.kind, assignment.uri), error)
                self._retry_at = now + FIRST_RETRY_S
            case _:
                source = self._sources[event.connection]
                # Events of a source that was closed meanwhile have no effect.
                if self._active.get(source.source_id) is source:
                    try:
                        self._source_event(source, event, now)
                    except RforkError as error:
                        self._fail(source, error, now)

    def _source_event(
        self,
        source: _Source,
        event: SourceEvent,
        now: float,
    ) -> None:
        """Handle an event of an open source. Raises the error that ends the source."""
        match event:
            case events.SourceConnected():
                source.transport = event.transport
            case events.TransportRefused():
                self._record_refused_transport(event.error)
            case events.ManifestReceived():
                self._set_manifest(source, event.manifest, now)
            case events.ProvisionalDigests():
                others = any(
                    self._scheduler.has_assigned(name) for name in self._active if self._active[name] is not source
                )
                self._verifier.add_provisional_digests(
                    source.connection, event.provisional_id, event.digests, alone=not others
                )
            case events.ChunksOffered():
                self._scheduler.mark_available(source.source_id, event.chunks)
            case events.StorageOpened():
                self._storage_opened(source, event, now)
            case events.FilesCompared():
                self._files_compared(source, event.digests, agrees=event.agrees)
            case events.SourceFailed():
                raise event.error
            case _:
                assert_never(event)

    # -- progress ---------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Do what the state allows: end, request a plan, start reads. While a loader runs, nothing does."""
        if self.finished or self._loader_running:
            return
        if self._scheduler.complete and self._verifier.finalize_manifest():
            self._finish(None)
        elif now >= self.deadline_at:
            verified = len(self._scheduler.verified_chunks)
            self._finish(
                DeadlineExceeded(
                    f"the deadline passed with {verified} of {len(self._chunks)} chunks verified",
                    hint="find what slowed the sources down (`rfork explain`), or raise RFORK_DEADLINE_S",
                )
            )
        elif self._loader is not None:
            if not self._scheduler.in_flight:
                self._loader_running = True
                self._verifier.invalidate_all("a loader overwrites them")
                self._emit(events.RunLoader(self._loader))
        else:
            self._close_dropped()
            self._confirm_complete(now)
            self._start_spool_read(now)
            self._lend_to_own_storage()
            self._replace_overdue_reads(now)
            self._start_reads(now)
            if self._plan_is_due and self._requested is None and now >= self._retry_at:
                self._requested = tuple(self._faults)
                self._emit(events.RequestPlan(self._requested, self._current_assignments))

    def _finish(self, error: RforkError | None) -> None:
        self.finished = True
        self._emit(events.Finish(error))

    def _confirm_complete(self, now: float) -> None:
        """Handle chunks that are all verified, but not yet known to belong together.

        The source that reads the storage will confirm it; without one, some chunks are read again.
        """
        if not self._scheduler.complete:
            self._complete_since = None
            return
        self._complete_since = now if self._complete_since is None else self._complete_since
        if not self._active or now - self._complete_since > 3 * self._settings.source_idle_timeout_s:
            self._complete_since = None
            self._verifier.invalidate_unconfirmed()

    def _tick(self, tick: events.Tick, now: float) -> None:
        for source in self._active.values():
            source.activity = tick.activity.get(source.connection, source.activity)
        self._extend_deadline()
        if not self._timeouts_apply(now):
            self._own_load.discard_rates()
        elif now < self.deadline_at:
            self._check_spool(tick, now)
            self._fail_stalled(now)
            self._find_stragglers(now)
            self._compare_own_load(now)
        self._spool.bytes_read = tick.spool_bytes
        self._report_storage_activity()

    def _timeouts_apply(self, now: float) -> bool:
        """Return whether silence counts: not right after this process was suspended.

        Its threads first need a moment to process what the sources sent meanwhile.
        """
        late, self._tick_at = SUSPEND_THRESHOLD_S < now - self._tick_at < math.inf, now
        if late and not self._was_suspended:
            self._was_suspended, self._timeouts_apply_from = True, now + POLL_INTERVAL_S
        if now < self._timeouts_apply_from:
            return False
        self._was_suspended = False
        return True

    def _was_suspended_recently(self, now: float) -> bool:
        return now - self._tick_at > SUSPEND_THRESHOLD_S or now < self._timeouts_apply_from

    # -- plans ------------------------------------------------------------------------------------------

    @property
    def _plan_is_due(self) -> bool:
        return not self._scheduler.complete and (self._scheduler.unassigned or self._replan_reason is not None)

    def _receive_plan(self, plan: Plan | None, refusal: RforkError, now: float) -> None:
        """Follow a plan, or decide when to request the next one; `refusal` is the error if there is none."""
        if plan is not None:
            del self._faults[: len(self._requested or ())]
        self._requested = None
        if plan is not None and plan.is_paused:
            self._pause(plan, now)
            return
        loader = next((read for read in plan.storage if read.kind == "loader"), None) if plan else None
        if plan is not None and loader is not None and not self._scheduler.complete:
            self._adopt_version(plan)
            self._plans += 1
            self._replan_reason = self._no_source_since = None
            self._prepare_loader(loader)
            return
        if plan is not None and (plan.routes or plan.storage) and not self._is_stale(plan):
            if self._is_other_version(plan):
                if self._scheduler.in_flight:
                    self._retry_at = now + MIN_REPLAN_INTERVAL_S  # those reads must not count for the next weights
                    return
                self._restart()
            self._adopt_version(plan)
            self._plans += 1
            self._is_paused = False
            self._replan_reason = self._no_source_since = None
            self._apply_plan(plan, now)
            retry_s = plan.retry_after_s if self._scheduler.unassigned else MIN_REPLAN_INTERVAL_S
            self._retry_at = now + max(MIN_REPLAN_INTERVAL_S, PARTIAL_PLAN_RETRY_S if retry_s is None else retry_s)
            return
        if self._scheduler.in_flight or self._has_work or not self._scheduler.unassigned:
            self._retry_at = now + PARTIAL_PLAN_RETRY_S  # other sources still serve, so this is not urgent
            return
        if plan is not None and not self._scheduler.verified_chunks:
            self._adopt_version(plan)
        retry_s = plan.retry_after_s if plan is not None else FIRST_RETRY_S
        changing = self._weights_changing
        if changing and retry_s is None and self._restart():
            return  # the next request accepts any weights
        self._no_source_since = now if self._no_source_since is None else self._no_source_since
        was_planned = self._plans > 0 or self._is_paused
        should_retry = changing or (retry_s is not None and (plan is not None or was_planned))
        if not should_retry or now - self._no_source_since >= self._settings.no_source_timeout_s:
            self._finish(refusal)
        else:
            self._retry_at = now + (retry_s or FIRST_RETRY_S)

    def _adopt_version(self, plan: Plan) -> None:
        """Name the weights as a plan does, once it is followed: what was read until then has the previous version."""
        if plan.version is not None and plan.version != self._version:
            self._version = plan.version
            self._emit(events.AdoptVersion(plan.version))

    def _pause(self, plan: Plan, now: float) -> None:
        """Read nothing more over the network until the next plan: this fork is a prefetch, and engines need the link.

        Chunks in flight are still received. Waiting is no failure, however long it takes.
        """
        if not self._is_paused:
            log.info("prefetch paused", reason=plan.reason)
        self._is_paused = True
        self._replan_reason = self._no_source_since = None
        self._retry_at = now + (plan.retry_after_s or FIRST_RETRY_S)
        joined, own = self._joined, self._own_load.own
        if joined is not None and (own is None or not own.is_local):
            self._close(joined)
            joined = None
        kept = self._scheduler.shares.get(joined.source_id, ()) if joined is not None else ()
        self._assign({joined.source_id: kept} if joined is not None else {})
        self._own_load.discard_rates()

    def _assign(self, chunks: Mapping[str, tuple[Range, ...]]) -> None:
        """Assign chunks by source; nothing more is read from the other sources, except from joined storage."""
        self._scheduler.assign(chunks)
        for name, source in self._active.items():
            is_used = name in chunks and self._scheduler.has_assigned(name)
            source.is_dropped = not (is_used or source.is_joined)
        self._close_dropped()

    def _close_dropped(self) -> None:
        """Close the sources that the newest plan assigns nothing, once their last read has ended."""
        for name, source in list(self._active.items()):
            if source.is_dropped and not self._scheduler.has_assigned(name):
                self._close(source)

    def _apply_plan(self, plan: Plan, now: float) -> None:
        """Keep or open the sources that a plan names, and close those without assigned chunks."""
        self._planned_weights_id, self._planned_version = plan.weights_id, plan.version
        self._abandoned_weights_id = None
        self._own_load.reported_s = plan.own_load_s
        assigned: dict[str, tuple[Range, ...]] = {}
        for route in plan.routes:
            source = self._active.get(route.source_id)
            if source is not None and not source.is_storage:
                self._emit(events.RenewLease(source.connection, route.lease))
            else:
                self._open_peer(route, now)
                self._own_load.peer_opened(now, self.bytes_read)
            assigned[route.source_id] = route.chunks
        for read in plan.storage:
            name = storage_name(read.kind, read.uri)
            if name not in self._active:
                self._open_storage(name, read, now)
            self._active[name].is_joined = False
            assigned[name] = ranges.normalise((*assigned.get(name, ()), *read.chunks))
        self._assign(assigned)
        log.info(
            "plan received",
            fork=plan.fork_id,
            routes={route.source_id[:8]: format_ranges(route.chunks) for route in plan.routes},
            storage={storage_name(read.kind, read.uri): format_ranges(read.chunks) for read in plan.storage},
            reason=plan.reason,
        )

    @property
    def _current_assignments(self) -> tuple[ChunkAssignment, ...]:
        """Chunks by source under the current plan; this instance's own id stands for its storage."""
        chunks: dict[str, tuple[Range, ...]] = {}
        for source_id, part in self._scheduler.shares.items():
            if (source := self._active.get(source_id)) is not None and not source.is_joined:
                before = chunks.get(source.instance_id, ())
                chunks[source.instance_id] = ranges.normalise((*before, *part))
        return tuple(ChunkAssignment(source_id=name, chunks=part) for name, part in chunks.items())

    @property
    def _has_work(self) -> bool:
        """True if an open source has assigned chunks."""
        return any(self._scheduler.has_assigned(source_id) for source_id in self._active)

    # -- changing weights -------------------------------------------------------------------------------

    @property
    def _weights_changing(self) -> bool:
        """True if the weights are changing at their source, which will soon serve others."""
        known = (
            self._verifier.manifest is not None
            or self._planned_weights_id is not None
            or self._abandoned_weights_id is not None
        )
        failures = (each for each in reversed(self.reasons) if not isinstance(each, TransportUnavailable))
        return known and isinstance(next(failures, None), SourceWeightsChanged)

    def _restart(self) -> bool:
        """Drop weights that no source serves any more; returns whether any were begun."""
        manifest = self._verifier.manifest
        if manifest is None:
            return False
        if (joined := self._joined) is not None:
            self._close(joined)
        self._abandoned_weights_id = manifest.weights_id
        if chunks := self._verifier.restart():
            log.warning(
                "weights changed at the source, starting over", chunks=chunks, weights_id=self._abandoned_weights_id
            )
            self.reasons.append(
                SourceWeightsChanged(
                    f"the weights changed at the source: started over, {chunks} chunks are compared again"
                )
            )
        return True

    def _is_other_version(self, plan: Plan) -> bool:
        """Return whether a plan has other weights than those that were begun."""
        manifest = self._verifier.manifest
        if manifest is None:
            return False
        if plan.weights_id is None:
            return plan.version != self._planned_version
        return plan.weights_id != manifest.weights_id

    def _is_stale(self, plan: Plan) -> bool:
        """Return whether a plan names the dropped weights, and only sources that have yet to drop them too.

        Sources that together have all chunks are valid: the weights were changed back.
        """
        parts = [part for route in plan.routes for part in route.chunks]
        parts += [part for read in plan.storage for part in read.chunks]
        partial = ranges.count(ranges.normalise(parts)) < len(self._chunks)
        return plan.weights_id is not None and plan.weights_id == self._abandoned_weights_id and partial

    def _set_manifest(self, source: _Source, manifest: Manifest, now: float) -> None:
        """Check the manifest of a source: all sources must have the weights that the first one named."""
        if manifest.layout.layout_id != self._layout_id:
            raise LayoutMismatch(f"{source.address}: the manifest has another layout than the image")
        known = self._verifier.manifest
        begun = bool(self._scheduler.verified_chunks) or self._scheduler.in_flight > 0
        expected = known.weights_id if known is not None and begun else self._planned_weights_id
        if expected not in (None, manifest.weights_id):
            raise SourceWeightsChanged(
                f"{source.address}: the source has weights {manifest.weights_id}, but this fork reads {expected}"
            )
        self._verifier.set_manifest(manifest)
        if known is None or known.weights_id != manifest.weights_id:
            self._reserve_spooled(manifest, now)

    # -- sources ----------------------------------------------------------------------------------------

    def _open_peer(self, route: Route, now: float) -> None:
        source = self._add(route.source_id, route.source_id, route.placement.host, route.address, "", now)
        self._emit(events.OpenPeer(source.connection, route))

    def _open_storage(self, name: str, read: StorageAssignment, now: float) -> None:
        source = self._add(name, self._instance_id, self._settings.node_name, name, read.kind, now)
        source.is_storage = True
        self._emit(events.OpenStorage(source.connection, read))

    def _add(self, source_id: str, instance_id: str, host: str, address: str, transport: str, now: float) -> _Source:
        # Chunks that an earlier connection to this source offered are void: nothing can be read until this
        # one is open.
        self._scheduler.fail(source_id)
        source = _Source(len(self._sources), source_id, instance_id, host, address, transport, False, now, now)
        self._sources[source.connection] = self._active[source_id] = source
        return source

    def _close(self, source: _Source, error: RforkError | None = None) -> None:
        self._scheduler.fail(source.source_id)
        del self._active[source.source_id]
        self._verifier.remove_source(source.connection)
        self._emit(events.CloseSource(source.connection, error))

    def _fail(self, source: _Source, error: RforkError, now: float) -> None:
        """Give up on a source, and record its fault for the planner. After the deadline, no source is blamed."""
        if self._active.get(source.source_id) is not source or now >= self.deadline_at:
            return
        if isinstance(error, SourceTimeout | SourceUnavailable) and self._was_suspended_recently(now):
            error = TargetError(f"{error} while this process was suspended")
        self._close(source, error)
        if source.is_joined:  # no other instance waits for it, so the planner need not know
            self._own_load.stop()
            log.warning("own storage failed, reading from the sources", error=error.kind, detail=str(error))
            self.reasons.append(error)
            self._emit(events.ExcludeStorage(source.source_id))
            return
        if source.is_storage:
            self._record_storage_fault(source.source_id, error)
            return
        failures = self._failures[source.source_id] = self._failures.get(source.source_id, 0) + 1
        fault = error.fault if error.fault == "source" or failures < MAX_FAILURES else "network"
        if fault == "target":
            # The next plan may name it again: it gets longer each time, for example to reach its planner.
            self._retry_at = max(self._retry_at, now + MIN_REPLAN_INTERVAL_S * RETRY_GROWTH ** (failures - 1))
        self._record_fault(source.source_id, source.instance_id, fault, error)

    def _record_storage_fault(self, name: str, error: RforkError) -> None:
        """Record that this instance cannot read the storage of that name: another instance must, or it reads
        other storage.
        """
        self._emit(events.ExcludeStorage(name))
        self._record_fault(name, self._instance_id, "storage", error)

    def _record_fault(self, name: str, instance_id: str, fault: Fault, error: RforkError) -> None:
        log.warning("source failed", source=short_id(name), error=error.kind, detail=str(error))
        self.reasons.append(error)
        self._faults.append(
            SourceFault(instance_id=instance_id, fault=fault, error=error.kind, detail=str(error)[:MAX_FAULT_DETAIL])
        )

    def _record_refused_transport(self, error: TransportUnavailable) -> None:
        """Record once that a transport cannot be used with a source that other targets reach."""
        if all(str(error) != str(each) for each in self.reasons):
            self.reasons.append(error)

    def _fail_stalled(self, now: float) -> None:
        """Give up on sources that have assigned chunks and are silent or make no progress."""
        for source in list(self._active.values()):
            if source.activity is not None and self._scheduler.has_assigned(source.source_id):
                starved = self._scheduler.is_starved(source.source_id)
                stall = find_stall(
                    replace(source.activity, progress_at=max(source.activity.progress_at, source.received_at)),
                    self._settings,
                    now,
                    is_storage=source.is_storage,
                    starved=starved,
                )
                if source.is_joined and source.activity.idle_s > OWN_STORAGE_IDLE_TIMEOUT_S:
                    stall = f"no data for {source.activity.idle_s:.1f} s"
                if stall is not None:
                    error = StorageError if source.is_storage else SourceTimeout
                    self._fail(source, error(f"{source.address}: {stall}"), now)

    def _find_stragglers(self, now: float) -> None:
        """Find the sources that serve nothing while others do.

        After `MOVE_AFTER_S`, other sources may serve their chunks. After `CONNECT_TIMEOUT_S`, a source is
        given up if its remaining chunks cannot be moved because they are being read from it: the other
        sources can serve all of them. A relay that has yet to receive its chunks is not silent.
        """
        silent = {
            name: source
            for name, source in self._active.items()
            if not source.is_storage
            and (source.activity is None or source.activity.has_no_bytes)
            and now - source.opened_at >= MOVE_AFTER_S
        }
        joined = self._joined
        others = [
            name
            for name, source in self._active.items()
            if name not in silent and name in self._shares and source is not joined
        ]
        # Idle peers may also read the chunks that own storage has not begun.
        self._scheduler.late = frozenset(silent if others else ()) | ({joined.source_id} if joined else frozenset())
        if others and not any(self._scheduler.has_assigned(name) for name in others):
            for name, source in silent.items():
                if source.transport and self._scheduler.is_starved(name):
                    source.starved_at = now
                since = max(source.opened_at, source.starved_at)
                if self._scheduler.has_assigned(name) and now - since >= CONNECT_TIMEOUT_S:
                    detail = f"{source.address}: no byte received within {CONNECT_TIMEOUT_S:g} s"
                    self._fail(source, SourceUnreachable(detail), now)

    def _report_storage_activity(self) -> None:
        """Report a change of the last activity of any storage with assigned chunks, local or upstream."""
        found = [
            (source.activity.storage_at, not source.is_storage)
            for name, source in self._active.items()
            if source.activity is not None
            and source.activity.storage_at is not None
            and not source.is_joined
            and self._scheduler.has_assigned(name)
        ]
        activity = max(found, default=None)
        if activity != self._storage_activity:
            self._storage_activity = activity
            active_at, relayed = activity or (None, False)
            self._emit(events.ReportStorageActivity(active_at, relayed))

    def _extend_deadline(self) -> None:
        for name, source in self._active.items():
            block_at = source.activity.block_at if source.activity is not None else None
            if block_at is not None and self._scheduler.has_assigned(name):
                self.deadline_at = max(self.deadline_at, block_at + self._settings.storage_idle_timeout_s)

    # -- local storage ----------------------------------------------------------------------------------

    def _storage_opened(self, source: _Source, opened: events.StorageOpened, now: float) -> None:
        """Follow the manifest of the storage, or compare its files with the chunks that are verified."""
        source.storage = opened
        if source.is_joined:
            self._offer_own_storage(source, opened)
        elif opened.manifest is not None:
            self._set_manifest(source, opened.manifest, now)
            self._offer_all(source)
        elif opened.origin is None:
            raise StorageError(f"{source.address}: neither its manifest nor its origin is known")
        elif digests := self._verifier.digests_to_compare():
            self._emit(events.CompareFiles(source.connection, digests))
        else:
            self._files_compared(source, {}, agrees=True)

    def _files_compared(self, source: _Source, digests: Mapping[int, bytes], *, agrees: bool) -> None:
        opened = source.storage
        if opened is None or opened.origin is None:
            raise SourceUnavailable(f"{source.address}: its files were compared before they were opened")
        source.compared |= digests
        # Chunks that peers have served meanwhile are compared too.
        left = self._verifier.verify_local_files(
            source.connection, opened.origin, source.compared, agrees=agrees, unique_id=opened.unique_id
        )
        if left:
            self._emit(events.CompareFiles(source.connection, left))
        else:
            self._offer_all(source)

    def _offer_all(self, source: _Source) -> None:
        self._scheduler.mark_available(source.source_id, ((0, len(self._chunks)),))

    # -- own storage besides peers ----------------------------------------------------------------------

    @property
    def _joined(self) -> _Source | None:
        return next((source for source in self._active.values() if source.is_joined), None)

    def _compare_own_load(self, now: float) -> None:
        """Measure own storage while peers are slow, read it too, or abandon the fork for it."""
        if not self._own_load.is_active or self._loader is not None or self._is_paused:
            return
        self._own_load.add(now, self.bytes_read + self._expected_in_flight(now))
        if any(source.is_storage for source in self._active.values()):
            return
        verified_bytes = sum(self._size(chunk) for chunk in self._scheduler.verified_chunks)
        activities = [source.activity for source in self._active.values()]
        step, comparison = self._own_load.step(
            now,
            self._chunks.image_bytes - verified_bytes,
            has_manifest=self._verifier.manifest is not None,
            is_upstream_reading=any(each is not None and each.storage_at is not None for each in activities),
        )
        match step:
            case "measure":
                self._emit(events.MeasureOwnLoad())
            case "join":
                self._join_own_storage(comparison, now)
            case "abandon":
                self._finish(SlowSources(f"the fork was abandoned: {comparison}", hint=SLOW_SOURCES_HINT))

    def _expected_in_flight(self, now: float) -> float:
        """Return the bytes of the chunks in flight that have arrived, if their reads take as long as others did."""
        return sum(source.reads.expected_bytes(now) for source in self._active.values())

    def _size(self, chunk: int) -> int:
        begin, end = self._chunks[chunk]
        return end - begin

    def _join_own_storage(self, comparison: str, now: float) -> None:
        own = self._own_load.own
        if own is None or own.storage is None:
            return
        log.info("reading own storage besides the sources", storage=own.name, reason=comparison)
        self.reasons.append(SlowSources(f"own storage is read too: {comparison}", hint=SLOW_SOURCES_HINT))
        name = storage_name(own.storage.kind, own.storage.uri)
        self._open_storage(name, own.storage, now)
        self._active[name].is_joined = True

    def _offer_own_storage(self, source: _Source, opened: events.StorageOpened) -> None:
        """Let own storage serve chunks: each is verified against the manifest, so its files need no comparison."""
        manifest = self._verifier.manifest
        if manifest is None:
            raise StorageError(f"{source.address}: the manifest to verify it against is not known any more")
        if opened.manifest is not None and opened.manifest.weights_id != manifest.weights_id:
            raise StorageError(f"{source.address}: contains other weights than {manifest.weights_id}")
        self._offer_all(source)

    def _lend_to_own_storage(self) -> None:
        """Assign own storage chunks that no source has begun, as many as it reads ahead."""
        source = self._joined
        if source is None or source.storage is None or self._verifier.manifest is None:
            return
        self._scheduler.lend(source.source_id, OWN_STORAGE_READS + source.storage.prefetch_chunks)

    def _replace_overdue_reads(self, now: float) -> None:
        """Close peers whose reads in flight own storage would complete much sooner, once it has nothing else to read.

        No fault is reported: the peer is only slow.
        """
        joined, own = self._joined, self._own_load.own
        if joined is None or joined.storage is None or own is None or self._was_suspended_recently(now):
            return
        if self._scheduler.has_assigned(joined.source_id):
            return
        for source in list(self._active.values()):
            reads = source.reads.in_flight.values()
            if source.is_joined or not reads:
                continue
            own_s = sum(read.chunk_bytes for read in reads) / own.bytes_per_s
            age_s = now - min(read.began_at for read in reads)
            if is_overdue(age_s, source.reads.chunk_s, own_s):
                error = SlowSources(
                    f"{source.address}: {len(reads)} chunks in flight for {age_s:.1f} s, read from {own.name}"
                )
                log.info("source is slower than own storage", source=short_id(source.source_id), seconds=age_s)
                self.reasons.append(error)
                self._scheduler.transfer(source.source_id, joined.source_id)
                self._close(source, error)

    # -- reads ------------------------------------------------------------------------------------------

    def _start_reads(self, now: float) -> None:
        joined = self._joined
        joined_id = joined.source_id if joined is not None else None
        reads: list[ChunkRead] = []
        while self._scheduler.reads_in_flight(excluded=joined_id) < self._settings.max_inflight_chunks:
            read = self._scheduler.next_read(lambda name: 0 if name == joined_id else self._max_reads(name))
            if read is None:
                break
            reads.append(read)
        while joined_id is not None:
            read = self._scheduler.next_read(lambda name: OWN_STORAGE_READS if name == joined_id else 0)
            if read is None:
                break
            reads.append(read)
        for source_id in dict.fromkeys(read.source_id for read in reads):
            source = self._active[source_id]
            if source.storage is not None:
                in_flight, upcoming = self._scheduler.upcoming(source_id, source.storage.prefetch_chunks)
                self._emit(events.PrefetchChunks(source.connection, tuple(in_flight), tuple(upcoming)))
        for read in reads:
            size, source = self._size(read.chunk), self._active[read.source_id]
            timeout_s = self._settings.source_idle_timeout_s + size / self._settings.min_source_bytes_per_s
            source.reads.start(read.chunk, size, now)
            if not source.is_storage:
                self._peer_reads.start((source.connection, read.chunk), size, now)
            self._emit(events.ReadChunk(source.connection, read.chunk, min(now + timeout_s, self.deadline_at)))

    def _max_reads(self, source_id: str) -> int:
        """Return the maximum number of concurrent reads from a source."""
        source = self._active[source_id]
        return 0 if source.is_dropped else self._concurrency.window(source.transport)

    def _chunk_received(self, source: _Source, chunk: int, seconds: float, now: float) -> None:
        size = self._size(chunk)
        self.bytes_read += size
        source.reads.received(chunk, seconds, now)
        if source.is_joined:
            return  # its rate does not limit how many reads a peer's link needs
        if not source.is_storage:
            self._peer_reads.received((source.connection, chunk), seconds, now)
        concurrent = self._scheduler.inflight_with(ChunkRead(source.source_id, chunk))
        if source.is_storage:
            # Storage is read ahead, so a chunk takes the time since the previous one.
            seconds, concurrent = now - source.received_at, 0
        source.received_at = now
        self._concurrency.record_chunk(size, seconds, concurrent)

    def _chunk_digested(self, source: _Source, chunk: int, digest: bytes | None, now: float) -> None:
        read = ChunkRead(source.source_id, chunk)
        error: RforkError
        try:
            verified_digest = self._verifier.check(source.connection, chunk, digest)
        except WrongDigest as wrong:
            error = (StorageError if source.is_storage else SourceCorrupt)(f"{source.address}: {wrong}")
        except RforkError as unverifiable:
            error = unverifiable
        else:
            self._verifier.mark_verified(chunk, verified_digest, from_local_files=source.is_storage)
            self._scheduler.verified(read)
            self._count_verified(source.source_id, source.host, source.transport, chunk)
            return
        self._scheduler.dropped(read)
        self._fail(source, error, now)

    def _count_verified(self, source_id: str, host: str, transport: str, *chunks: int) -> None:
        share = self._shares.get(source_id) or SourceShare(source_id, host, transport, 0, 0)
        self._shares[source_id] = replace(
            share,
            transport=transport,
            verified_chunks=share.verified_chunks + len(chunks),
            verified_bytes=share.verified_bytes + sum(self._chunks[each][1] - self._chunks[each][0] for each in chunks),
        )

    def _finish_local(self, read: ChunkRead, digest: bytes | None) -> bool:
        """Handle the digest of a chunk that no source served; returns whether the manifest has it."""
        manifest = self._verifier.manifest  # it may have changed since the chunk was begun
        is_right = digest is not None and manifest is not None and manifest.digests[read.chunk] == digest
        if is_right:
            self._verifier.mark_verified(read.chunk, digest)
            self._scheduler.verified(read)
        else:
            self._scheduler.dropped(read)
        return is_right

    # -- the spool --------------------------------------------------------------------------------------

    def _reserve_spooled(self, manifest: Manifest, now: float) -> None:
        """Reserve the chunks of this manifest that the spool contains; none was offered under it yet."""
        spool = self._spool
        if spool.finished:
            return
        candidates = [
            chunk
            for chunk, digest in sorted(spool.records.items())
            if digest == manifest.digests[chunk] and chunk not in self._scheduler.verified_chunks
        ]
        if candidates:
            log.info("loading chunks kept by a previous process", chunks=len(candidates), of=len(self._chunks))
            spool.reserved_at, spool.fetch_rate = now, 0.0
            spool.bytes_before, spool.fetched_before = spool.bytes_read, self.bytes_read
            self._scheduler.reserve(RESUME_SOURCE_ID, candidates)

    def _start_spool_read(self, now: float) -> None:
        spool, manifest = self._spool, self._verifier.manifest
        if spool.finished or spool.reading is not None or manifest is None:
            return
        spool.reading = self._scheduler.next_reserved()
        if spool.reading is not None:
            spool.began_at = now
            self._emit(events.ReadSpool(spool.reading.chunk, manifest.digests[spool.reading.chunk]))

    def _spool_chunk_read(self, chunk: int, digest: bytes | None, seconds: float) -> None:
        spool = self._spool
        if spool.reading is None:
            return  # it was stopped meanwhile
        read, spool.reading = spool.reading, None
        spool.seconds += seconds
        if self._finish_local(read, digest):
            self._count_verified(RESUME_SOURCE_ID, self._settings.node_name, "file", chunk)
        else:
            log.info("kept chunk invalid, reading it from the sources", chunk=chunk)
            spool.records.pop(chunk, None)
            self._scheduler.unreserve([chunk])

    def _check_spool(self, tick: events.Tick, now: float) -> None:
        """Give up on a disk that delivers nothing, and leave what it delivers too late to the sources."""
        spool = self._spool
        if spool.reading is not None:
            idle_s = now - max(spool.began_at, tick.spool_at)
            if idle_s > self._settings.source_idle_timeout_s:
                log.warning("disk of the kept chunks stalled, reading from the sources", seconds=round(idle_s, 1))
                self._stop_spool()
                return
        seconds = now - spool.reserved_at
        if seconds < SPOOL_WARMUP_S:
            return
        spool.fetch_rate = max(spool.fetch_rate, (self.bytes_read - spool.fetched_before) / seconds)
        if spool.fetch_rate:
            # A fork is then no slower than without a spool, and a fast disk relieves the sources.
            left_s = self._chunks.image_bytes / spool.fetch_rate - seconds
            loaded = tick.spool_bytes - spool.bytes_before
            max_chunks = int(max(0.0, left_s) * loaded / seconds) // self._chunks.chunk_size
            late = self._scheduler.reserved[max_chunks:]
            if late:
                log.info(
                    "disk of the kept chunks is slower than the sources, reading the rest from them", chunks=len(late)
                )
                self._scheduler.unreserve(late)

    def _stop_spool(self) -> None:
        """Leave all reserved chunks to the sources."""
        spool = self._spool
        if spool.finished:
            return
        spool.finished = True
        self._emit(events.StopSpool())
        if spool.reading is not None:
            self._scheduler.dropped(spool.reading)
            spool.reading = None
        self._scheduler.unreserve()

    # -- the loader -------------------------------------------------------------------------------------

    def _prepare_loader(self, read: StorageAssignment) -> None:
        """Close everything else that writes to the image; the loader starts once no read is in flight."""
        log.info("loading for all waiting instances", storage=storage_name(read.kind, read.uri))
        self._loader = read
        self._stop_spool()
        for source in list(self._active.values()):
            self._close(source)
        self._report_storage_activity()

    def _loader_finished(self, read: StorageAssignment, manifest: Manifest) -> None:
        self._scheduler.mark_all_verified()
        self._verifier.set_manifest(manifest)
        for chunk, digest in enumerate(manifest.digests):
            self._verifier.mark_verified(chunk, digest)
        self._loader_bytes += self._chunks.image_bytes
        self.bytes_read += self._chunks.image_bytes
        name = storage_name(read.kind, read.uri)
        self._count_verified(name, self._settings.node_name, read.kind, *range(len(self._chunks)))


def find_stall(
    activity: events.SourceActivity, settings: InstanceSettings, now: float, *, is_storage: bool, starved: bool
) -> str | None:
    """Return why a source counts as stalled at `now`, otherwise None. `starved`: it has assigned chunks, but
    none that is readable or being read.

    A peer's silence (not even a keep-alive) counts after `source_idle_timeout_s`; a relay that is alive but
    offers nothing new after three times that, since it may be waiting for its own source. While storage is
    read, by the peer or one that it waits for, only the storage's last activity counts: it has stalled
    `storage_idle_timeout_s` later, and a relay then has `source_idle_timeout_s` more to find another source.
    Connecting has its own deadline, during which none of this counts. Local storage has stalled if its readers
    have waited `storage_idle_timeout_s` for a block: another instance must then read.
    """
    idle_timeout_s = settings.source_idle_timeout_s
    if is_storage:
        stalled = activity.idle_s > settings.storage_idle_timeout_s
        return f"no data for {activity.idle_s:.1f} s" if stalled else None
    silent = now - max(activity.message_at, activity.progress_at, activity.connecting_until)
    if silent > idle_timeout_s:
        return f"silent for {silent:.1f} s"
    if activity.storage_at is not None:
        still = now - max(activity.progress_at, activity.storage_at)
        timeout_s = settings.storage_idle_timeout_s + (idle_timeout_s if activity.is_relay else 0.0)
        return f"its storage made no progress for {still:.1f} s" if starved and still > timeout_s else None
    idle = now - max(activity.progress_at, activity.connecting_until)
    return f"offered no new chunk for {idle:.1f} s" if starved and idle > 3 * idle_timeout_s else None


def _no_source(reason: str) -> NoSource:
    """Return the error for a plan without a source, with what to do about its reason."""
    return NoSource(reason or "the planner knows no source", hint=STATE_VERSION_HINT if UNSTATED in reason else "")


def format_ranges(parts: tuple[Range, ...]) -> str:
    """Format chunk ranges for logs: ``0-63,80-127``."""
    return ",".join(f"{begin}-{end - 1}" for begin, end in parts)
