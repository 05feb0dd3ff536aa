"""Seed: this process as a source of its image, complete or, as a relay, still receiving. Runs on the source.

`ServedImage` decides who may read which bytes of which generation. The seed runs it: it owns the lock, and combines
the exporters of each transport, the peer service that opens channels, the egress limits, and the heartbeat to the
planner.

An engine may sleep, offload or reallocate its weights. The exporters keep references to the image's memory and
register it with devices, so the engine must call `Seed.suspend` or `Seed.release_memory` before it frees or moves the
memory, and pass the new memory afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from typing_extensions import Self

from rfork.errors import LayoutMismatch, SourceBusy, SourceWeightsChanged, TransportUnavailable
from rfork.image import ranges
from rfork.image.chunks import ChunkState
from rfork.image.layout import Manifest
from rfork.image.memory import Image, compute_manifest
from rfork.logs import logger
from rfork.peer.base import BoxImage, Progress
from rfork.peer.server import PeerServer, PeerService, ServePeer
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.heartbeat import STOP_S, Heartbeat
from rfork.planner_client.lease import decode_key
from rfork.planner_client.planner_clock import PlannerClock
from rfork.schema import SAME_HOST_TRANSPORTS, InstanceAck, InstanceReport, StorageCandidate
from rfork.settings import InstanceSettings
from rfork.source.channels import ChannelTable, InflightReads, ServingSpans
from rfork.source.egress_limiter import EgressLimiter, ReaderRateAdvisor
from rfork.source.exporters import STATELESS_TRANSPORTS, ExporterSet
from rfork.source.latency_controller import MIN_RATE, LatencyController, StepTimer, StepTracker
from rfork.source.served_image import InstanceIdentity as InstanceIdentity
from rfork.source.served_image import ServedImage, VersionOf
from rfork.tracing import Tracer
from rfork.tracing import get_tracer as process_tracer
from rfork.transport.base import ControlStream, Endpoint, Transport
from rfork.transport.selection import select_transports

if TYPE_CHECKING:
    from rfork.placement.boxes import Box

EXPORTER_READY_TIMEOUT_S = 3.0
"""Time that a requested transport gets to become ready before the next one is used."""
MIN_RATE_PER_READER = 4 << 20
"""Bytes per second: above `InstanceSettings.min_source_bytes_per_s` for each in-flight chunk of a typical
reader.
"""
INFLIGHT_GRACE_S = 0.1
"""Time that a reader gets to receive its current slice before the bytes change."""
NOTIFY_GRACE_S = 0.5
"""Time for readers to learn that the weights changed, before the ports that they use are closed."""

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Connections:
    """Connections of a seed to other processes.

    Without a `planner` it reports to none. `serve_peer` creates the peer service. `tracer`: by default, this process's.
    """

    transports: Sequence[Transport]
    planner: PlannerClient | None = None
    serve_peer: ServePeer = PeerServer
    tracer: Tracer | None = None

    @classmethod
    def of(cls, settings: InstanceSettings) -> Connections:
        """Return the transports and the planner of the settings."""
        transports = select_transports(settings)
        return cls(transports, PlannerClient.of(settings) if settings.planner is not None else None)


class BoxService(Protocol):
    """Serves boxes of checkpoint tensors from an instance's own tensors; see `rfork.source.box_images`."""

    @property
    def map_bytes(self) -> bytes:
        """Encoded placement map of the instance."""
        ...

    def open(self, boxes: tuple[Box, ...]) -> BoxImage:
        """Serve these boxes as an image; return its identity once the planner knows it."""
        ...

    def fence(self) -> None:
        """Close all images, because the weights are about to change or to be released."""
        ...

    def close(self, drain_s: float = 0.0) -> None:
        """Close all images, after their readers have finished, or `drain_s` seconds. Further ones are refused."""
        ...


