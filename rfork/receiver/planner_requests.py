"""Requests of one fork to the planner: plans, progress reports and lease renewals. Runs on the target."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Final, Literal

from rfork.errors import (
    LayoutMismatch,
    NoSource,
    PlannerRejected,
    PlannerUnreachable,
    RforkError,
    SourceWeightsChanged,
    WrongVersion,
)
from rfork.image.chunks import ChunkState
from rfork.image.layout import Layout, tag_differences
from rfork.logs import logger
from rfork.peer.base import Dial
from rfork.planner_client.client import PlannerClient
from rfork.receiver.fallback import FallbackRunner
from rfork.receiver.report import ForkTimer, ThroughputMeter, measurable_bytes, top_rates, transports_by_source
from rfork.receiver.runner import Transfer
from rfork.receiver.sources import ForkContext
from rfork.schema import ChunkAssignment, ForkProgress, ForkRequest, Plan, Route, SourceFault
from rfork.tracing import TraceContext, current_context, use_context

log = logger(__name__)

LAYOUT_DIFF_TIMEOUT_S: Final = 2.0
"""Maximum time to find out why no seed fits: an instance that still loads does not answer, and this one could load its
own files meanwhile, for which others may wait.
"""
MAX_PLANNER_OUTAGE_S: Final = 2.0
"""Maximum planner outage before the first plan, limited by `InstanceSettings.no_source_timeout_s`. Without a
planner, this delays the fallback, plus the duration of the last call: none if connections are refused, up to
`InstanceSettings.planner_timeout_s` if nothing responds. A planner that accepts connections and is silent
costs two of these timeouts.
"""
RETRY_INTERVAL_S: Final = 0.2
REPLICA_VERSION: Final = "replica-version"
"""Type of the planner's problem if a rank's files are not of its replica's version."""
RETRYABLE_STATUSES: Final = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
"""Statuses of a planner whose store is unavailable, that is overloaded, or that a proxy cannot reach."""
PROGRESS_INTERVAL_S: Final = 1.0
"""Interval of progress reports to the planner, after the first ones."""
FIRST_PROGRESS_INTERVAL_S: Final = 0.5
FIRST_PROGRESS_REPORTS: Final = 4
MAX_FIRST_PROGRESS_REPORTS: Final = 20
"""Numbers of reports, with chunks and in total, until that interval ends: two in a row show a slow link, soon after the
first chunk.
"""
POLL_INTERVAL_S: Final = PROGRESS_INTERVAL_S / 4
"""Interval of measurements and of the caller's callback."""

OnProgress = Callable[[ForkProgress, int], None]
"""Receives the progress and the image's size in bytes, about four times a second."""


