"""One fork from end to end: capture, plan, transfer and verify, or fall back; then become a seed.

Runs on the target. The sequence of design section 5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal
from uuid import uuid4

from torch import nn

from rfork.errors import (
    ALL_TENSORS,
    AllSourcesFailed,
    CheckpointError,
    DeadlineExceeded,
    EngineMismatch,
    ForkFailed,
    NetworkError,
    NoSource,
    PlannerRejected,
    PlannerUnreachable,
    RforkError,
    StorageError,
    UnsupportedTensor,
    WrongVersion,
)
from rfork.image.capture import capture
from rfork.image.chunk_state import ChunkState
from rfork.image.layout import Layout
from rfork.image.memory import Image
from rfork.image.writability import check_writable
from rfork.logs import logger
from rfork.peer.base import Dial
from rfork.peer.server import PeerServer, ServePeer
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.heartbeat import STOP_S
from rfork.receiver.chunk_persister import ChunkPersister
from rfork.receiver.cold_start import ModuleReplaced, StorageCandidates
from rfork.receiver.deadline import FINAL_REPORT_S, Deadline, final_report_deadline
from rfork.receiver.fallback import DerivedTensors, Fallback, LoaderError, run_fallbacks
from rfork.receiver.module_replacement import ModuleReplacement
from rfork.receiver.phase_timer import PhaseTimer
from rfork.receiver.plan_requester import PlanRequester
from rfork.receiver.progress import OnProgress, ProgressReporter
from rfork.receiver.report import (
    RESUME_SOURCE_ID,
    ForkReport,
    TransferStats,
    add_fallback_share,
    build_fork_result,
    current_trace_id,
    phase_seconds,
)
from rfork.receiver.runner import Transfer
from rfork.receiver.sources import SourceFactory
from rfork.receiver.throughput import ThroughputMeter
from rfork.schema import source_type
from rfork.schema.types import Outcome
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.source.served_image import VersionOf
from rfork.tracing import Tracer
from rfork.tracing import get_tracer as process_tracer
from rfork.transport.base import Transport
from rfork.weights_version import UNSTATED, is_first, is_single, is_unnamed

log = logger(__name__)

REPORT_TIMEOUT_S = 0.5
"""Maximum time that the end of a fork waits for the planner to acknowledge the instance's new state."""


