"""Runs one transfer: executes the actions of its state machine on threads, and feeds back what happens.

Runs on the target. A thread that has an event handles it under one lock, and executes the actions in order, so that
a worker gets its next read without waiting for another thread. The caller's thread checks timeouts and runs the
loader. Worker threads read chunks and digest them in place, so that the verification of one chunk overlaps the
transfer of others. Each source has a thread of its own (`rfork.receiver.sources`). Plans are requested on another
thread, so that a planner that does not respond delays no read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from typing_extensions import assert_never

from rfork.errors import (
    ForkCancelled,
    NoSource,
    PlannerRejected,
    PlannerUnreachable,
    RforkError,
    TargetError,
    without_frames,
)
from rfork.image.chunks import ChunkState
from rfork.image.layout import Manifest
from rfork.logs import logger
from rfork.receiver import events
from rfork.receiver.events import Action, Event
from rfork.receiver.machine import OWN_STORAGE_READS, TransferMachine
from rfork.receiver.own_load import OwnLoad
from rfork.receiver.report import TransferStats
from rfork.receiver.source_reads import ActiveRates
from rfork.receiver.sources import PeerSource, SourceFactory, StorageSource
from rfork.receiver.spool import SpoolReader
from rfork.schema import ChunkAssignment, Lease, Plan, SourceFault, StorageAssignment
from rfork.storage.spool import Spool
from rfork.tracing import TraceContext, current_context, use_context

log = logger(__name__)

MIN_CPU_S: Final = 0.001
"""CPU time that counts as progress of a loader."""
MIN_BYTES: Final = 64 << 10
"""Bytes whose reading counts as progress of a loader."""
PROCESS_IO: Final = Path("/proc/self/io")
"""Linux: bytes that this process has read, by system calls (rchar) and from disks, also through maps
(read_bytes).
"""

Replan = Callable[[tuple[SourceFault, ...], tuple[ChunkAssignment, ...]], Plan]
"""Requests a plan, given the faults since the last plan and the current assignments."""
Observer = Callable[[Event | None, float, Sequence[Action]], None]
"""Receives each event with its time and the actions that followed; the first event is None."""


class ServingState(Protocol):
    """Interface of the fork to this instance's seed."""

    def set_manifest(self, manifest: Manifest) -> None:
        """Set the manifest of the image."""
        ...

    def invalidate(self, chunks: Sequence[int]) -> None:
        """Notify readers that these chunks, which were offered, are wrong."""
        ...

    def fence(self) -> None:
        """Drop all chunks and the manifest."""
        ...

    def adopt_version(self, version: str) -> None:
        """Name the weights that are received from now on, unless this instance has a version of its own."""
        ...

    def report_storage_activity(self, read_at: Callable[[], float] | None, *, relayed: bool = False) -> None:
        """Set the time of the last storage activity, local or (`relayed`) of a source that this instance
        waits for.
        """
        ...


