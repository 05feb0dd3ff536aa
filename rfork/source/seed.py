"""Seed: this process as a source of its image, complete or, as a relay, still receiving. Runs on the source.

It combines the exporters of each transport, the peer service that opens channels, lease verification and
egress limits, and the heartbeat to the planner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rfork.image.chunk_state import ChunkState
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.peer.server import PeerServer, PeerService, ServePeer
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.heartbeat import STOP_S, Heartbeat
from rfork.planner_client.lease import decode_key
from rfork.schema import InstanceAck, InstanceReport, Placement, StorageCandidate
from rfork.settings import InstanceSettings
from rfork.source.access_control import AccessControl
from rfork.source.access_control import InstanceIdentity as InstanceIdentity
from rfork.source.egress_limiter import ReaderRateAdvisor
from rfork.source.latency_controller import StepTimer
from rfork.tracing import Tracer
from rfork.tracing import get_tracer as process_tracer
from rfork.transport.base import Transport


class Seed(AccessControl):
    """Serves one image to holders of a lease. Use as a context manager, or `start` and `close`.

    Implements the transports' `AccessGate` and the peer service's `PeerBackend`. The seed owns `planner` and
    closes it. `tracer`: by default, this process's.
    """

    def __init__(
        self,
        image: Image,
        identity: InstanceIdentity,
        settings: InstanceSettings,
        transports: list[Transport],
        *,
        chunk_state: ChunkState | None = None,
        manifest: Manifest | None = None,
        planner: PlannerClient | None = None,
        serve_peer: ServePeer = PeerServer,
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(image, identity, settings, transports, chunk_state, manifest, tracer or process_tracer())
        self.storage: tuple[StorageCandidate, ...] = ()
        """Storage that this instance could read itself, as reported to the planner."""
        self._serve_peer = serve_peer
        self._peer: PeerService | None = None
        self._planner = planner
        self._heartbeat: Heartbeat | None = None
        if planner is not None:
            self._heartbeat = Heartbeat(
                planner,
                self.report,
                self._on_ack,
                instance_id=identity.instance_id,
                clock=self._planner_clock,
            )

    # -- lifecycle -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Open the exporters and the peer service, then start to report to the planner."""
        try:
            if self._exports.one_sided:
                self._rate_advisor = ReaderRateAdvisor(
                    self._egress_limiter, lambda: len(self._leases.readers), self._notify
                )
            if not self.suspended:
                self._open_exports()
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

    def set_lease_keys(self, lease_keys: Sequence[str]) -> None:
        """Set the keys (base64url) with which the planner signs leases for this instance."""
        self._leases.set_keys([decode_key(lease_key) for lease_key in lease_keys])

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
        """See `SuspendableImage.wait_report_acked`."""
        return self._heartbeat is not None and self._heartbeat.wait_acked(timeout)

    def drain(self, timeout: float) -> bool:
        """Accept no new readers and wait for the current ones; return True if all have finished in time."""
        self._served.drain()
        self._notify()
        self.notify_planner()
        deadline = time.monotonic() + timeout
        changed = threading.Event()
        with self.on_change(changed.set):
            while self._leases.readers:
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
        if drain_s > 0:
            self.drain(drain_s)
        if self._heartbeat is not None:
            self._heartbeat.stop(remove=True, within_s=leave_s)
        self._egress_limiter.close()
        if self._rate_advisor is not None:
            self._rate_advisor.close()
        self._close_servers()
        if self._planner is not None:
            self._planner.close()

    def _open_exports(self) -> None:
        self._exports.open(self.image, self)

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

    # -- reports of the engine -----------------------------------------------------------------------

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

    # -- the planner ---------------------------------------------------------------------------------

    def report(self) -> InstanceReport:
        """Return the instance's complete report for the planner."""
        layout = self.image.layout
        peer = self._peer
        provisional_id = self.chunk_state.provisional_id
        return InstanceReport(
            instance_id=self.identity.instance_id,
            model=self.identity.model,
            version=self.version,
            any_version=self.adopts_version and self._served.state == "loading",
            replica=self.identity.replica,
            rank=self.identity.rank,
            layout_id=layout.layout_id,
            weights_id=self._served.manifest.weights_id if self._served.manifest is not None else None,
            generation=self.generation,
            image_bytes=layout.image_bytes,
            chunk_count=len(layout.chunks),
            state=self._served.state,
            verified=self.chunk_state.verified if not self.suspended else (),
            # Without the suffix that distinguishes conflicting reads of the same files.
            provisional_id=provisional_id.partition("-")[0] if provisional_id is not None else None,
            storage=self.storage,
            address=peer.address if peer is not None else "closed:0",
            transports=tuple(self._exports),
            placement=Placement(
                host=self.settings.node_name,
                rack=self.settings.rack,
                zone=self.settings.zone,
                nvlink=self.settings.nvlink,
                pod=self.settings.pod,
            ),
            max_readers=self.settings.max_readers,
            egress_share=self.identity.egress_share,
            egress_rate=self._egress_limiter.current_limit,
            readers=self._leases.readers,
            has_lease_keys=self._leases.has_keys,
            clock_skew_s=self._planner_clock.skew_s,
        )

    def _on_ack(self, ack: InstanceAck) -> None:
        self.set_lease_keys(ack.lease_keys)