class ForkSession:
    """Fills one module's tensors. Call `run` once.

    `fallbacks`, in order of preference, are what this instance could load itself. If the planner knows no
    source, they are offered to it (unless `settings.cold_start` is ``independent``), and it may elect this
    instance to read one of them for all waiting instances; they are tried in order once nothing else works.
    Without a planner, only they are used.
    """

    def __init__(
        self,
        module: nn.Module,
        identity: InstanceIdentity,
        settings: InstanceSettings,
        transports: Sequence[Transport],
        *,
        planner: PlannerClient | None,
        dial: Dial,
        fallbacks: Sequence[Fallback] = (),
        on_progress: OnProgress | None = None,
        exclude: Sequence[str] = (),
        serve_peer: ServePeer = PeerServer,
        tracer: Tracer | None = None,
        current_version: Callable[[], str | None] | None = None,
        on_filled: Callable[[], None] | None = None,
        like: Layout | None = None,
    ) -> None:
        """Set up a fork; nothing runs yet. Raises what `rfork.tracing.get_tracer` raises.

        `current_version` recomputes the version of this instance's files, if the identity has that version.
        `on_filled` is called once the transfer has filled the module, before this instance is a seed; if it raises
        EngineMismatch, the fallbacks are tried. `like` is the layout that the module was built from, if any: see
        `capture`. `tracer` defaults to the process's.
        """
        self._module = module
        self._identity = identity
        self._settings = settings
        self._transports = list(transports)
        self._planner = planner
        self._dial = dial
        self._fallbacks = fallbacks
        self._on_progress = on_progress
        self._exclude = exclude
        self._current_version = current_version
        self._serve_peer = serve_peer
        self._on_filled = on_filled
        self._like = like
        self._fork_id = uuid4().hex
        self._tracer = tracer or process_tracer()
        self._timer = PhaseTimer(self._tracer)
        self._meter = ThroughputMeter()
        self._transfer: Transfer | None = None
        self._storage_reasons: Sequence[RforkError] = ()  # why it was assigned its own storage
        self._deadline = Deadline(time.monotonic() + settings.deadline_s)

    def run(self) -> ForkReport:
        """Fill the module; returns the report, with the seed that this process now is.

        Raises AllSourcesFailed if neither a source nor a fallback worked (the module's content is then
        undefined), and the exceptions of a loader that builds its own model. On any exception the seed is
        closed and the planner notified.
        """
        rank = self._identity.rank
        with self._tracer.span(
            "fork", fork=self._fork_id, instance=self._identity.instance_id, host=self._settings.node_name,
            model=self._identity.model, rank=rank.key, data_parallel_rank=rank.dp,
        ) as span:  # fmt: skip
            try:
                report = self._run()
            except BaseException:
                if self._planner is not None:
                    self._planner.close()
                raise
            report.describe(span)
            return report

    def _run(self) -> ForkReport:
        with self._timer.phase("capture"):
            image = capture(self._module, exclude=self._exclude, like=self._like)
            if not image.layout.image_bytes:
                raise UnsupportedTensor(ALL_TENSORS, "it has no tensor with bytes, so there is nothing to fork")
            check_writable(image)
            derived = DerivedTensors(self._module, image) if self._fallbacks else None
            log.debug("tensors of the model captured", model=self._identity.model, layout=image.layout.layout_id)
        chunk_state = ChunkState(image.layout.chunks)
        # Before the seed, whose threads and sockets would survive an error here.
        persister = ChunkPersister(self._settings.resume_dir, self._identity, image, chunk_state)
        seed = Seed(
            image,
            self._identity,
            self._settings,
            Connections(self._transports, planner=self._planner, serve_peer=self._serve_peer, tracer=self._tracer),
            chunk_state=chunk_state,
        ).start()
        reasons: list[RforkError] = []
        try:
            persister.start()
            report = self._transfer_or_fallback(image, chunk_state, seed, persister, derived, reasons)
            persister.close(remove=True)
            return report
        except BaseException as error:
            ended: Outcome = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            known = error.reasons if isinstance(error, AllSourcesFailed) else ()
            reported_error = error.error if isinstance(error, LoaderError) else error
            try:
                self._finish(ended, known or (*reasons, reported_error))
            finally:
                persister.close(remove=False)
                late = time.monotonic() >= self._deadline.monotonic_time
                seed.close(leave_s=FINAL_REPORT_S if late else STOP_S)
            if reported_error is not error:
                raise reported_error from None
            raise

    def _transfer_or_fallback(
        self,
        image: Image,
        chunk_state: ChunkState,
        seed: Seed,
        persister: ChunkPersister,
        derived: DerivedTensors | None,
        reasons: list[RforkError],
    ) -> ForkReport:
        used_fallback: Fallback | None = None
        replacement = ModuleReplacement(
            image, seed, persister, derived, self._exclude, lambda: self._version_of_loaded(seed, reasons)
        )
        try:
            self._run_transfer(image, chunk_state, seed, persister, derived, reasons, replacement)
            if self._on_filled is not None:
                self._on_filled()
        except ModuleReplaced as loaded:
            used_fallback = loaded.fallback
        except (ForkFailed, NetworkError, DeadlineExceeded, EngineMismatch) as error:
            reasons.append(error)
            persister.pause()
            # Readers of this relay must not receive what the fallback writes.
            seed.fence()
            with self._timer.phase("fallback") as span:
                span.set(reason=f"{error.kind}: {error}")
                used_fallback = run_fallbacks(
                    self._module, derived, self._fallbacks_of(seed, reasons), reasons, replacement.load
                )
                span.set(source=used_fallback.name)
        seed.storage = ()
        if replacement.replaced:
            can_serve = replacement.can_serve
        else:
            can_serve = used_fallback is None or image.shares_memory_with(capture(self._module, exclude=self._exclude))
        if used_fallback is None:
            read_files = any(share.transport in ("checkpoint", "loader") for share in self._transfer_stats.sources)
            rename = self._version_of_loaded(seed, reasons) if read_files else None
            if rename is not None and seed.manifest is not None:
                seed.version = rename(seed.manifest)
            seed.serve()
        elif can_serve and not replacement.replaced:
            with self._timer.phase("digest"):
                seed.publish(version=self._version_of_loaded(seed, reasons))
        report = self._report(image, chunk_state, seed, used_fallback, reasons)
        if can_serve:
            # Report before finishing: between the two, another fork would find a source that has nothing and
            # waits for nothing.
            seed.wait_report_acked(REPORT_TIMEOUT_S)
        self._finish(report.outcome, reasons, report)
        if not can_serve:
            # Finish before the fence: waiting readers request a plan immediately, and the planner must know
            # the outcome by then.
            seed.fence()
            log.warning("not a seed: the fallback replaced the module's tensors", by=report.fallback)
        log.info("fork done", report=report.line())
        return report

    def _fallbacks_of(self, seed: Seed, reasons: list[RforkError]) -> Sequence[Fallback]:
        """Return the fallbacks that may follow a failed fork.

        None if another rank of the replica may have a version that no fallback of this rank is known to
        provide: a replica of two versions is worse than one that does not start.
        """
        version = seed.version
        shared = version is not None and seed.adopts_version and not is_unnamed(version)
        if shared and self._fallbacks and not is_single(self._identity.rank):
            reasons.append(
                WrongVersion(
                    f"the replica started with version {version}, and this rank has no files of that version",
                    hint="set the version (RFORK_VERSION), or restart all ranks",
                )
            )
            return ()
        return self._fallbacks

    def _check_files(self) -> None:
        """Raise CheckpointError if this instance's files have changed since it started."""
        if self._current_version is None:
            return
        current = self._current_version()
        if current != self._identity.version:
            raise CheckpointError(
                f"the weight files changed after this instance started: they had version {self._identity.version} and "
                + (f"have {current}" if current else "are gone"),
                hint="restart the instance",
            )

    def _version_of_loaded(self, seed: Seed, reasons: list[RforkError]) -> VersionOf | None:
        """Return a function that names weights which this instance read itself; None: they have `seed.version`."""
        try:
            self._check_files()
        except (CheckpointError, StorageError) as error:
            log.warning("serving weights as a new version", reason=str(error))
            reasons.append(error)
            return seed.version_by_content
        if not seed.adopts_version or (seed.version is not None and is_unnamed(seed.version)):
            return None
        return seed.version_by_content

    def _report(
        self,
        image: Image,
        chunk_state: ChunkState,
        seed: Seed,
        used_fallback: Fallback | None,
        reasons: Sequence[RforkError],
    ) -> ForkReport:
        manifest, layout, stats = seed.manifest, image.layout, self._transfer_stats
        phases = phase_seconds(self._timer, stats)
        transfer_s = phases.get("transfer", 0.0)
        fetched = layout.image_bytes - stats.resumed_bytes
        return ForkReport(
            fork_id=self._fork_id,
            instance_id=self._identity.instance_id,
            model=self._identity.model,
            version=seed.version,
            version_from=self._version_from(seed, used_fallback, reasons),
            first=any(is_first(str(error)) for error in (*reasons, *self._storage_reasons)),
            outcome="forked" if used_fallback is None else "fallback",
            layout_id=layout.layout_id,
            weights_id=manifest.weights_id if manifest is not None else "",
            image_bytes=layout.image_bytes,
            chunks=len(layout.chunks),
            chunks_verified=len(chunk_state) if self._settings.verify_chunks or used_fallback is not None else 0,
            seconds=self._timer.seconds,
            phases=phases,
            bytes_read=stats.bytes_read,
            bytes_repeated=stats.bytes_repeated,
            replans=stats.replans,
            sources=stats.sources
            if used_fallback is None
            else add_fallback_share(stats.sources, used_fallback, layout, self._settings.node_name),
            link_bytes_per_s=self._meter.max_bytes_per_s,
            efficiency=self._meter.efficiency(fetched, transfer_s) if used_fallback is None else None,
            fallback=used_fallback.name if used_fallback is not None else None,
            reasons=tuple(f"{error.kind}: {error}" for error in reasons),
            trace_id=current_trace_id(),
            seed=seed,
        )

    def _version_from(
        self, seed: Seed, used_fallback: Fallback | None, reasons: Sequence[RforkError]
    ) -> Literal["own", "served", "none"]:
        """Return the origin of the weights' version; see `ForkReport`."""
        version = seed.version
        if any(UNSTATED in str(error) for error in (*reasons, *self._storage_reasons)):
            return "none"
        if used_fallback is not None or version is None or is_unnamed(version) or not seed.adopts_version:
            return "own"
        sources = [share.source_id for share in self._transfer_stats.sources if share.source_id != RESUME_SOURCE_ID]
        return "served" if any(source_type(source_id) == "peer" for source_id in sources) else "own"

    @property
    def _transfer_stats(self) -> TransferStats:
        return self._transfer.stats if self._transfer is not None else TransferStats(0, 0, 0, ())

    def _run_transfer(
        self,
        image: Image,
        chunk_state: ChunkState,
        seed: Seed,
        persister: ChunkPersister,
        derived: DerivedTensors | None,
        reasons: list[RforkError],
        replacement: ModuleReplacement,
    ) -> None:
        planner, chosen = self._planner, self._settings
        if planner is None:
            raise NoSource("no planner is set", hint="set RFORK_PLANNER, or pass planner=")
        shared = derived is not None and chosen.cold_start == "cooperative"
        fallbacks = self._fallbacks if shared else ()
        timeout_s = min(chosen.storage_idle_timeout_s, chosen.deadline_s)
        with StorageCandidates(
            fallbacks,
            self._module,
            image,
            derived,
            seed,
            timeout_s,
            self._exclude,
            replacement.load,
            self._tracer,
            self._check_files,
        ) as candidates:
            source_factory = SourceFactory(
                image,
                {transport.name: transport for transport in self._transports},
                self._dial,
                chosen,
                candidates,
                self._deadline,
                self._tracer,
            )
            plan_requester = PlanRequester(
                self._fork_id, planner, seed, candidates, self._dial, chosen, self._timer, self._deadline
            )
            self._storage_reasons = plan_requester.reasons
            transfer = self._transfer = Transfer(
                image,
                chunk_state,
                chosen,
                instance_id=self._identity.instance_id,
                source_factory=source_factory,
                replan=plan_requester,
                run_loader=candidates.run_loader,
                serving_state=seed,
                deadline=self._deadline,
                spool=persister.spool,
            )
            reporter = ProgressReporter(self._fork_id, planner, transfer, chunk_state, self._timer, self._on_progress)
            self._meter = reporter.meter
            try:
                with reporter.running(), self._timer.phase("transfer"):
                    transfer.run()
            finally:
                reasons.extend((*candidates.reasons, *self._storage_reasons, *transfer.reasons))

    def _finish(self, outcome: Outcome, reasons: Sequence[BaseException], report: ForkReport | None = None) -> None:
        """Report the outcome to the planner, which also releases the leases. Best effort: leases expire."""
        if self._planner is None:
            return
        finish = build_fork_result(outcome, self._timer, self._transfer_stats, self._meter, reasons, report)
        try:
            self._planner.finish(self._fork_id, finish, deadline=final_report_deadline(self._deadline.monotonic_time))
        except (PlannerUnreachable, PlannerRejected) as error:
            log.debug("fork result not reported to the planner", reason=str(error))