class Transfer:
    """The transfer of one fork. Call `run` once.

    `source_factory` creates the sources of a plan; its loaders run on the caller's thread if the planner elected
    this instance to run one. `replan` requests a plan from the planner; `serving_state` receives the manifest
    before the first chunk verified against it is served. `spool` is that of a previous process. `observer`
    receives everything that the machine did, for example to replay it.
    """

    def __init__(
        self,
        source_factory: SourceFactory,
        chunk_state: ChunkState,
        replan: Replan,
        serving_state: ServingState,
        spool: Spool | None = None,
        observer: Observer | None = None,
    ) -> None:
        context = source_factory.context
        self._image = context.image
        self._chunk_state = chunk_state
        self._settings = context.settings
        self._source_factory = source_factory
        self._replan = replan
        self._serving_state = serving_state
        self._timer = context.timer
        self._observer = observer
        self._tasks: SimpleQueue[events.RunLoader | events.Finish | BaseException | None] = SimpleQueue()
        """Work of the caller's thread; None: a tick is due earlier than it assumed."""
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._tick_due = 0.0
        self._trace: TraceContext | None = None
        self._lock = threading.RLock()  # guards the machine, and keeps actions in order
        self._machine = TransferMachine(
            context.image.layout,
            context.settings,
            instance_id=context.instance_id,
            deadline_at=context.timer.deadline,
            spool_records=spool.records if spool is not None else None,
            own_storage=source_factory.own_storage.scope,
        )
        self._error: BaseException | None = None
        self._sources: dict[int, PeerSource | StorageSource] = {}
        self._closed: set[int] = set()  # connections
        self._closing: list[threading.Thread] = []
        self._spool = SpoolReader(spool, context.image, self._handle) if spool is not None else None
        self._planning: threading.Thread | None = None
        self._work: SimpleQueue[events.ReadChunk | events.DigestKeptChunk | None] = SimpleQueue()
        self._stopping = False
        self._workers = [
            threading.Thread(target=self._work_loop, name=f"rfork-read-{number}", daemon=True)
            for number in range(context.settings.max_inflight_chunks + OWN_STORAGE_READS)
        ]

    # -- interface for other threads --------------------------------------------------------------------

    @property
    def stats(self) -> TransferStats:
        """Statistics so far, also of a failed transfer."""
        with self._lock:
            return self._machine.stats

    @property
    def active_rates(self) -> ActiveRates:
        """Rates of the peers while chunks were being read from them."""
        with self._lock:
            return self._machine.active_rates(time.monotonic())

    @property
    def reasons(self) -> tuple[RforkError, ...]:
        """Each failure of a source so far, in order."""
        with self._lock:
            return tuple(self._machine.reasons)

    def update_leases(self, leases: Mapping[str, Lease]) -> None:
        """Replace the lease tokens, by source."""
        self._handle(events.LeasesRenewed(leases))

    def request_replan(self, reason: str) -> None:
        """Request a new plan soon; the current one stays in use until then."""
        self._handle(events.ReplanSuggested(reason))

    def cancel(self) -> None:
        """Make `run` raise ForkCancelled soon; no effect once it has returned or raised."""
        self._tasks.put(ForkCancelled("the fork was cancelled"))

    # -- the caller's thread ----------------------------------------------------------------------------

    def run(self) -> TransferStats:
        """Fill the image; returns once every chunk is verified.

        Raises DeadlineExceeded, NoSource (the planner knows none, or all that it knows failed),
        PlannerUnreachable, PlannerRejected or ForkCancelled. Nothing is written to the image after it returns or
        raises.
        """
        self._trace = current_context()
        for worker in self._workers:
            worker.start()
        if self._spool is not None:
            self._spool.start()
        try:
            self._handle(None)
            while self._run_task():
                pass
        finally:
            self._stop()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # with it, this frame would keep the fork's memory; see `_stop`
        return self.stats

    def _run_task(self) -> bool:
        """Run the next task of the caller's thread, or a tick once it is due; returns False at the end."""
        with self._lock:
            now = time.monotonic()
            self._tick_due = self._machine.wake_at(now)
        try:
            task = self._tasks.get(timeout=max(0.0, self._tick_due - now))
        except Empty:
            self._handle(self._tick())
            return True
        if isinstance(task, BaseException):
            self._error = task
            return False
        if isinstance(task, events.Finish):
            self._error = task.error
            return False
        if task is not None:
            self._load(task.assignment)
        return True

    def _tick(self) -> events.Tick:
        now = time.monotonic()
        with self._lock:
            activity = {
                connection: source.activity(now)
                for connection, source in self._sources.items()
                if connection not in self._closed
            }
        spool_at, spool_bytes = (self._spool.advanced_at, self._spool.bytes_read) if self._spool else (0.0, 0)
        return events.Tick(activity, spool_at, spool_bytes)

    # -- any thread -------------------------------------------------------------------------------------

    def _handle(self, event: Event | None) -> None:
        """Pass an event to the machine and execute its actions; None starts it.

        An event that an action causes on this thread is handled after the remaining actions.
        """
        with self._lock:
            if event is not None:
                self._events.append(event)
            if self._is_handling or self._stopping:
                return
            self._is_handling = True
            try:
                if event is None:
                    self._step(None)
                while self._events:
                    self._step(self._events.popleft())
            except BaseException as error:  # raised on the caller's thread
                self._tasks.put(error)
            finally:
                self._is_handling = False
            if self._machine.wake_at(time.monotonic()) < self._tick_due:
                self._tick_due = 0.0
                self._tasks.put(None)

    def _step(self, event: Event | None) -> None:
        now = time.monotonic()
        actions = self._machine.start(now) if event is None else self._machine.handle(event, now)
        self._timer.extend_deadline(self._machine.deadline_at)
        if self._observer is not None:
            self._observer(event, now, actions)
        for action in actions:
            self._execute(action)

    def _execute(self, action: Action) -> None:
        match action:
            case events.ReadChunk() | events.DigestKeptChunk():
                self._work.put(action)
            case events.MarkVerified(chunk, digest):
                self._chunk_state.mark_verified(chunk, digest)
            case events.RequestPlan():
                self._start_planning(action)
            case events.OpenPeer(connection, route):
                with use_context(self._trace):
                    self._open(connection, self._source_factory.open_peer(route, connection, self._handle))
            case events.OpenStorage(connection, assignment):
                with use_context(self._trace):
                    self._open(connection, self._source_factory.open_storage(assignment, connection, self._handle))
            case events.RenewLease(connection, lease):
                source = self._sources[connection]
                if isinstance(source, PeerSource):
                    source.renew(lease)
            case events.MeasureOwnLoad():
                # Not joined at the end: storage may hang.
                threading.Thread(target=self._measure, name="rfork-measure", daemon=True).start()
            case events.CompareFiles(connection, digests):
                source = self._sources[connection]
                if isinstance(source, StorageSource):
                    source.compare(digests)
            case events.PrefetchChunks(connection):
                source = self._sources[connection]
                if isinstance(source, StorageSource):
                    source.prefetch(action)
            case events.CloseSource(connection, error):
                self._close(connection, error)
            case events.ExcludeStorage(name):
                self._source_factory.own_storage.remove(name)
            case events.ReadSpool():
                if self._spool is not None:
                    self._spool.read(action)
            case events.StopSpool():
                if self._spool is not None:
                    self._spool.stop()
            case events.RunLoader() | events.Finish():
                self._tasks.put(action)
            case events.SetManifest(manifest):
                self._serving_state.set_manifest(manifest)
            case events.SetProvisionalId(provisional_id):
                self._chunk_state.set_provisional_id(provisional_id)
            case events.InvalidateChunks(chunks):
                self._serving_state.invalidate(chunks)
            case events.FenceImage():
                self._serving_state.fence()
            case events.AdoptVersion(version):
                self._serving_state.adopt_version(version)
            case events.ReportStorageActivity(active_at, relayed):
                read_at = partial(_constant, active_at) if active_at is not None else None
                self._serving_state.report_storage_activity(read_at, relayed=relayed)
            case _:
                assert_never(action)

    def _open(self, connection: int, source: PeerSource | StorageSource) -> None:
        self._sources[connection] = source
        source.thread.start()

    def _close(self, connection: int, error: RforkError | None) -> None:
        source = self._sources[connection]
        if error is not None:
            source.source_span.fail(error)
        # Closing waits until none of the source's reads can write any more, so it has a thread of its own.
        self._closed.add(connection)
        closing = threading.Thread(target=source.close, name="rfork-source-close", daemon=True)
        self._closing.append(closing)
        closing.start()

    def _measure(self) -> None:
        own_load: OwnLoad | None = None
        try:
            with use_context(self._trace):
                own_load = self._source_factory.own_storage.measure()
        except RforkError as error:
            log.warning("own storage cannot be measured", reason=str(error))
        except Exception:  # a bug must not end the fork
            log.exception("unexpected error while own storage was measured")
        self._handle(events.OwnLoadMeasured(own_load))

    def _load(self, assignment: StorageAssignment) -> None:
        self._serving_state.report_storage_activity(LoaderLiveness().last_activity)
        try:
            manifest = self._source_factory.own_storage.run_loader(assignment)
        except RforkError as error:
            self._handle(events.LoaderFailed(assignment, error))
        else:
            self._handle(events.LoaderFinished(assignment, manifest))
        finally:
            self._serving_state.report_storage_activity(None)

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
        for _ in self._workers:
            self._work.put(None)
        if self._spool is not None:
            self._spool.stop()
        for connection, source in self._sources.items():
            if connection not in self._closed:
                source.close()
        for worker in self._workers:
            worker.join()
        for source in self._sources.values():
            source.thread.join()
        for closing in self._closing:
            closing.join()
        if self._spool is not None:
            self._spool.join()
        if self._planning is not None:
            self._planning.join()
        self._serving_state.report_storage_activity(None)
        # Sources and the frames of errors refer to this object. Without that, the target's memory would outlive the
        # fork and its module until the garbage collector ran, which takes long in a process with many objects.
        self._sources.clear()
        for error in self._machine.reasons:
            without_frames(error)

    # -- the planning thread ----------------------------------------------------------------------------

    def _start_planning(self, request: events.RequestPlan) -> None:
        closing, self._closing = self._closing, []
        self._planning = threading.Thread(
            target=self._request_plan, args=(request, closing, self._trace), name="rfork-plan", daemon=True
        )
        self._planning.start()

    def _request_plan(
        self, request: events.RequestPlan, closing: Sequence[threading.Thread], trace: TraceContext | None
    ) -> None:
        for thread in closing:  # a source that is opened again must have released the previous reader slot
            thread.join()
        try:
            with use_context(trace):
                plan = self._replan(request.faults, request.assignments)
        except (NoSource, PlannerUnreachable, PlannerRejected) as error:
            self._handle(events.PlanFailed(error))
        except BaseException as error:  # raised on the caller's thread
            self._tasks.put(error)
        else:
            self._handle(events.PlanReceived(plan))

    # -- worker threads ---------------------------------------------------------------------------------

    def _work_loop(self) -> None:
        while (work := self._work.get()) is not None:
            if self._stopping:
                continue
            self._handle(self._digest_kept(work) if isinstance(work, events.DigestKeptChunk) else self._read(work))

    def _digest_kept(self, request: events.DigestKeptChunk) -> events.KeptChunkDigested:
        try:
            return events.KeptChunkDigested(request.chunk, self._image.digest(request.chunk))
        except Exception:  # out of memory, or a bug: a source serves the chunk
            log.exception("digest failed")
            return events.KeptChunkDigested(request.chunk, None)

    def _read(self, request: events.ReadChunk) -> events.ChunkDigested | events.ReadFailed:
        source, began = self._sources[request.connection], time.monotonic()
        try:
            source.read(request)
            self._handle(events.ChunkReceived(request.connection, request.chunk, time.monotonic() - began))
            needs_digest = self._settings.verify_chunks or isinstance(source, StorageSource)
            digest = self._image.digest(request.chunk) if needs_digest else None
        except RforkError as error:
            return events.ReadFailed(request.connection, request.chunk, error)
        except Exception as error:  # out of memory, or a bug: a failure of this side, which must not hang the fork
            log.exception("unexpected error in a read", chunk=request.chunk)
            text = f"unexpected error while chunk {request.chunk} was read: {type(error).__name__}: {error}"
            return events.ReadFailed(request.connection, request.chunk, TargetError(text))
        return events.ChunkDigested(request.connection, request.chunk, digest)


