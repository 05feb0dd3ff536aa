"""A simulated fork: production's transfer machine, whose actions are executed in virtual time.

It replaces `rfork.receiver.runner`, `rfork.receiver.planner_requests` and the fallbacks of `rfork.receiver.session`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING

from planner.ownership import Claimant
from planner.plan_service import PlanService
from rfork.errors import (
    NetworkError,
    NoSource,
    PlannerRejected,
    PlannerUnreachable,
    RforkError,
    SlowSources,
    SourceWeightsChanged,
    StorageError,
)
from rfork.receiver.events import (
    Action,
    AdoptVersion,
    ChunkDigested,
    CloseSource,
    CompareFiles,
    DigestKeptChunk,
    Event,
    ExcludeStorage,
    FenceImage,
    Finish,
    InvalidateChunks,
    KeptChunkDigested,
    LeasesRenewed,
    LoaderFailed,
    LoaderFinished,
    MarkVerified,
    MeasureOwnLoad,
    OpenPeer,
    OpenStorage,
    OwnLoadMeasured,
    PlanFailed,
    PlanReceived,
    ReadChunk,
    ReadFailed,
    ReadSpool,
    RenewLease,
    ReplanSuggested,
    ReportStorageActivity,
    RequestPlan,
    RunLoader,
    SetManifest,
    SetProvisionalId,
    SpoolChunkRead,
    StopSpool,
    Tick,
)
from rfork.receiver.machine import TransferMachine
from rfork.receiver.own_load import OwnLoad
from rfork.receiver.planner_requests import (
    MAX_PLANNER_OUTAGE_S,
    PROGRESS_INTERVAL_S,
    RETRY_INTERVAL_S,
    RETRYABLE_STATUSES,
    progress_interval_s,
)
from rfork.schema import (
    ForkProgress,
    ForkRequest,
    ForkResult,
    Plan,
    StorageAssignment,
    StorageCandidate,
    StorageType,
)
from tests.simulation.content import GARBAGE, origin_of
from tests.simulation.instance import Instance
from tests.simulation.sources import DIGEST_S, PeerSource, Source, StorageSource

if TYPE_CHECKING:
    from tests.simulation.world import World

REPORT_TIMEOUT_S = 0.5
URI = "file:///model"
LOADED = ("forked", "fallback", "layouts")
"""Outcomes of a fork after which the instance has its weights."""


def request_plan(message: ForkRequest, service: PlanService, claimant: Claimant) -> Awaitable[Plan]:
    return service.plan(message, claimant)


class Target:
    """One fork into an instance, until its weights are complete by any means."""

    def __init__(
        self,
        world: World,
        instance: Instance,
        fork_id: str,
        spool: dict[int, bytes] | None = None,
        damaged: frozenset[int] = frozenset(),
        deadline_at: float | None = None,
    ) -> None:
        """`spool` has the digests that a previous process of this instance saved, by chunk; the bytes of the
        `damaged` chunks differ. `deadline_at`: by default that of the world's settings.
        """
        self.world = world
        self.instance = instance
        self.fork_id = fork_id
        self.layout = instance.served.layout
        self.layout_id = self.layout.layout_id
        self.disk_error = False
        self.disk_stalled = False
        self.began_at = world.now
        self.ended_at: float | None = None
        self.outcome = ""
        """`forked`, `fallback` (own files), `layouts` (boxes of other layouts) or the name of the error; empty while it
        runs.
        """
        self.invalidated = 0
        """Chunks that were dropped after they had been verified."""
        self.spool = dict(spool or {})
        self._damaged = damaged
        self.machine = TransferMachine(
            self.layout,
            world.settings,
            instance_id=instance.name,
            deadline_at=deadline_at or world.now + world.settings.deadline_s,
            spool_records=dict(spool) if spool is not None else None,
            own_storage="local" if instance.files is not None else None,
        )
        self._sources: dict[int, Source] = {}
        self._in_flight: set[int] = set()
        self._tick_due: float | None = None
        self.had_sources = False
        self.abandoned = False
        """True if the fork was abandoned for the instance's own loader."""
        self._plan_named_weights = False
        self._open_candidates_at = 0.0
        self._candidates_opened = False
        self._spool_stopped = False
        self._reports = self._reports_with_chunks = 0

    # -- events and actions -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the fork."""
        self.world.later(progress_interval_s(0, 0), self._send_progress, on=self.instance)
        self._execute_all(self.machine.start(self.world.now))

    def handle(self, event: Event) -> None:
        """Pass one event to the machine; a suspended process handles it once it continues."""
        instance = self.instance
        if isinstance(event, ReadFailed | ChunkDigested):
            self._in_flight.discard(event.chunk)
        if not instance.alive or self.ended_at is not None or self.machine.finished:
            return
        if instance.stopped:
            self.world.when_resumed(instance, lambda: self.handle(event))
            return
        self._execute_all(self.machine.handle(event, self.world.now))

    def _execute_all(self, actions: list[Action]) -> None:
        for action in actions:
            self._execute(action)
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        if self.machine.finished or self.ended_at is not None:
            return
        due = self.machine.wake_at(self.world.now)
        if self._tick_due is None or due < self._tick_due:
            self._tick_due = due
            self.world.later(max(0.0, due - self.world.now), lambda: self._tick(due), on=self.instance)

    def _tick(self, due: float) -> None:
        if self._tick_due == due:
            self._tick_due = None
            now = self.world.now
            activity = {number: source.activity(now) for number, source in self._sources.items()}
            self.handle(Tick(activity))

    def _execute(self, action: Action) -> None:
        served, world = self.instance.served, self.world
        match action:
            case ReadChunk(connection, chunk):
                world.check(chunk not in self._in_flight, f"{self.instance.name}: two reads of chunk {chunk}")
                self._in_flight.add(chunk)
                self._sources[connection].read(action)
            case MarkVerified(chunk, digest):
                world.check_verified(self, chunk, digest)
                if digest is not None:
                    self.spool[chunk] = digest
                served.chunk_state.mark_verified(chunk, digest)
            case RequestPlan():
                world.start(self._plan(action))
            case OpenPeer(connection, route):
                self._open(connection, PeerSource(self, connection, route))
            case OpenStorage(connection, assignment):
                self._open(connection, StorageSource(self, connection, assignment))
            case RenewLease(connection, lease):
                source = self._sources[connection]
                if isinstance(source, PeerSource):
                    source.renew(lease)
            case MeasureOwnLoad():
                self._measure()
            case CompareFiles(connection, digests):
                source = self._sources[connection]
                if isinstance(source, StorageSource):
                    source.compare(digests)
            case CloseSource(connection):
                self._sources[connection].close()
            case ExcludeStorage(name):
                self.instance.served.storage = tuple(
                    each for each in self.instance.served.storage if f"{each.kind}:{each.uri}" != name
                )
            case DigestKeptChunk(chunk):
                digest = self.instance.memory[chunk]
                world.later(DIGEST_S, lambda: self.handle(KeptChunkDigested(chunk, digest)), on=self.instance)
            case ReadSpool():
                world.later(world.disk_chunk_s, lambda: self._read_spool(action), on=self.instance)
            case StopSpool():
                self._spool_stopped = True
            case RunLoader(assignment):
                self._run_loader(assignment)
            case SetManifest(manifest):
                served.set_manifest(manifest)
                self.instance.notify_readers()
                self.instance.send_report()
            case SetProvisionalId(provisional_id):
                served.chunk_state.set_provisional_id(provisional_id)
            case InvalidateChunks(chunks):
                self.invalidated += len(chunks)
                self.instance.invalidate(chunks)
            case FenceImage():
                self.invalidated += len(served.chunk_state)
                self.instance.fence()
            case AdoptVersion(version):
                if served.adopts_version:
                    served.version = version
            case ReportStorageActivity(active_at, relayed):
                storage_at = None if active_at is None else lambda: active_at
                self.instance.set_storage_activity(storage_at, relayed=relayed)
            case Finish(error):
                self._finish(error)

    def _open(self, connection: int, source: Source) -> None:
        self._sources[connection] = source
        source.start()

    def write(self, chunk: int, content: bytes) -> None:
        """Write into this instance's memory."""
        self.world.check(self.ended_at is None, f"{self.instance.name}: chunk {chunk} written after the end")
        self.instance.memory[chunk] = content

    def _read_spool(self, action: ReadSpool) -> None:
        if not self._spool_stopped and self.ended_at is None:
            content = GARBAGE if action.chunk in self._damaged else self.spool[action.chunk]
            self.instance.memory[action.chunk] = content
            self.handle(SpoolChunkRead(action.chunk, content, self.world.disk_chunk_s))

    def _run_loader(self, assignment: StorageAssignment) -> None:
        self.instance.set_storage_activity(lambda: self.world.now, relayed=False)

        def finish() -> None:
            self.instance.set_storage_activity(None, relayed=False)
            files = self.instance.files
            if files is None or self.disk_error:
                self.handle(LoaderFailed(assignment, StorageError("disk error")))
            else:
                self.instance.memory[:] = files
                self.world.storage_reads += [(self.instance.name, chunk) for chunk in range(len(files))]
                self.handle(LoaderFinished(assignment, self.instance.manifest))

        self.world.later(self.world.disk_chunk_s * self.world.chunks, finish, on=self.instance)

    def _measure(self) -> None:
        """Read a sample of the files, which takes as long as a chunk."""
        world, image_bytes = self.world, self.layout.image_bytes

        def finish() -> None:
            if self.instance.files is None or self.disk_error:
                self.handle(OwnLoadMeasured(None))
            elif not self.disk_stalled:
                replaces = self.instance.own_version is not None
                rate = image_bytes / (world.disk_chunk_s * world.chunks)
                storage = None if world.opaque_loader else StorageAssignment(kind="checkpoint", uri=URI, chunks=())
                own = OwnLoad("files", rate, world.load_s, storage, replaces_fork=replaces, is_sampled=False)
                self.handle(OwnLoadMeasured(own))

        world.later(world.disk_chunk_s, finish, on=self.instance)

    # -- the planner ------------------------------------------------------------------------------------

    async def _plan(self, request: RequestPlan) -> None:
        """Request a plan, as `rfork.receiver.planner_requests` does."""
        event: Event
        try:
            event = PlanReceived(await self._request(request))
        except (NoSource, PlannerUnreachable, PlannerRejected) as error:
            event = PlanFailed(error)
        self.handle(event)

    async def _request(self, request: RequestPlan) -> Plan:
        named = self._plan_named_weights or self.instance.served.manifest is not None
        if named and any(fault.error == SourceWeightsChanged.__name__ for fault in request.faults):
            self._open_candidates_at = self.world.now + self.world.settings.no_source_timeout_s
        plan = await self._call(request)
        has_sources = bool(plan.routes or plan.storage)
        must_open = not (has_sources or plan.is_paused) and self.world.now >= self._open_candidates_at
        if must_open and await self._open_candidates():
            plan = await self._call(RequestPlan((), request.assignments))
        self.had_sources = self.had_sources or bool(plan.routes or plan.storage)
        if plan.routes:
            self._plan_named_weights = plan.weights_id is not None
        return plan

    async def _open_candidates(self) -> bool:
        if self._candidates_opened:
            return False
        candidates = await self._candidates()
        if not candidates:
            return False
        self._candidates_opened = True
        self.instance.served.storage = candidates
        return True

    async def _candidates(self) -> tuple[StorageCandidate, ...]:
        """Return the storage that this instance can read."""
        if self.instance.files is None or self.disk_error:
            return ()
        kind: StorageType = "loader" if self.world.opaque_loader else "checkpoint"
        origin = None if self.world.opaque_loader else origin_of(self.instance.files)
        return (StorageCandidate(kind=kind, uri=URI, origin=origin),)

    async def _call(self, request: RequestPlan) -> Plan:
        instance, world = self.instance, self.world
        away_since: float | None = None
        silences = 0
        while True:
            message = ForkRequest(
                fork_id=self.fork_id,
                instance=instance.report(),
                faults=request.faults,
                current_assignments=request.assignments,
            )
            began = world.now
            try:
                plan = await world.planner.call(instance.name, instance.host, partial(request_plan, message))
                break
            except NetworkError as error:
                if self.had_sources or world.now >= self.machine.deadline_at:
                    raise
                if isinstance(error, PlannerUnreachable) and error.silent:
                    silences += 1
                    if silences > 1:
                        raise
                    continue
                if isinstance(error, PlannerRejected) and error.status not in RETRYABLE_STATUSES:
                    raise
                away_since = began if away_since is None else away_since
                timeout_s = min(MAX_PLANNER_OUTAGE_S, world.settings.no_source_timeout_s)
                if world.now - away_since >= timeout_s:
                    raise
                await world.sleep(RETRY_INTERVAL_S)
        if instance.own_version is not None and plan.version not in (None, instance.own_version):
            raise NoSource("the plan has another version")
        return plan

    def _send_progress(self) -> None:
        if self.ended_at is None and self.instance.alive and not self.world.ended:
            self.world.start(self._progress())
            self._reports += 1
            self._reports_with_chunks += bool(self.instance.served.chunk_state.verified)
            interval_s = progress_interval_s(self._reports, self._reports_with_chunks)
            self.world.later(interval_s, self._send_progress, on=self.instance)

    async def _progress(self) -> None:
        machine, instance = self.machine, self.instance
        rates = machine.active_rates(self.world.now)
        progress = ForkProgress(
            verified=instance.served.chunk_state.verified,
            bytes_read=machine.bytes_read,
            bytes_per_s=machine.bytes_read / max(self.world.now - self.began_at, PROGRESS_INTERVAL_S),
            active_bytes_per_s=rates.total,
            source_active_bytes_per_s=dict(rates.by_source),
            sources={share.source_id: share.verified_bytes for share in machine.stats.shares},
        )
        try:
            ack = await self.world.planner.call(
                instance.name,
                instance.host,
                lambda service, claimant: service.progress(self.fork_id, progress, claimant),
            )
        except PlannerRejected as error:
            if error.problem == "unknown-fork":
                self.handle(ReplanSuggested("the planner does not know this fork"))
        except PlannerUnreachable:
            pass
        else:
            self.handle(LeasesRenewed(ack.leases))
            if ack.replan_suggested is not None:
                self.handle(ReplanSuggested(ack.replan_suggested))

    # -- the end ----------------------------------------------------------------------------------------

    def _finish(self, error: RforkError | None) -> None:
        self._close_sources()
        self.abandoned = isinstance(error, SlowSources)
        if error is None:
            self._end("forked")
            return
        self._spool_stopped = True
        self.instance.fence()
        self._fall_back(error)

    def _close_sources(self) -> None:
        for source in self._sources.values():
            source.close()
        self.instance.set_storage_activity(None, relayed=False)

    def _fall_back(self, error: RforkError) -> None:
        """Load the weights without the sources that failed with this error."""
        if self.instance.files is None or self.disk_error:
            self._end(error.kind)
            return
        self.world.later(self.world.load_s, self._load_own_files, on=self.instance)

    def _load_own_files(self) -> None:
        """Run the fallback: load the instance's own files."""
        if self.instance.files is not None:
            self.instance.memory[:] = self.instance.files
            self._end("fallback")

    def _end(self, outcome: str) -> None:
        instance, world = self.instance, self.world
        self.ended_at, self.outcome = world.now, outcome
        instance.served.storage = ()
        is_loaded = outcome in LOADED
        if is_loaded:
            world.check_complete(self)
        if outcome == "forked":
            world.on_forked(self)
            instance.served.serve()
            instance.notify_readers()
            instance.send_report()
        elif is_loaded:
            instance.publish(self.loaded_version)
        result = ForkResult(
            outcome="forked" if outcome == "forked" else "fallback" if is_loaded else "failed",
            seconds=world.now - self.began_at,
            bytes_read=self.machine.bytes_read,
            reasons=tuple(f"{error.kind}: {error}" for error in self.machine.reasons),
        )
        self._result_sent = False
        if is_loaded:
            # Before the fork ends at the planner: in between, another fork would find a source without chunks.
            instance.when_acked(lambda: self._send_result(result))
            world.later(REPORT_TIMEOUT_S, lambda: self._send_result(result), on=instance)
        else:
            self._send_result(result)
        if not is_loaded:
            self._on_failed()

    @property
    def loaded_version(self) -> str:
        """Return the version of weights that no fork has received."""
        return self.instance.own_version or self.instance.served.version_by_content(self.instance.manifest)

    def _on_failed(self) -> None:
        """End the process, so that its readers lose it."""
        self.world.at_fault.add(self.instance.process.name)
        self.instance.process.kill()

    def _send_result(self, result: ForkResult) -> None:
        if not self._result_sent:
            self._result_sent = True
            self.world.start(self._report_end(result))

    async def _report_end(self, result: ForkResult) -> None:
        try:
            await self.world.planner.call(
                self.instance.name,
                self.instance.host,
                lambda service, claimant: service.finish(self.fork_id, result, claimant),
            )
        except NetworkError:
            return
