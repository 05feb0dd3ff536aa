"""Access control of a seed: implements the exporters' `AccessGate` and the peer service's `PeerBackend`.

Runs on the source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from rfork.errors import SourceBusy, SourceWeightsChanged, TransportUnavailable
from rfork.image.chunk_state import ChunkState
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.planner_client.planner_clock import PlannerClock
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.source.channels import ChannelTable, ServingSpans
from rfork.source.egress_limiter import EgressLimiter, ReaderRateAdvisor
from rfork.source.latency_controller import MIN_RATE, LatencyController
from rfork.source.leases import LeaseTable
from rfork.source.served_image import ServedImage, VersionOf
from rfork.source.suspendable_image import SuspendableImage
from rfork.tracing import Tracer
from rfork.transport.base import AccessGate, ControlStream, Endpoint, Transport
from rfork.weights_version import is_single, of_update, of_weights, unnamed

EXPORTER_READY_TIMEOUT_S = 3.0
"""Time that a requested transport gets to become ready before the next one is used."""
MIN_RATE_PER_READER = 4 << 20
"""Bytes per second: above `InstanceSettings.min_source_bytes_per_s` for each in-flight chunk of a typical
reader.
"""


@dataclass(frozen=True, slots=True)
class InstanceIdentity:
    """Identity of an instance at the planner: one rank of one model in one process."""

    model: str
    rank: Rank = field(default_factory=Rank)
    instance_id: str = field(default_factory=lambda: uuid4().hex)
    version: str | None = None
    """Version of its weights; None: it adopts the served version."""
    replica: str | None = None
    """Replica of this rank, if the ranks agreed on a name."""
    egress_share: float = 1.0
    """Share of the readers that the planner assigns to it, relative to other sources."""

    @classmethod
    def of(
        cls,
        model: str,
        rank: Rank,
        server: str | None,
        *,
        version: str | None = None,
        replica: str | None = None,
    ) -> InstanceIdentity:
        """Create an identity with a new id, prefixed by the server's name (`InstanceSettings.replica`) if
        there is one.

        The prefix allows draining all ranks of a server together.
        """
        instance_id = uuid4().hex
        if server is not None:
            instance_id = f"{server}-{rank.key}-dp{rank.dp}-{instance_id[:8]}"
        return cls(model, rank, instance_id, version, replica)


class AccessControl(SuspendableImage):
    """Serves an instance's image to holders of a lease, within the rate of its egress limiter."""

    def __init__(
        self,
        image: Image,
        identity: InstanceIdentity,
        settings: InstanceSettings,
        transports: Sequence[Transport],
        chunk_state: ChunkState | None,
        manifest: Manifest | None,
        tracer: Tracer,
    ) -> None:
        served = ServedImage(
            image.layout,
            source_id=identity.instance_id,
            max_readers=settings.max_readers,
            chunk_state=chunk_state,
            manifest=manifest,
            version=identity.version,
        )
        super().__init__(image, served, transports)
        self.identity = identity
        self.settings = settings
        self.served_bytes = 0
        self._planner_clock = PlannerClock()
        self._leases = LeaseTable(served.leases, self._planner_clock.now)
        self._serving_spans = ServingSpans(tracer, lambda: self._egress_limiter.current_limit, identity.instance_id)
        self._channels = ChannelTable(self._leases, self._exports, self._notify, self._serving_spans)
        self._latency = LatencyController(settings.max_latency_ratio, floor=self._min_rate)
        self._egress_limiter = EgressLimiter(
            settings.max_egress_bytes_per_s, self._latency, part=self._governed_fraction
        )
        self._rate_advisor: ReaderRateAdvisor | None = None

    @property
    def adopts_version(self) -> bool:
        """True if the instance adopts the served version instead of having its own."""
        return self.identity.version is None

    def version_by_content(self, manifest: Manifest) -> str:
        """Return a version derived from the weights' bytes."""
        identity = self.identity
        if is_single(identity.rank):
            return of_weights(manifest.weights_id)
        return unnamed(identity.replica or identity.instance_id)

    def version_after_update(self, stated: str | None, count: int) -> VersionOf:
        """See `ImageState.version_after_update`: the stated version, otherwise one that only these weights
        have.
        """
        identity, before = self.identity, self.version
        before_weights_id = self._served.complete_weights_id

        def choose(manifest: Manifest) -> str | None:
            if stated is not None and stated != before:
                return stated
            if not is_single(identity.rank):
                return of_update(identity.replica or identity.instance_id, count)
            return before if manifest.weights_id == before_weights_id else of_weights(manifest.weights_id)

        return choose

    @property
    def _gate(self) -> AccessGate:
        return self

    def _min_rate(self) -> int:
        """Minimum egress rate regardless of the engine's load, so that no reader appears stalled."""
        return max(MIN_RATE, MIN_RATE_PER_READER * len(self._leases.readers))

    # -- AccessGate: called by exporters -----------------------------------------------------------

    def authorize(self, token: str, begin: int, end: int) -> str:
        """See `rfork.transport.base.AccessGate.authorize`."""
        with self._leases.lock:
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

    def version_tag(self) -> str:
        """See `rfork.transport.base.AccessGate.version_tag`."""
        return f"{self.identity.instance_id}-{self.generation}"

    # -- PeerBackend: called by the peer service ---------------------------------------------------

    def check(self, token: str) -> str:
        """Return the fork_id of a token's lease; raises like `AccessGate.authorize`."""
        with self._leases.lock:
            return self._served.check(token, self._planner_clock.now())

    def open_channel(self, fork_id: str, layout_id: str, transports: list[str], address: str) -> tuple[str, Endpoint]:
        """Open a slot for the reader at this address; return an endpoint of the first transport that both
        sides support.
        """
        self._served.check_can_open(layout_id)
        self._exports_settled.wait(EXPORTER_READY_TIMEOUT_S)
        opened = self._open(fork_id, transports, address)
        self._notify()  # one more reader shares the rate
        return opened

    def _open(self, fork_id: str, transports: list[str], address: str) -> tuple[str, Endpoint]:
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
        return self._leases.has_channel(channel_id, fork_id)

    def control_stream(self, channel_id: str, line: ControlStream) -> None:
        """Run the exporter's side of a channel's control stream until the stream ends; blocks."""
        self._channels.run_control_stream(channel_id, line)

    def close_channel(self, channel_id: str) -> None:
        """Release a reader's slot."""
        self._channels.close(channel_id)
        self._notify()

    def _advised_rate(self) -> int | None:
        return self._rate_advisor.per_reader_rate() if self._rate_advisor is not None else None

    def _governed_fraction(self) -> float:
        """Return the fraction of the rate that the egress limiter grants; readers on one-sided transports
        have the rest.

        All readers with a slot have equal shares. Readers without one (over http with a lease only) share the
        granted part, which is at least one reader's share.
        """
        readers = len(self._leases.readers)
        return max(1, readers - self._channels.reader_count(self._exports.one_sided)) / max(1, readers)

    def _close_channels(self) -> None:
        if self._channels.close_all():
            self._notify()
