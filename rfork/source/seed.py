"""A seed: this process as a source of its image, complete or, as a relay, still receiving.

It puts together what giving needs: the exporters of each transport, the peer service that hands out
channels, the lease book and the governor that guard both, and the heartbeat that tells the planner.
Everything here runs on the source.
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
from rfork.source.latency_controller import StepTimer
from rfork.source.rate_advisor import ReaderRateAdvisor
from rfork.tracing import Tracer
from rfork.tracing import get_tracer as process_tracer
from rfork.transport.base import Transport


class Seed(AccessControl):
    """Gives one image to whoever holds a lease. Use as a context manager, or `start` and `close`.

    Implements the transports' `Gate` and the peer service's `PeerBackend`. `planner` is the seed's own:
    closed with it. `tracer`: this process's, unless it is given.
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
        """What this instance could read by itself, as the planner is told."""
        self._serve_peer = serve_peer
        self._peer: PeerService | None = None
        self._planner = planner
        self._heartbeat = (
            Heartbeat(
                planner,
                self.report,
                self._on_ack,
                instance_id=identity.instance_id,
                clock=self._planner_clock,
            )
            if planner is not None
            else None
        )

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Open the exporters and the peer service, then begin to report to the planner."""
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
        """Take the keys (base64url) that the planner signs leases for this instance with."""
        self._leases.set_keys([decode_key(lease_key) for lease_key in lease_keys])

    def notify_planner(self) -> None:
        """Tell the planner now instead of at the next heartbeat."""
        if self._heartbeat is not None:
            self._heartbeat.send_now()

    def wait_registered(self, timeout: float) -> bool:
        """Block until the planner has answered a report; whether it has. Of the latest: see `wait_report_acked`."""
        return self._heartbeat is not None and self._heartbeat.wait_connected(timeout)

    def wait_report_acked(self, timeout: float) -> bool:
        """See `SuspendableImage.wait_report_acked`."""
        return self._heartbeat is not None and self._heartbeat.wait_acked(timeout)

    def drain(self, timeout: float) -> bool:
        """Take no new readers, and wait for those there are; whether all have finished."""
        self._state = "draining"
        self._notify()
        self.notify_planner()
        deadline = time.monotonic() + timeout
        done = threading.Event()
        with self.on_change(done.set):
            while self._leases.readers:
                done.clear()
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                # Leases that expire make no event, so look again at least once a second.
                done.wait(min(left, 1.0))
        return True

    def close(self, drain_s: float = 0.0, *, leave_s: float = STOP_S) -> None:
        """Drain for at most `drain_s` seconds, leave the planner's books, and stop giving.

        The planner gets `leave_s` seconds to hear of it: one that does not answer forgets the instance later.
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

    # -- what the engine tells -------------------------------------------------------------------------

    def record_step_latency(self, seconds: float) -> None:
        """One unit of the engine's own work ended now and took so many seconds.

        Call it, on any thread, for units that are alike and many: each decode step, or each request
        divided by its tokens. It costs about a microsecond and never waits. From these numbers alone the
        seed learns what its work takes, and gives less while that takes more
        (`InstanceSettings.max_latency_ratio`; `rfork.source.latency_controller` says how).
        """
        self._latency.record_step(seconds)

    def measure_step(self) -> StepTimer:
        """``with seed.serving():`` around one unit of work is `record_step_latency` with the time that the block takes.

        It also tells of work that has begun and is not done, so prefer it. One that raises does not count.
        """
        return self._latency.measure_step()

    # -- the planner ---------------------------------------------------------------------------------

    def report(self) -> InstanceReport:
        """All that the planner needs to know of this instance."""
        layout = self.image.layout
        peer = self._peer
        return InstanceReport(
            instance_id=self.identity.instance_id,
            model=self.identity.model,
            version=self.version,
            any_version=self.adopts_version and self._state == "loading",
            replica=self.identity.replica,
            rank=self.identity.rank,
            layout_id=layout.layout_id,
            weights_id=self._manifest.weights_id if self._manifest is not None else None,
            generation=self.generation,
            image_bytes=layout.image_bytes,
            chunk_count=len(layout.chunks),
            state=self._state,
            verified=self.chunk_state.verified if not self.suspended else (),
            provisional_id=self.chunk_state.provisional_id.partition("-")[0]
            if self.chunk_state.provisional_id is not None
            else None,
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