class PlanRequester:
    """Requests the plans of one fork; see `rfork.receiver.runner.Replan`.

    This instance's own storage is reported only if the planner knows no source: a fork with sources never waits
    for a disk. If the sources changed their weights, it is reported `no_source_timeout_s` seconds later, as they
    may serve the new weights by then.

    While the fork has nothing to read from, it retries a planner that does not respond, as long as that is likely
    to be faster than loading from disk: an unreachable one (it restarts, or another replica replaces it) for
    `MAX_PLANNER_OUTAGE_S`, a silent one once. The planner may make the fork wait for announced instances; a retry
    by the same fork keeps its place.
    """

    def __init__(
        self,
        fork_id: str,
        planner: PlannerClient,
        local: FallbackRunner,
        context: ForkContext,
    ) -> None:
        self._fork_id = fork_id
        self._planner = planner
        self._seed = local.seed
        self._local = local
        self._dial = context.dial
        self._settings = context.settings
        self._timer = context.timer
        self.reasons: list[RforkError] = []
        """Reasons why this instance was assigned its own storage; the last one is the most specific."""
        self._compared: set[str] = set()
        self._plan_named_weights = False
        """True if the last plan with routes named the weights."""
        self._open_storage_at = 0.0
        self._had_sources = False
        """True if any plan had sources."""

    def __call__(self, faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        """Return the planner's plan.

        Raises as `PlannerClient.request_plan`, and NoSource if all sources have other layouts.
        """
        named = self._plan_named_weights or self._seed.manifest is not None
        if named and any(fault.error == SourceWeightsChanged.__name__ for fault in faults):
            self._open_storage_at = time.monotonic() + self._settings.no_source_timeout_s
        plan = self._request(faults, current)
        if (
            not (plan.routes or plan.storage or plan.is_paused)
            and time.monotonic() >= self._open_storage_at
            and self._open_storage()
        ):
            before = plan.reason
            plan = self._request((), current)
            if plan.storage:
                self.reasons.append(
                    NoSource(f"{': '.join(filter(None, (before, plan.reason)))}, for all waiting instances")
                )
        elif plan.storage and not self.reasons:
            self.reasons.append(NoSource(f"{plan.reason}, for all waiting instances"))
        self._had_sources = self._had_sources or bool(plan.routes or plan.storage)
        if plan.routes:
            self._plan_named_weights = plan.weights_id is not None
        if plan.mismatched_source is not None:
            self._explain_mismatch(plan)
        return plan

    def _request(self, faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        self._seed.storage = self._local.advertised
        request = ForkRequest(
            fork_id=self._fork_id, instance=self._seed.report(), faults=faults, current_assignments=current
        )
        with self._timer.phase("plan"):
            # A fork with sources continues with them, and requests a plan again later.
            try:
                if self._had_sources:
                    plan = self._planner.request_plan(request, deadline=self._timer.deadline)
                else:
                    plan = self._request_with_retry(request)
            except PlannerRejected as error:
                if error.problem != REPLICA_VERSION:
                    raise
                hint = "make the files equal on all nodes, or set the version (RFORK_VERSION)"
                raise WrongVersion(str(error), hint=hint) from None
        if plan.version not in (None, self._seed.version) and not self._seed.adopts_version:
            raise NoSource(f"the plan has version {plan.version}, but this instance requires {self._seed.version}")
        return plan

    def _request_with_retry(self, request: ForkRequest) -> Plan:
        """Request a plan until the planner responds, or was unreachable or silent for too long."""
        away_since: float | None = None
        silences, timeout_s = 0, min(MAX_PLANNER_OUTAGE_S, self._settings.no_source_timeout_s)
        while True:
            requested_at = time.monotonic()
            try:
                return self._planner.request_plan(request, deadline=self._timer.deadline)
            except (PlannerUnreachable, PlannerRejected) as error:
                now, failure = time.monotonic(), _failure_type(error)
                if failure is None or now >= self._timer.deadline:
                    raise
                if failure == "silent":
                    silences += 1
                    hopeless, pause_s = silences > 1 or not timeout_s, 0.0
                else:
                    away_since = requested_at if away_since is None else away_since
                    hopeless, pause_s = now - away_since >= timeout_s, RETRY_INTERVAL_S
                if hopeless:
                    raise
                log.info("planner unreachable, retrying", reason=str(error))
            time.sleep(min(pause_s, max(0.0, self._timer.deadline - time.monotonic())))

    def _open_storage(self) -> bool:
        with self._timer.phase("offer"):
            return self._local.open()

    def _explain_mismatch(self, plan: Plan) -> None:
        other, reads = plan.mismatched_source, bool(plan.routes or plan.storage)
        if other is None or (reads and other.source_id in self._compared):
            return
        self._compared.add(other.source_id)
        remaining_s = max(0.0, self._timer.deadline - time.monotonic())
        timeout_s = min(LAYOUT_DIFF_TIMEOUT_S, self._settings.source_idle_timeout_s, remaining_s)
        difference = explain_layout_mismatch(other, self._seed.image.layout, self._dial, timeout_s)
        if not reads:
            raise difference
        self.reasons.append(difference)
        log.warning("no seed has this layout, reading from storage", detail=str(difference))


def progress_interval_s(reports: int, with_chunks: int) -> float:
    """Return the time until the next progress report, after this number of reports, of which some had chunks."""
    is_first = with_chunks < FIRST_PROGRESS_REPORTS and reports < MAX_FIRST_PROGRESS_REPORTS
    return FIRST_PROGRESS_INTERVAL_S if is_first else PROGRESS_INTERVAL_S


def _failure_type(error: PlannerUnreachable | PlannerRejected) -> Literal["away", "silent"] | None:
    """Return why a retry may succeed, or None if the planner refuses the request."""
    if isinstance(error, PlannerRejected):
        return "away" if error.status in RETRYABLE_STATUSES else None
    return "silent" if error.silent else "away"


def explain_layout_mismatch(other: Route, own: Layout, dial: Dial, timeout_s: float) -> NoSource:
    """Explain why a fork's layout matches no source, if one has another layout of the model.

    Fetches that layout; returns the error to raise, with the first difference in tags, attributes or tensors.
    """
    peer = dial(other.address, lambda: other.lease.token)
    try:
        theirs = peer.full_manifest(time.monotonic() + timeout_s).layout
    except RforkError as error:
        return NoSource(f"{other.address} has the model with another layout (not compared: {error})")
    finally:
        peer.close()
    difference = "; ".join(tag_differences(own, theirs)) or own.first_difference(theirs) or "the layouts are now equal"
    mismatch = LayoutMismatch(f"{other.address} has the model with another layout; first difference: {difference}")
    return NoSource(str(mismatch), hint="build the module exactly as the seed did: same revision, dtype and options")


class ProgressReporter:
    """Reports the progress of `transfer` to the planner and the caller, and passes it the planner's responses.

    Runs on its own threads: it reports even while the fork waits, for example for its loader. The caller's
    callback does not wait for the planner.
    """

    def __init__(
        self,
        fork_id: str,
        planner: PlannerClient,
        transfer: Transfer,
        chunk_state: ChunkState,
        timer: ForkTimer,
        on_progress: OnProgress | None,
    ) -> None:
        self.meter = ThroughputMeter()
        self._fork_id = fork_id
        self._planner = planner
        self._transfer = transfer
        self._chunk_state = chunk_state
        self._timer = timer
        self._on_progress = on_progress
        self._done = threading.Event()
        self._latest: ForkProgress | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Report while the block runs, and once more at its end."""
        threads = [
            threading.Thread(target=partial(self._work, work, current_context()), name=name, daemon=True)
            for name, work in (("rfork-progress", self._poll), ("rfork-progress-report", self._report_to_planner))
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._done.set()
            # A planner that does not respond must not delay a finished fork.
            until = time.monotonic() + POLL_INTERVAL_S
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))

    def _work(self, work: Callable[[], None], trace: TraceContext | None) -> None:
        with use_context(trace):
            work()

    def _poll(self) -> None:
        self.meter.add(time.monotonic(), 0)
        while True:
            last = self._done.wait(POLL_INTERVAL_S)
            now = time.monotonic()
            stats, active = self._transfer.stats, self._transfer.active_rates
            bytes_by_source = {share.source_id: share.verified_bytes for share in stats.shares}
            self.meter.add(now, stats.bytes_read - stats.loader_bytes, measurable_bytes(bytes_by_source))
            self._latest = progress = ForkProgress(
                verified=self._chunk_state.verified,
                bytes_read=stats.bytes_read,
                bytes_per_s=self.meter.bytes_per_s,
                sources=bytes_by_source,
                source_bytes_per_s=top_rates(self.meter.source_bytes_per_s),
                active_bytes_per_s=None if active.total is None else round(active.total),
                source_active_bytes_per_s=top_rates(active.by_source),
                link_bytes_per_s=self.meter.max_bytes_per_s,
                transports=transports_by_source(stats.shares),
                phases={phase: round(seconds, 4) for phase, seconds in self._timer.phases.items()},
            )
            self._run_callback(progress)
            if last:
                return

    def _report_to_planner(self) -> None:
        reports = with_chunks = 0
        while not self._done.wait(progress_interval_s(reports, with_chunks)):
            progress = self._latest
            if progress is not None:
                reports += 1
                with_chunks += bool(progress.verified)
                self._send_progress(progress)

    def _send_progress(self, progress: ForkProgress) -> None:
        try:
            ack = self._planner.progress(self._fork_id, progress)
        except PlannerRejected as error:
            if error.problem == "unknown-fork":
                self._transfer.request_replan("the planner does not know this fork")
            else:
                log.warning("planner rejected a progress report, leases will expire", reason=str(error))
        except PlannerUnreachable as error:
            log.debug("progress not reported to the planner", reason=str(error))
        else:
            self._transfer.update_leases(ack.leases)
            if ack.replan_suggested is not None:
                self._transfer.request_replan(ack.replan_suggested)

    def _run_callback(self, progress: ForkProgress) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress, self._chunk_state.chunks.image_bytes)
        except Exception:  # the callback may fail; the planner still gets the progress
            log.exception("progress callback failed and was disabled")
            self._on_progress = None
