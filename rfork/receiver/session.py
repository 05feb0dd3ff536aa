"""One fork from end to end: capture, plan, transfer and verify, or fall back; then become a seed.

Runs on the target. `fetch` forks an image into plain memory, without its module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar
from uuid import uuid4

import torch
from torch import nn
from typing_extensions import Self

from rfork.errors import (
    ALL_TENSORS,
    AllSourcesFailed,
    DeadlineExceeded,
    EngineMismatch,
    ForkCancelled,
    ForkFailed,
    LayoutMismatch,
    NetworkError,
    NoSource,
    PlannerRejected,
    PlannerUnreachable,
    SourceError,
    SourceWeightsChanged,
    UnsupportedTensor,
    without_frames,
)
from rfork.image.capture import capture
from rfork.image.chunks import ChunkState
from rfork.image.layout import Layout, Manifest, allocate_buffer
from rfork.image.memory import Image, check_writable
from rfork.logs import logger
from rfork.peer.base import Dial, Peer
from rfork.peer.client import PeerClient
from rfork.peer.server import PeerServer, ServePeer
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.heartbeat import STOP_S
from rfork.receiver.clean_module import DerivedTensors, TargetModule
from rfork.receiver.fallback import Fallback, FallbackRunner, LoaderError, ModuleReleased, ModuleReplaced
from rfork.receiver.planner_requests import OnProgress, PlanRequester, ProgressReporter
from rfork.receiver.report import (
    FINAL_REPORT_S,
    RESUME_SOURCE_ID,
    ForkReport,
    ForkTimer,
    ThroughputMeter,
    TransferStats,
    add_fallback_share,
    build_fork_result,
    current_trace_id,
    final_report_deadline,
    phase_seconds,
)
from rfork.receiver.runner import Transfer
from rfork.receiver.source_query import SourceQuery
from rfork.receiver.sources import ForkContext, SourceFactory
from rfork.receiver.spool import ChunkPersister
from rfork.schema import InstanceReport, Outcome, Route, source_type
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.tracing import Tracer
from rfork.tracing import get_tracer as process_tracer
from rfork.transport.base import Transport
from rfork.transport.selection import select_transports
from rfork.weights_version import UNSTATED, is_first, is_unnamed

log = logger(__name__)

REPORT_TIMEOUT_S = 0.5
"""Maximum time that the end of a fork waits for the planner to acknowledge the instance's new state."""
TRANSIENT_EGRESS_SHARE = 0.01
"""Egress share of an instance that ends once it has the weights: the planner prefers other sources."""

CheckLayout = Callable[[Layout], None]
"""Receives the layout before memory is allocated for it; raises to refuse it."""
OnStarted = Callable[[Seed], None]