class Seed:
    """Serves one image to holders of a lease. Use as a context manager, or `start` and `close`.

    Implements the transports' `AccessGate`, the peer service's `PeerBackend` and the receiver's `ServingState`. Its
    listeners are notified of each change. The seed owns the planner's client and closes it.
    """

    def __init__(
        self,
        image: Image,
        identity: InstanceIdentity,
        settings: InstanceSettings,
        connections: Connections,
        *,
        chunk_state: ChunkState | None = None,
        manifest: Manifest | None = None,
        limits_of: Seed | None = None,
        is_producer: bool = False,
    ) -> None:
        """Without a chunk state, every chunk is verified. `manifest` is None until it is known (`set_manifest`).

        `limits_of`: the seed of this process whose limits of the egress rate apply to the sum of both; default: own.
        `is_producer`: this process fills the image itself; see `ServedImage`.
        """
        self.image = image
        self.identity = identity
        self.settings = settings
        self.served_bytes = 0
        self.opened_at: float | None = None
        """When a reader last opened a channel, on `time.monotonic()`'s clock; None: never."""
        self.read_on_host = False
        """True if a reader has opened a channel over a same-host transport."""
        self.boxes: BoxService | None = None
        """Serves targets with other layouts. Set once the image is complete; `close` closes it."""
        self.recapture: Callable[[], Image] | None = None
        """Returns the image of the served tensors where they are now; None: they are never replaced. Raises
        LayoutMismatch if the module has changed otherwise. Called after each update.
        """
        self.no_boxes_reason = "none was recorded for its model"
        """Reason if `boxes` is None, for targets."""
        self._served = ServedImage(
            image.layout,
            identity,
            settings.max_readers,
            chunk_state=chunk_state,
            manifest=manifest,
            is_producer=is_producer,
        )
        self._changing = threading.RLock()
        """Acquired for each change of the served image; listeners may be called meanwhile."""
        self._lock = threading.RLock()
        """Guards the leases, the listeners and `served_bytes`. No listener is called meanwhile."""
        self._updates = threading.Lock()
        """Acquired while the weights are updated, suspended or moved: one such change at a time."""
        self._update_count = 0
        self._digesting = threading.Lock()
        """Acquired while the memory is read without a lease."""
        self._listeners: list[Callable[[], None]] = []
        self._inflight_reads = InflightReads()
        self._exports = ExporterSet(connections.transports)
        self._exports_settled = threading.Event()
        """Set unless exporters are being opened or closed while others serve."""
        self._exports_settled.set()
        self._planner_clock = PlannerClock()
        self._limits_of = limits_of
        self._latency: LatencyController
        self._egress_limiter: EgressLimiter
        if limits_of is None:
            self._latency = LatencyController(settings.max_latency_ratio, floor=self._min_rate)
            self._egress_limiter = EgressLimiter(
                settings.max_egress_bytes_per_s, self._latency, part=self._governed_fraction
            )
        else:
            self._latency, self._egress_limiter = limits_of._latency, limits_of._egress_limiter
        self._copy_limiter = EgressLimiter(None, self._latency)
        self._rate_advisor: ReaderRateAdvisor | None = None
        if self._exports.one_sided:
            self._rate_advisor = ReaderRateAdvisor(self._egress_limiter, lambda: len(self._readers), self._notify)
        self._serving_spans = ServingSpans(
            connections.tracer or process_tracer(), self._egress_limiter, identity.instance_id
        )
        self._channels = ChannelTable(
            self._served.leases,
            self._lock,
            self._planner_clock.now,
            self._exports,
            self._serving_spans,
            on_expired=self._notify,
        )
        self._serve_peer = connections.serve_peer
        self._peer: PeerService | None = None
        self._planner = connections.planner
        self._heartbeat: Heartbeat | None = None
        if self._planner is not None:
            self._heartbeat = Heartbeat(
                self._planner,
                self.report,
                self._on_ack,
                instance_id=identity.instance_id,
                clock=self._planner_clock,
            )

    # -- lifecycle -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Open the exporters and the peer service, then start to report to the planner."""
        try:
            if not self.suspended:
                self._exports.open(self.image, self)
            self._channels.start()
            self._peer = self._serve_peer(self, self.settings)
            self._peer.start()
        except BaseException:
            self._close_servers()
            if self._planner is not None:
                self._planner.close()
            raise
        self.chunk_state.subscribe(self._notify)
        if self._heartbeat is not None:
            self._heartbeat.start()
        return self

    def drain(self, timeout: float) -> bool:
        """Accept no new readers and wait for the current ones; return True if all have finished in time."""
        with self._changing:
            self._served.drain()
        self._notify_all()
        deadline = time.monotonic() + timeout
        changed = threading.Event()
        with self.on_change(changed.set):
            while self._readers:
                changed.clear()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                # Leases that expire send no event, so check at least once a second.
                changed.wait(min(remaining, 1.0))
        return True

    def close(self, drain_s: float = 0.0, *, leave_s: float = STOP_S) -> None:
        """Drain for at most `drain_s` seconds, unregister at the planner, and stop serving.

        Waits at most `leave_s` seconds for the planner; without a response it removes the instance later.
        """
        drain_until = time.monotonic() + drain_s
        if drain_s > 0:
            self.drain(drain_s)
        if self.boxes is not None:
            self.boxes.close(max(0.0, drain_until - time.monotonic()))
        self._copy_limiter.close()
        if self._heartbeat is not None:
            self._heartbeat.stop(remove=True, within_s=leave_s)
        if self._limits_of is None:
            self._egress_limiter.close()
        if self._rate_advisor is not None:
            self._rate_advisor.close()
        self._close_servers()
        if self._planner is not None:
            self._planner.close()
        # The objects of a seed refer to each other: its memory is dropped now, as Python may collect them much later.
        self.image, self.recapture = Image.without_memory(self.image.layout), None

    def _close_servers(self) -> None:
        if self._peer is not None:
            self._peer.stop()
            self._peer = None
        self._channels.stop()
        self._exports.shut_down()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(self.settings.drain_timeout_s if exc_type is None else 0.0)

    # -- state of the image --------------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the image; None in a relay that does not know it yet."""
        return self._served.manifest

    @property
    def chunk_state(self) -> ChunkState:
        """Verified chunks of the image."""
        return self._served.chunk_state

    @property
    def generation(self) -> int:
        """Number of the generation: increased whenever the bytes change."""
        return self._served.generation

    @property
    def suspended(self) -> bool:
        """True if its memory is released, or about to be."""
        return self._served.suspended

    @property
    def draining(self) -> bool:
        """True if it accepts no new readers."""
        return self._served.draining

    @property
    def version(self) -> str | None:
        """Version of the served weights; changes only while nothing is served."""
        return self._served.version

    @version.setter
    def version(self, version: str | None) -> None:
        self._served.version = version

    def adopt_version(self, version: str) -> None:
        """Name the weights that are received from now on, unless this instance has a version of its own."""
        if self.adopts_version and version != self.version:
            log.info("version adopted from the fleet", version=version, previous=self.version)
            self.version = version

    @property
    def adopts_version(self) -> bool:
        """See `ServedImage.adopts_version`."""
        return self._served.adopts_version

    def version_by_content(self, manifest: Manifest) -> str:
        """See `ServedImage.version_by_content`."""
        return self._served.version_by_content(manifest)

    def version_after_update(self, stated: str | None, count: int) -> VersionOf:
        """See `ServedImage.version_after_update`."""
        return self._served.version_after_update(stated, count)

    @property
    def storage(self) -> tuple[StorageCandidate, ...]:
        """Storage that this instance could read itself, as reported to the planner."""
        return self._served.storage

    @storage.setter
    def storage(self, storage: tuple[StorageCandidate, ...]) -> None:
        self._served.storage = storage

    def manifest_snapshot(self) -> tuple[int, Manifest]:
        """Return generation and manifest of the image, consistent with each other.

        Raises SourceWeightsChanged if the image is not complete.
        """
        with self._changing:
            return self._served.snapshot()

    @contextmanager
    def local_read(self, generation: int) -> Iterator[Image]:
        """Read the image of this generation in this process, without a lease, inside the block.

        Changing the bytes or releasing the memory waits for the block: it must be short, and must not keep
        the image. Raises SourceWeightsChanged if the generation has changed.
        """
        with self._inflight_reads.track(_ignore_abort):
            # Checked inside the block, for which a later fence waits.
            self.check_generation(generation)
            yield self.image

    @contextmanager
    def long_read(self, generation: int) -> Iterator[Image]:
        """Read the image of this generation in this process, for as long as the block takes.

        Releasing the memory, and publishing other weights, wait for the block. Changing the bytes does not: the end
        of the block then raises SourceWeightsChanged, as its begin does if the generation has changed. So the block
        should compare `generation` often, and what it has read must be discarded after an exception.
        """
        with self._digesting:
            self.check_generation(generation)
            yield self.image
            self.check_generation(generation)

    def check_generation(self, generation: int) -> None:
        """Raise SourceWeightsChanged if the generation has changed."""
        if self.generation != generation:
            raise SourceWeightsChanged("the seed is changing or suspending its weights: what was read is discarded")

    # -- changes of a relay, made by its own fork ----------------------------------------------------

    def set_manifest(self, manifest: Manifest) -> None:
        """Set the manifest of a relay's image, which can serve its verified chunks from now on."""
        with self._changing:
            self._served.set_manifest(manifest)
        self._notify_all()

    def invalidate(self, chunks: Sequence[int]) -> None:
        """Mark chunks as wrong: a new generation notifies readers that have read them.

        Like `fence`, it waits for running reads: the chunks may be written afterwards.
        """
        with self._changing:
            self._served.invalidate(chunks)
        self._disconnect_readers()

    def report_storage_activity(self, read_at: Callable[[], float] | None, *, relayed: bool = False) -> None:
        """Notify readers that this instance, or (`relayed`) its upstream, is reading from storage.

        `read_at` is when storage last delivered bytes, on `time.monotonic()`'s clock; None:
        storage is not read.
        """
        with self._changing:
            notifies = self._served.set_storage_activity(read_at, relayed=relayed)
        if notifies:
            self._notify()

    def serve(self) -> None:
        """Become a seed: the image is complete and the engine is ready; a draining instance keeps draining."""
        with self._changing:
            self._served.serve()
        self._notify_all()

    # -- changes of the weights ----------------------------------------------------------------------

    def publish(self, generation: int | None = None, version: VersionOf | None = None) -> None:
        """Digest a complete image whose weights may have changed, then become a seed.

        Has no effect if it is fenced meanwhile, since the bytes may have changed under the digest, or if
        suspended. `generation` is the one in which the image became complete, which rules out fences since
        then. `version` names the weights; None: they are unchanged.
        """
        with self._digesting:
            generation = self.generation if generation is None else generation
            if generation != self.generation:
                log.warning("weights not served yet: they are changing again", generation=self.generation)
                return
            if self.suspended:
                log.warning("weights not served yet: they are suspended", generation=generation)
                return
            manifest = compute_manifest(self.image)
        with self._changing:
            published = self._served.publish(manifest, generation, version)
        if published:
            self._notify_all()
        else:
            log.warning("weights not served yet: they changed while they were digested", generation=self.generation)

    def fence(self) -> None:
        """Stop serving because the weights are about to change, and disconnect readers of the old ones.

        Returns once no exporter thread reads the image; a reader that does not receive its data is
        disconnected for that. One-sided transports (transfer_engine) read without this process: their
        channels end and their connections are closed, and bytes that still arrive (RDMA) are detected by
        their digest. `publish` serves the weights again; `updating` does both.
        """
        with self._changing:
            self._served.clear()
        self._disconnect_readers()

    @contextmanager
    def updating(self, version: str | None = None) -> Iterator[None]:
        """Change the weights inside the block: fences before it, and publishes after it.

        Tensors of a module may also be replaced by tensors of the same shape, dtype and strides, as by
        ``load_state_dict(…, assign=True)``. Raises LayoutMismatch after the block, and stays fenced, if a tensor is
        missing or has another shape or dtype, or if a compared number, flag or text has changed, which a fork would not
        receive: such a module needs a new seed. Integers may change, because modules count their updates.

        `version` names the new weights; by default they get a version that no other weights have. Concurrent
        updates of several threads are serialized; do not nest blocks. If the block raises, the weights are
        undefined: the seed stays fenced until the next update or `publish`.
        """
        with self._updates:
            self.fence()
            self._update_count += 1
            choose = self.version_after_update(version, self._update_count)
            yield
            image = self.image if self.recapture is None or self.suspended else self.recapture()
            if image.shares_memory_with(self.image):
                self.publish(version=choose)
            else:
                self._serve_moved(image, None, choose)

    def suspend(self) -> None:
        """Release the weights because the engine is about to free or move them (sleep mode, offloading).

        Fences, disconnects all readers and stops serving. Returns once no thread reads the memory, no device
        has it registered and no part of the seed keeps it alive; long reads are aborted. The planner is
        notified. `resume` undoes it; a second call has no effect. Not allowed inside `updating`.
        """
        with self._updates:
            self._suspend()

    def _suspend(self) -> bool:
        """Suspend; return True if it was not suspended before, which fences it and changes the generation."""
        if self.suspended and self.image.is_released:
            return False
        with self._changing:
            self._served.suspend()
        has_readers = self._has_listeners()
        self.fence()
        if has_readers:
            # Requests now fail with the reason. A reader that finds the port closed would blame the source.
            time.sleep(NOTIFY_GRACE_S)
        try:
            with self._digesting:
                try:
                    self._exports.close()
                finally:  # even if an exporter fails to close: it gets no more requests, and the others are closed
                    self.image = Image.without_memory(self.image.layout)
        finally:
            self._disconnect_readers()  # readers that arrived before the exporters closed
        return True

    def resume(self, image: Image, generation: int | None = None, version: VersionOf | None = None) -> None:
        """Serve complete weights again, possibly at other addresses and with other values.

        Registers and digests them, and serves them under a new generation. Suspends first if `suspend` was not
        called, except for memory that the seed already has, which it only digests unless it serves it.

        `generation` is the one in which the weights became complete. If it was fenced since then, by `suspend` too,
        nothing happens, because the bytes may be changing again. `version` is as for `publish`. Raises
        LayoutMismatch for another layout, and TransportUnavailable like `start`: the seed stays suspended.
        """
        if image.layout.layout_id != self.image.layout.layout_id:
            raise LayoutMismatch(f"the seed's layout is {self.image.layout.layout_id}, not {image.layout.layout_id}")
        with self._updates:
            if self._exports.is_shut_down or generation not in (None, self.generation):
                return
            if not self.suspended and image.shares_memory_with(self.image):
                # An earlier attempt failed or was fenced.
                if self._served.manifest is None or not self.chunk_state.complete:
                    self.publish(generation, version)
                return
            self._serve_moved(image, generation, version)

    def _serve_moved(self, image: Image, generation: int | None, version: VersionOf | None) -> None:
        """Serve an image of the same layout in other memory."""
        if self._suspend() and generation is not None:
            generation += 1
        self.image = image
        try:
            self._exports.open(image, self)
        except BaseException:
            self.image = Image.without_memory(image.layout)
            raise
        with self._changing:
            self._served.resume()
        self.publish(generation, version)

    def release_memory(self) -> None:
        """Release the memory because the weights are about to be loaded into other memory.

        Like `suspend`, but readers that arrive meanwhile get a slot, over a transport that needs no memory
        for it, and wait for the weights. `memory_restored` ends it.
        """
        with self._updates:
            self._exports_settled.clear()
            try:
                has_readers = self._has_listeners()
                if has_readers or self._served.manifest is not None or self.chunk_state.verified:
                    with self._changing:
                        self._served.clear()
                    # The planner first: disconnected readers request a new plan, which should name this source again.
                    self.wait_report_acked(NOTIFY_GRACE_S)
                    self._disconnect_readers()
                if has_readers:
                    time.sleep(NOTIFY_GRACE_S)
                with self._digesting:
                    self._exports.close(keep=STATELESS_TRANSPORTS)
            finally:
                self._exports_settled.set()

    def memory_restored(self, version: VersionOf | None = None) -> None:
        """Digest and serve complete weights in new memory, over all transports.

        `version` is as for `publish`.
        """
        with self._updates:
            reopened = self._exports.reopen_missing(self.image, self)
            self.notify_planner()
            self.publish(version=version)
        if reopened and self._has_listeners():
            self.invalidate(())  # disconnects waiting readers, which then connect over the best transport

    def _disconnect_readers(self) -> None:
        """Notify the readers of the previous generation, close their channels, and wait for their running reads.

        No direct reads are allowed from now on.
        """
        self._notify_all()  # first: a reader whose connection is closed before it is notified would blame the source
        if self._channels.close_all():
            self._notify()
        if self.boxes is not None:
            self.boxes.fence()
        if aborted := self._inflight_reads.drain(INFLIGHT_GRACE_S):
            log.info("readers disconnected, as the bytes are about to change", readers=aborted)

    # -- AccessGate: called by exporters -------------------------------------------------------------

    def authorize(self, token: str, begin: int, end: int) -> str:
        """See `rfork.transport.base.AccessGate.authorize`."""
        with self._lock:
            return self._served.authorize(token, begin, end, self._planner_clock.now())

    @contextmanager
    def read_guard(self, token: str, begin: int, end: int, abort: Callable[[], None]) -> Iterator[None]:
        """See `rfork.transport.base.AccessGate.read_guard`."""
        with self._inflight_reads.track(abort):
            # Checked only now: a later fence waits for this block, an earlier one rejects it.
            self.authorize(token, begin, end)
            yield

    def acquire_bytes(self, max_bytes: int, fork_id: str) -> int:
        """See `rfork.transport.base.AccessGate.acquire_bytes`."""
        granted = self._egress_limiter.grant(max_bytes, fork_id)
        with self._lock:
            self.served_bytes += granted
        self._serving_spans.add(fork_id, granted)
        return granted

    def acquire_copy(self, max_bytes: int) -> int:
        """Wait until a thread of this process may copy some of `max_bytes` bytes of the weights; return how many.

        Copies are slower while they delay the engine's steps, as reads are.
        """
        return self._copy_limiter.grant(max_bytes, "copy")

    def version_tag(self) -> str:
        """See `rfork.transport.base.AccessGate.version_tag`."""
        return f"{self.identity.instance_id}-{self.generation}"

    # -- PeerBackend: called by the peer service -----------------------------------------------------

    @property
    def has_lease_keys(self) -> bool:
        """See `rfork.peer.call_guard.LeaseChecker`."""
        return self._served.leases.has_keys

    def check(self, token: str) -> str:
        """Return the fork_id of a token's lease; raises like `AccessGate.authorize`."""
        with self._lock:
            return self._served.check(token, self._planner_clock.now())

    def progress_since(self, reported: tuple[ranges.Range, ...]) -> Progress:
        """See `rfork.peer.servicer.PeerBackend.progress_since`."""
        rate = self._rate_advisor.per_reader_rate() if self._rate_advisor is not None else None
        return self._served.progress_since(reported, time.monotonic(), rate)

    def open_channel(self, fork_id: str, layout_id: str, transports: list[str], address: str) -> tuple[str, Endpoint]:
        """Open a slot for the reader at this address; return an endpoint of the first transport that both
        sides support.
        """
        self._served.check_can_open(layout_id)
        self._exports_settled.wait(EXPORTER_READY_TIMEOUT_S)
        channel_id, endpoint = self._open_on_first(transports, fork_id, address)
        self.opened_at = time.monotonic()
        self.read_on_host = self.read_on_host or endpoint.transport in SAME_HOST_TRANSPORTS
        self._notify()  # one more reader shares the rate
        return channel_id, endpoint

    def _open_on_first(self, transports: list[str], fork_id: str, address: str) -> tuple[str, Endpoint]:
        busy: SourceBusy | None = None
        for name in transports:
            exporter = self._exports.get(name)
            if exporter is None:
                continue
            # A reader that is sent to another transport stays there, so a better one is worth waiting for.
            if not exporter.ready(time.monotonic() + EXPORTER_READY_TIMEOUT_S):
                busy = busy or SourceBusy(f"the source's transport {name} is not ready yet")
                continue
            try:
                return self._channels.open(fork_id, name, address)
            except SourceBusy as error:  # possibly just not ready yet: it stays on offer
                busy = busy or error
            except TransportUnavailable as error:
                # Detected only now, on a thread of its exporter: use the next transport.
                self._exports.disable(name, error)
                self.notify_planner()
        # A reader that may retry gets that error; otherwise the reason why it cannot, which blames no
        # instance.
        known = busy or self._exports.disabled_reason(transports)
        offered = ", ".join(sorted(self._exports)) or "no transport"
        raise known or SourceWeightsChanged(f"the source offers {offered} now, not {', '.join(transports)}")

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        """Return True if this fork has an open channel with this id."""
        with self._lock:
            return self._served.leases.has_channel(channel_id, fork_id)

    def control_stream(self, channel_id: str, stream: ControlStream) -> None:
        """Run the exporter's side of a channel's control stream until the stream ends; blocks."""
        self._channels.run_control_stream(channel_id, stream)

    def placement(self) -> bytes:
        """See `rfork.peer.servicer.PeerBackend.placement`."""
        return self._box_service.map_bytes

    def open_boxes(self, boxes: bytes) -> BoxImage:
        """See `rfork.peer.servicer.PeerBackend.open_boxes`."""
        # Imported where it is used: only targets of other layouts request boxes.
        from rfork.placement.boxes import decode_boxes

        service = self._box_service
        try:
            decoded = decode_boxes(boxes)
        except ValueError as error:
            raise LayoutMismatch(f"the request for boxes is invalid: {error}") from None
        return service.open(decoded)

    @property
    def _box_service(self) -> BoxService:
        service = self.boxes
        if service is None:
            raise LayoutMismatch(f"this instance has no placement map: {self.no_boxes_reason}")
        return service

    def close_channel(self, channel_id: str) -> None:
        """Release a reader's slot."""
        self._channels.close(channel_id)
        self._notify()

    def on_change(self, listener: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `listener` after each change of chunks, manifest, state or readers, on any thread."""

        @contextmanager
        def subscribed() -> Iterator[None]:
            with self._lock:
                self._listeners.append(listener)
            try:
                yield
            finally:
                with self._lock:
                    self._listeners.remove(listener)

        return subscribed()

    def _has_listeners(self) -> bool:
        """Return True if there are listeners for changes: every reader with a channel is one."""
        with self._lock:
            return bool(self._listeners)

    def _notify(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _notify_all(self) -> None:
        """Notify the readers and the planner."""
        self._notify()
        self.notify_planner()

    # -- rate limits and reports of the engine -------------------------------------------------------

    def record_step_latency(self, seconds: float) -> None:
        """Record that one step of the engine's own work ended now and took `seconds`.

        Call it on any thread for similar, frequent units: each decode step, or each request divided by its
        tokens. It costs about a microsecond and never blocks. From these durations the seed derives the
        undisturbed duration of a step, and sends more slowly while steps take longer
        (`InstanceSettings.max_latency_ratio`; see `rfork.source.latency_controller`).
        """
        self._latency.record_step(seconds)

    def measure_step(self) -> StepTimer:
        """Measure one step: ``with seed.measure_step():`` calls `record_step_latency` with the duration of
        the block.

        Preferable, because it also reports steps that have started and not ended. A step that raises does not
        count.
        """
        return self._latency.measure_step()

    def track_steps(self) -> StepTracker:
        """Return a tracker of steps that one device executes one after another although they are launched earlier.

        For engines whose calls return before the device has finished.
        """
        return self._latency.track_steps()

    @property
    def has_readers(self) -> bool:
        """True if a fork has a slot."""
        return bool(self._readers)

    @property
    def _readers(self) -> tuple[str, ...]:
        """Forks with a slot."""
        with self._lock:
            return self._served.leases.readers(self._planner_clock.now())

    def _min_rate(self) -> int:
        """Minimum egress rate regardless of the engine's load, so that no reader appears stalled."""
        return max(MIN_RATE, MIN_RATE_PER_READER * len(self._readers))

    def _governed_fraction(self) -> float:
        """Return the fraction of the rate that the egress limiter grants; readers on one-sided transports
        have the rest.

        All readers with a slot have equal shares. Readers without one (over http with a lease only) share the
        granted part, which is at least one reader's share.
        """
        readers = len(self._readers)
        return max(1, readers - self._channels.reader_count(self._exports.one_sided)) / max(1, readers)

    # -- the planner ---------------------------------------------------------------------------------

    def set_lease_keys(self, lease_keys: Sequence[str]) -> None:
        """Set the keys (base64url) with which the planner signs leases for this instance."""
        keys = [decode_key(lease_key) for lease_key in lease_keys]
        with self._lock:
            self._served.leases.set_keys(keys, self._planner_clock.now())

    def notify_planner(self) -> None:
        """Report to the planner now instead of at the next heartbeat."""
        if self._heartbeat is not None:
            self._heartbeat.send_now()

    def wait_registered(self, timeout: float) -> bool:
        """Block until the planner has acknowledged any report; return False after `timeout` seconds.

        To wait for the latest report, use `wait_report_acked`.
        """
        return self._heartbeat is not None and self._heartbeat.wait_connected(timeout)

    def wait_report_acked(self, timeout: float) -> bool:
        """Report to the planner now and wait for the acknowledgement; return False if it does not arrive in
        time.
        """
        return self._heartbeat is not None and self._heartbeat.wait_acked(timeout)

    def report(self) -> InstanceReport:
        """Return the instance's complete report for the planner."""
        peer = self._peer
        egress_rate = self._egress_limiter.current_limit
        with self._lock:
            return self._served.report(
                self._planner_clock.now(),
                peer.address if peer is not None else "closed:0",
                tuple(self._exports),
                self.settings.placement,
                egress_rate=egress_rate,
                clock_skew_s=self._planner_clock.skew_s,
            )

    def _on_ack(self, ack: InstanceAck) -> None:
        self.set_lease_keys(ack.lease_keys)


def _ignore_abort() -> None:
    """Do nothing: a local read is short and ends by itself."""