def _constant(value: float) -> float:
    return value


class LoaderLiveness:
    """Detects whether an opaque loader still makes progress: watches the thread that creates it.

    A loader reports nothing, so progress is inferred from the CPU time of its thread and from the bytes that its
    process has read: a loader that hangs in a read, or waits for one, uses no CPU time and reads nothing.
    `last_activity` may be called from any thread while the watched one is alive.
    """

    def __init__(self) -> None:
        # Without a clock per thread, use that of the process: too lenient to a loader rather than too strict.
        own = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if own else time.CLOCK_PROCESS_CPUTIME_ID
        self._lock = threading.Lock()
        self._cpu_s = time.clock_gettime(self._clock)
        self._read = _process_bytes_read()
        self._at = time.monotonic()

    def last_activity(self) -> float:
        """Return when it last made progress, as a `time.monotonic()` value."""
        with self._lock:
            cpu_s, read = time.clock_gettime(self._clock), _process_bytes_read()
            if cpu_s - self._cpu_s >= MIN_CPU_S or read - self._read >= MIN_BYTES:
                self._cpu_s, self._read, self._at = cpu_s, read, time.monotonic()
            return self._at


def _process_bytes_read() -> int:
    try:
        lines = PROCESS_IO.read_text().splitlines()
    except OSError:  # not on Linux, or not readable: the CPU time alone decides
        return 0
    counts = dict(line.split(": ", 1) for line in lines)
    return int(counts.get("rchar", 0)) + int(counts.get("read_bytes", 0))