@dataclass(frozen=True, slots=True)
class Network:
    """The planner and the peers of an instance."""

    planner: PlannerClient | None
    transports: Sequence[Transport]
    dial: Dial
    serve_peer: ServePeer = PeerServer

    @classmethod
    def of(cls, settings: InstanceSettings) -> Self:
        """Return the network that the settings describe. Raises SettingsError."""
        transports = select_transports(settings)
        planner = PlannerClient.of(settings) if settings.planner is not None else None
        return cls(planner, transports, _dial(settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOptions:
    """Optional parts of a fork."""

    fallbacks: Sequence[Fallback] = ()
    """Loads of this instance itself, in order of preference. If the planner knows no source, they are
    offered to it (unless `InstanceSettings.cold_start` is ``independent``), and it may elect this instance to read
    one of them for all waiting instances; they are tried in order once nothing else works. Without a planner, only
    they are used.
    """
    current_version: Callable[[], str | None] | None = None
    """Recomputes the version of this instance's files, if the identity has that version."""
    exclude: Sequence[str] = ()
    """Patterns of tensors that are not forked; see `capture`."""
    like: Layout | None = None
    """The layout that the module was built from, if any; see `capture`."""
    on_progress: OnProgress | None = None
    on_started: OnStarted | None = None
    """Called with this instance's seed before the transfer."""
    on_filled: Callable[[], None] | None = None
    """Called once the transfer has filled the module, before this instance is a seed; if it raises EngineMismatch,
    the fallbacks are tried.
    """
    tracer: Tracer | None = None
    """By default, the process's."""


class ForkSession:
    """Fills one module's tensors. Call `run` once."""

    def __init__(
        self,
        module: nn.Module,
        identity: InstanceIdentity,
        settings: InstanceSettings,
        network: Network,
        options: ForkOptions | None = None,
    ) -> None:
        """Set up a fork; nothing runs yet. Raises what `rfork.tracing.get_tracer` raises."""
        self._module = module
        self._identity = identity
        self._settings = settings
        self._network = network
        self._options = options or ForkOptions()
        self._fork_id = uuid4().hex
        self._tracer = self._options.tracer or process_tracer()
        self._timer = ForkTimer(settings.deadline_s, self._tracer)
        self._meter = ThroughputMeter()
        self._transfer: Transfer | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Make `run` raise ForkCancelled soon, if the transfer has not ended. Any thread."""
        self._cancelled = True
        if self._transfer is not None:
            self._transfer.cancel()

    @property
    def bytes_read(self) -> int:
        """Bytes that have been received so far. Any thread."""
        return self._transfer.stats.bytes_read if self._transfer is not None else 0

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
                if self._network.planner is not None:
                    self._network.planner.close()
                raise
            report.describe(span)
            return report

    def _run(self) -> ForkReport:
        target = self._capture()
        chunk_state = ChunkState(target.image.layout.chunks)
        # Before the seed, whose threads and sockets would survive an error here.
        persister = ChunkPersister(self._settings.resume_dir, self._identity, target.image, chunk_state)
        seed = Seed(
            target.image,
            self._identity,
            self._settings,
            Connections(
                list(self._network.transports),
                planner=self._network.planner,
                serve_peer=self._network.serve_peer,
                tracer=self._tracer,
            ),
            chunk_state=chunk_state,
        ).start()
        options = self._options
        local = FallbackRunner(target, seed, persister, options.fallbacks, options.current_version, self._tracer)
        try:
            persister.start()
            if options.on_started is not None:
                options.on_started(seed)
            report = self._transfer_or_fallback(local, persister)
            persister.close(remove=True)
            return report
        except BaseException as error:
            ended: Outcome = "interrupted" if isinstance(error, KeyboardInterrupt | ForkCancelled) else "failed"
            try:
                self._finish(ended, _failures(error, local))
            finally:
                persister.close(remove=False)
                late = time.monotonic() >= self._timer.deadline
                seed.close(leave_s=FINAL_REPORT_S if late else STOP_S)
            if isinstance(error, LoaderError):
                raise error.error from None
            raise

    def _capture(self) -> TargetModule:
        exclude = self._options.exclude
        with self._timer.phase("capture"):
            image = capture(self._module, exclude=exclude, like=self._options.like)
            if not image.layout.image_bytes:
                raise UnsupportedTensor(ALL_TENSORS, "it has no tensor with bytes, so there is nothing to fork")
            check_writable(image)
            derived = DerivedTensors(self._module, image) if self._options.fallbacks else None
            log.debug("tensors of the model captured", model=self._identity.model, layout=image.layout.layout_id)
        return TargetModule(self._module, image, exclude, derived)

    def _transfer_or_fallback(self, local: FallbackRunner, persister: ChunkPersister) -> ForkReport:
        seed, reasons = local.seed, local.reasons
        used_fallback: Fallback | None = None
        try:
            self._run_transfer(local, persister)
            if self._options.on_filled is not None:
                self._options.on_filled()
        except ModuleReplaced as loaded:
            used_fallback = loaded.fallback
        except (ForkFailed, NetworkError, DeadlineExceeded, EngineMismatch, ModuleReleased) as ended:
            error = ended.error if isinstance(ended, ModuleReleased) else ended
            reasons.append(without_frames(error))
            persister.pause()
            # Readers of this relay must not receive what the fallback writes.
            seed.fence()
            with self._timer.phase("fallback") as span:
                span.set(reason=f"{error.kind}: {error}")
                used_fallback = local.run()
                span.set(source=used_fallback.name)
        seed.storage = ()
        can_serve = local.serves_replacement
        if not local.replaced:
            can_serve = used_fallback is None or local.target.is_in_place()
        if used_fallback is None:
            stats = self._transfer_stats
            read_files = any(
                share.transport in ("checkpoint", "loader") and share.source_id != stats.joined_storage
                for share in stats.sources
            )
            rename = local.version_of_loaded() if read_files else None
            if rename is not None and seed.manifest is not None:
                seed.version = rename(seed.manifest)
            seed.serve()
        elif can_serve and not local.replaced:
            with self._timer.phase("digest"):
                seed.publish(version=local.version_of_loaded())
        report = self._report(local, used_fallback)
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

    def _run_transfer(self, local: FallbackRunner, persister: ChunkPersister) -> None:
        planner, seed = self._network.planner, local.seed
        if planner is None:
            raise NoSource("no planner is set", hint="set RFORK_PLANNER, or pass planner=")
        transports = {transport.name: transport for transport in self._network.transports}
        context = ForkContext(
            self._identity.instance_id, seed.image, transports, self._network.dial, self._settings, self._timer
        )
        with local:
            plan_requester = PlanRequester(self._fork_id, planner, local, context)
            source_factory = SourceFactory(context, local, self._tracer)
            transfer = self._transfer = Transfer(
                source_factory, seed.chunk_state, plan_requester, seed, persister.spool
            )
            reporter = ProgressReporter(
                self._fork_id, planner, transfer, seed.chunk_state, self._timer, self._options.on_progress
            )
            self._meter = reporter.meter
            if self._cancelled:
                transfer.cancel()
            try:
                with reporter.running(), self._timer.phase("transfer"):
                    transfer.run()
            finally:
                local.reasons.extend((*plan_requester.reasons, *transfer.reasons))

    def _report(self, local: FallbackRunner, used_fallback: Fallback | None) -> ForkReport:
        seed, reasons = local.seed, local.reasons
        manifest, layout, stats = seed.manifest, seed.image.layout, self._transfer_stats
        phases = phase_seconds(self._timer, stats)
        transfer_s = phases.get("transfer", 0.0)
        fetched = layout.image_bytes - stats.resumed_bytes
        compared = self._settings.verify_chunks or used_fallback is not None
        return ForkReport(
            fork_id=self._fork_id,
            instance_id=self._identity.instance_id,
            model=self._identity.model,
            version=seed.version,
            version_from=self._version_from(local, used_fallback),
            first=any(is_first(str(error)) for error in reasons),
            outcome="forked" if used_fallback is None else "fallback",
            layout_id=layout.layout_id,
            weights_id=manifest.weights_id if manifest is not None else "",
            image_bytes=layout.image_bytes,
            chunks=len(layout.chunks),
            chunks_verified=len(seed.chunk_state) if compared else 0,
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
            cross_layout=used_fallback.cross_layout_result if used_fallback is not None else None,
            reasons=tuple(f"{error.kind}: {error}" for error in reasons),
            trace_id=current_trace_id(),
            seed=seed,
        )

    def _version_from(self, local: FallbackRunner, used_fallback: Fallback | None) -> Literal["own", "served", "none"]:
        """Return the origin of the weights' version; see `ForkReport`."""
        seed = local.seed
        if any(UNSTATED in str(error) for error in local.reasons):
            return "none"
        if used_fallback is not None or seed.version is None or is_unnamed(seed.version) or not seed.adopts_version:
            return "own"
        sources = [share.source_id for share in self._transfer_stats.sources if share.source_id != RESUME_SOURCE_ID]
        has_peers = any(source_type(source_id) == "peer" for source_id in sources)
        return "served" if has_peers or self._transfer_stats.joined_storage is not None else "own"

    @property
    def _transfer_stats(self) -> TransferStats:
        return self._transfer.stats if self._transfer is not None else TransferStats(0, 0, 0, ())

    def _finish(self, outcome: Outcome, reasons: Sequence[BaseException], report: ForkReport | None = None) -> None:
        """Report the outcome to the planner, which also releases the leases. Best effort: leases expire."""
        if self._network.planner is None:
            return
        finish = build_fork_result(outcome, self._timer, self._transfer_stats, self._meter, reasons, report)
        try:
            self._network.planner.finish(self._fork_id, finish, deadline=final_report_deadline(self._timer.deadline))
        except (PlannerUnreachable, PlannerRejected) as error:
            log.debug("fork result not reported to the planner", reason=str(error))


def _failures(error: BaseException, local: FallbackRunner) -> Sequence[BaseException]:
    """Return the reasons of a fork that ended with an error."""
    if isinstance(error, AllSourcesFailed) and error.reasons:
        return error.reasons
    return (*local.reasons, error.error if isinstance(error, LoaderError) else error)


def fetch(
    source_instance: InstanceReport,
    settings: InstanceSettings,
    on_progress: OnProgress | None = None,
    check: CheckLayout | None = None,
) -> tuple[Image, Manifest, ForkReport]:
    """Fork the image of `source_instance` into this process's memory, from the sources that the planner assigns.

    For commands that need an image's bytes but not the model: `rfork snapshot`, `rfork cache`. The image is
    verified chunk by chunk, and no longer served once this returns; the seed of the report is closed. Takes at
    most `InstanceSettings.deadline_s`, including the request for the layout. Raises what `rfork.fork` and `check`
    raise.
    """
    deadline = time.monotonic() + settings.deadline_s
    # A transient instance maps nothing: its source would keep files of the chunks, laid out for a reader that
    # has left instead of for the next instances.
    settings = settings.model_copy(update={"shm_mode": "copy"})
    layout = fetch_layout(source_instance, settings, deadline)
    if check is not None:
        check(layout)
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise DeadlineExceeded(
            f"the deadline of {settings.deadline_s:g} s passed before the first byte of {source_instance.model}"
        )
    _, tensors = allocate_buffer(layout)
    identity = InstanceIdentity(
        source_instance.model,
        source_instance.rank,
        version=source_instance.version,
        replica=f"fetch-{uuid4().hex[:12]}",
        egress_share=TRANSIENT_EGRESS_SHARE,
    )
    report = ForkSession(
        module_of(tensors),
        identity,
        settings.model_copy(update={"snapshot": None, "deadline_s": remaining_s}),
        Network.of(settings),
        ForkOptions(on_progress=on_progress, like=layout),
    ).run()
    seed = report.seed
    if seed is None or seed.manifest is None:
        raise SourceWeightsChanged(f"the weights of {source_instance.model} changed during the fetch")
    image, manifest = seed.image, seed.manifest
    seed.close()
    return image, manifest, report


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module that only has these tensors, by their names in an image."""
    module = nn.Module()
    module._buffers.update(tensors)  # `register_buffer` would refuse the dots
    return module


def fetch_layout(source_instance: InstanceReport, settings: InstanceSettings, deadline: float) -> Layout:
    """Return the layout of the image, with all its tensors, from an instance that has it, by `deadline`.

    Raises NoSource, LayoutMismatch, and what the planner's client and the peer's raise.
    """

    def question(peer: Peer, until: float) -> Layout:
        layout = peer.full_manifest(until).layout
        if layout.layout_id != source_instance.layout_id:
            raise LayoutMismatch(
                f"the instances of {source_instance.model} changed during the request", hint="try again"
            )
        return layout

    return query_source(source_instance, settings, deadline, question)


Answer = TypeVar("Answer")


def query_source(
    source_instance: InstanceReport,
    settings: InstanceSettings,
    deadline: float,
    question: Callable[[Peer, float], Answer],
) -> Answer:
    """Return the answer of an instance that has the image of `source_instance`, by `deadline`.

    The planner chooses the instance. `question` is called with its peer and a deadline; if it raises SourceError,
    NetworkError or LayoutMismatch, the next instance is tried. Raises NoSource, and what `question` and the planner's
    client raise.
    """
    with PlannerClient.of(settings) as planner:
        return _query_source(planner, source_instance, settings, deadline, question)


def _query_source(
    planner: PlannerClient,
    source_instance: InstanceReport,
    settings: InstanceSettings,
    deadline: float,
    question: Callable[[Peer, float], Answer],
) -> Answer:
    retry_until = min(time.monotonic() + settings.source_idle_timeout_s, deadline)
    query = SourceQuery(
        source_instance, uuid4().hex, uuid4().hex, placement=settings.placement, retry_until=retry_until
    )
    try:
        while True:
            plan = planner.request_plan(query.request, deadline=deadline)
            for route in query.plan_received(plan):
                try:
                    with closing(_dial(settings)(route.address, partial(_token_of, route))) as peer:
                        return question(peer, min(time.monotonic() + settings.source_idle_timeout_s, deadline))
                except (LayoutMismatch, SourceError, NetworkError) as error:
                    query.failed(route, error)
            time.sleep(query.pause_s(plan, time.monotonic()))
    finally:
        _end_query(planner, query, final_report_deadline(deadline))


def _end_query(planner: PlannerClient, query: SourceQuery, deadline: float) -> None:
    """Remove the query's records at the planner. Best effort: it removes them later, and the query has its result."""
    try:
        planner.remove(query.request.instance.instance_id, deadline=deadline)
    except (PlannerUnreachable, PlannerRejected) as error:
        log.debug("end of a query not reported to the planner", reason=str(error))


def _token_of(route: Route) -> str:
    return route.lease.token


def _dial(settings: InstanceSettings) -> Dial:
    return lambda address, token: PeerClient(address, token, settings.tls)
