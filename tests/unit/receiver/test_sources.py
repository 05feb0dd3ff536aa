"""Peers as sources: events, transports that cannot be used, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from rfork.errors import NotSameHost, SourceTimeout, SourceUnavailable, TransportUnavailable
from rfork.image.chunks import ChunkState
from rfork.image.memory import Image
from rfork.peer.base import Dial, Peer
from rfork.planner_client.lease import derive_key
from rfork.receiver.events import ReadChunk
from rfork.receiver.report import ForkTimer
from rfork.receiver.sources import ForkContext, PeerSource
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.testing import transport
from rfork.testing.peers import InMemoryPeer
from rfork.testing.transport import (
    FaultInjection,
    InMemoryExporter,
    InMemoryNetwork,
    InMemoryReader,
    InMemoryTransport,
)
from rfork.transport.base import AccessGate, Endpoint, OpenControlStream, TokenSource, no_control_stream
from tests.unit.receiver.event_recorder import ALL, EventRecorder
from tests.unit.receiver.fleet import (
    CHUNKS,
    FORK_ID,
    NEVER_S,
    SECRET,
    Fleet,
    Script,
    Target,
    image,
    lease,
    plan,
    route,
    settings,
)

CONNECTION = 7


def build_peer_source(
    fleet: Fleet,
    seed: Seed,
    recorder: EventRecorder,
    *,
    dial: Dial | None = None,
    stall_s: float = NEVER_S,
) -> PeerSource:
    return PeerSource(
        route(seed, ALL),
        CONNECTION,
        recorder,
        ForkContext(
            "target",
            image(),
            {"memory": InMemoryTransport(fleet.network)},
            dial or fleet.peers.dial,
            settings(source_idle_timeout_s=stall_s),
            ForkTimer(NEVER_S),
        ),
    )


def test_the_manifest_precedes_the_first_offer(fleet: Fleet) -> None:
    """A seed sends its manifest once, then offers all its chunks over the transport that both sides have."""
    seed, recorder = fleet.source("a", image(1)), EventRecorder()
    peer_source = build_peer_source(fleet, seed, recorder)
    peer_source.thread.start()
    assert recorder.offered.wait(NEVER_S)
    assert ["memory"] == recorder.transports
    assert [seed.manifest] == recorder.manifests
    assert [(ALL,)] == recorder.offers
    peer_source.close()
    peer_source.thread.join()
    assert [] == recorder.failures


def test_a_source_closed_while_it_dials_ends(fleet: Fleet) -> None:
    """A close before the connection exists is remembered: no channel is opened."""
    seed, recorder = fleet.source("a", image(1)), EventRecorder()
    dial_started, proceed = threading.Event(), threading.Event()

    def dial(address: str, token: TokenSource) -> Peer:
        dial_started.set()
        proceed.wait(NEVER_S)
        return fleet.peers.dial(address, token)

    peer_source = build_peer_source(fleet, seed, recorder, dial=dial)
    peer_source.thread.start()
    dial_started.wait(NEVER_S)
    peer_source.close()
    proceed.set()
    peer_source.thread.join()
    assert [] == recorder.offers
    assert [] == recorder.failures
    assert () == seed.report().readers


def test_a_source_without_a_channel_rejects_reads(fleet: Fleet) -> None:
    """The error states that the source is unavailable."""
    peer_source = build_peer_source(fleet, fleet.source("a", image(1)), EventRecorder())
    with pytest.raises(SourceUnavailable):
        peer_source.read(ReadChunk(CONNECTION, 0, time.monotonic() + NEVER_S))


def test_an_exception_of_a_transport_is_a_failure_of_the_source(fleet: Fleet) -> None:
    """It is an event, and not lost on a thread."""

    def dial(address: str, token: TokenSource) -> Peer:
        raise ZeroDivisionError("a bug")

    recorder = EventRecorder()
    peer_source = build_peer_source(fleet, fleet.source("a", image(1)), recorder, dial=dial)
    peer_source.thread.start()
    peer_source.thread.join()
    assert ["TargetError"] == [error.kind for error in recorder.failures]
    assert "ZeroDivisionError: a bug" in str(recorder.failures[0])


def test_a_source_that_closes_the_channel_has_ended(fleet: Fleet) -> None:
    """The end of the progress stream is the end of the source."""
    source_image = image(1)
    seed, recorder = (
        fleet.source("a", source_image, chunk_state=ChunkState(source_image.layout.chunks, [0])),
        EventRecorder(),
    )
    peer_source = build_peer_source(fleet, seed, recorder)
    peer_source.thread.start()
    recorder.offered.wait(NEVER_S)
    channels = seed._served.leases._channels
    seed.close_channel(next(iter(channels)))
    peer_source.thread.join()
    assert ["SourceUnavailable"] == [error.kind for error in recorder.failures]


def test_a_waiting_reader_presents_its_renewed_lease(fleet: Fleet) -> None:
    """A reader that waits for a slow relay and reads nothing sends the renewed lease to keep its slot."""
    source_image, recorder = image(1), EventRecorder()
    relay = fleet.source(
        "a", source_image, chunk_state=ChunkState(source_image.layout.chunks), manifest=source_image.manifest()
    )
    # The source requests the next lease soon, and the reader keeps its slot however late it arrives.
    first = lease(relay).model_copy(update={"expires_in_s": 0.3})
    newer, renewed = lease(relay, ttl_s=NEVER_S + 1), threading.Event()

    class RenewingPeer(InMemoryPeer):
        def renew(self, deadline: float) -> None:
            super().renew(deadline)
            renewed.set()

    peer_source = PeerSource(
        route(relay, ALL).model_copy(update={"lease": first}),
        CONNECTION,
        recorder,
        ForkContext(
            "target",
            image(),
            {"memory": InMemoryTransport(fleet.network)},
            lambda address, token: RenewingPeer(fleet.peers, address, token),
            settings(source_idle_timeout_s=0.4),
            ForkTimer(NEVER_S),
        ),
    )
    peer_source.thread.start()
    peer_source.renew(newer)
    assert renewed.wait(NEVER_S)
    peer_source.close()
    peer_source.thread.join()
    assert [] == recorder.failures


def test_a_source_reports_its_activity(fleet: Fleet) -> None:
    """The time of its last message, and that of its last offer."""
    recorder = EventRecorder()
    peer_source = build_peer_source(fleet, fleet.source("a", image(1)), recorder)
    peer_source.thread.start()
    assert recorder.offered.wait(NEVER_S)
    activity = peer_source.activity(time.monotonic())
    assert activity.message_at >= activity.progress_at
    assert 0.0 == activity.connecting_until
    assert None is activity.storage_at
    peer_source.close()
    peer_source.thread.join()


def test_a_reader_obeys_the_rate_limit_of_its_source(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source does not throttle by itself; at one byte per second, the reader gets one slice and then
    waits.
    """
    fast = fleet.source("a", image(1))
    seed = Seed(
        fast.image,
        InstanceIdentity("model", instance_id="slow"),
        settings(max_egress_bytes_per_s=1),
        Connections([InMemoryTransport(fleet.network, one_sided=True)], serve_peer=fleet.peers.service),
        manifest=fast.manifest,
    )
    with seed:
        seed.set_lease_keys([derive_key(SECRET, "slow")])
        recorder = EventRecorder()
        peer_source = build_peer_source(fleet, seed, recorder)
        peer_source.thread.start()
        assert recorder.offered.wait(NEVER_S)
        clock_reads = count()  # one second passes with each reading of the clock
        monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: next(clock_reads)))
        peer_source.read(ReadChunk(CONNECTION, 0, 3.0))
        with pytest.raises(SourceTimeout, match="throttled"):
            peer_source.read(ReadChunk(CONNECTION, 1, 3.0))
        peer_source.close()
        peer_source.thread.join()


class CrossHostTransport(InMemoryTransport):
    """A transport of this name that discovers in `connect` that source and target are on different hosts."""

    def __init__(self, network: InMemoryNetwork, name: str) -> None:
        super().__init__(network)
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def export(self, image: Image, gate: AccessGate) -> InMemoryExporter:
        return RenamedExporter(self._network, image, gate, FaultInjection(), name=self._name)

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> InMemoryReader:
        raise NotSameHost(f"{self._name}: the source runs on another host")


class RenamedExporter(InMemoryExporter):
    """An exporter that reports the name of another transport."""

    def __init__(
        self, network: InMemoryNetwork, image: Image, gate: AccessGate, faults: FaultInjection, *, name: str
    ) -> None:
        super().__init__(network, image, gate, faults)
        self._transport = name

    def endpoint(self) -> Endpoint:
        return replace(super().endpoint(), transport=self._transport)


@contextmanager
def running_peer_source(
    fleet: Fleet,
    recorder: EventRecorder,
    transports: Sequence[InMemoryTransport],
    *,
    max_readers: int = 4,
    dial: Dial | None = None,
    stall_s: float = NEVER_S,
) -> Iterator[tuple[Seed, PeerSource]]:
    """Start a source that offers these transports, best first, and a PeerSource that has them too."""
    source_image = image(1)
    seed = Seed(
        source_image,
        InstanceIdentity("model", instance_id="a"),
        settings(max_readers=max_readers, drain_timeout_s=0),
        Connections(list(transports), serve_peer=fleet.peers.service),
        manifest=source_image.manifest(),
    )
    with seed:
        seed.set_lease_keys([derive_key(SECRET, "a")])
        names = tuple(transport.name for transport in transports)
        peer_source = PeerSource(
            route(seed, ALL).model_copy(update={"transports": names}),
            CONNECTION,
            recorder,
            ForkContext(
                "target",
                image(),
                {transport.name: transport for transport in transports},
                dial or fleet.peers.dial,
                settings(source_idle_timeout_s=stall_s),
                ForkTimer(NEVER_S),
            ),
        )
        peer_source.thread.start()
        try:
            yield seed, peer_source
        finally:
            peer_source.close()
            peer_source.thread.join()


def test_an_unusable_transport_is_skipped(fleet: Fleet) -> None:
    """The next common transport delivers the chunks, and no failure is reported."""
    recorder, memory = EventRecorder(), InMemoryTransport(fleet.network)
    unusable = CrossHostTransport(fleet.network, "shared_memory")
    with running_peer_source(fleet, recorder, [unusable, memory]) as (_, peer_source):
        assert recorder.offered.wait(NEVER_S)
        peer_source.read(ReadChunk(CONNECTION, 0, time.monotonic() + NEVER_S))
        assert ["NotSameHost"] == recorder.transport_errors
        assert [] == recorder.failures
        assert ["memory"] == recorder.transports


def test_a_skipped_transport_releases_its_reader_slot(fleet: Fleet) -> None:
    """A source with a single reader slot can still serve."""
    recorder, memory = EventRecorder(), InMemoryTransport(fleet.network)
    unusable = [CrossHostTransport(fleet.network, name) for name in ("cuda_ipc", "shared_memory")]
    with running_peer_source(fleet, recorder, [*unusable, memory], max_readers=1) as (seed, _):
        assert recorder.offered.wait(NEVER_S)
        assert ["NotSameHost"] * 2 == recorder.transport_errors
        assert (FORK_ID,) == seed.report().readers


def test_a_source_that_no_transport_reaches_is_not_blamed(fleet: Fleet) -> None:
    """The source ends with the last transport's error, a network fault, and its reader slot is free again."""
    recorder = EventRecorder()
    unusable = [CrossHostTransport(fleet.network, name) for name in ("cuda_ipc", "shared_memory")]
    with running_peer_source(fleet, recorder, unusable) as (seed, peer_source):
        peer_source.thread.join()
        assert ["NotSameHost"] == recorder.transport_errors
        assert [("NotSameHost", "network")] == [(error.kind, error.fault) for error in recorder.failures]
        assert () == seed.report().readers


class SlowTransport(CrossHostTransport):
    """A transport that fails only after its deadline."""

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> InMemoryReader:
        threading.Event().wait(max(0.0, deadline - time.monotonic()))
        raise TransportUnavailable(f"{self._name}: took too long to register")


class DeadlineCheckingPeer(InMemoryPeer):
    """A peer that rejects every request made after its deadline."""

    def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
        self._check_deadline(deadline)
        return super().open(layout_id, transports, deadline)

    def close_channel(self, channel_id: str, deadline: float) -> None:
        self._check_deadline(deadline)
        super().close_channel(channel_id, deadline)

    def _check_deadline(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise SourceTimeout("no response in time")


def test_a_slow_transport_leaves_time_for_the_next(fleet: Fleet) -> None:
    """A transport that exhausts its time is skipped, the source is not, and the reader slot is released."""
    recorder, memory = EventRecorder(), InMemoryTransport(fleet.network)

    def dial(address: str, token: TokenSource) -> Peer:
        return DeadlineCheckingPeer(fleet.peers, address, token)

    slow_transports = [SlowTransport(fleet.network, name) for name in ("transfer_engine", "nccl")]
    with running_peer_source(fleet, recorder, [*slow_transports, memory], max_readers=1, dial=dial, stall_s=0.5):
        assert recorder.offered.wait(NEVER_S) or recorder.failures
        assert ["TransportUnavailable"] * 2 == recorder.transport_errors
        assert [] == recorder.failures
        assert ["memory"] == recorder.transports


class ColdTransport(CrossHostTransport):
    """A transport that may need longer to connect than a source may be silent."""

    connect_timeout_s = NEVER_S / 2
    deadline = 0.0

    def connect(
        self,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> InMemoryReader:
        self.deadline = deadline
        raise TransportUnavailable(f"{self._name}: no device")


def test_a_transport_has_the_time_that_it_needs_to_connect(fleet: Fleet) -> None:
    """Its deadline is later than that of other requests to the source."""
    recorder, cold, began = EventRecorder(), ColdTransport(fleet.network, "nccl"), time.monotonic()
    with running_peer_source(fleet, recorder, [cold], stall_s=0.5) as (_, peer_source):
        peer_source.thread.join()
    assert cold.deadline >= began + NEVER_S / 2


@pytest.mark.parametrize("has_second_transport", [True, False])
def test_a_failed_release_of_a_reader_slot_is_ignored(fleet: Fleet, has_second_transport: bool) -> None:
    """The next transport is used; if there is none, the source ends with the error of the last transport."""

    class CloseTimeoutPeer(InMemoryPeer):
        def close_channel(self, channel_id: str, deadline: float) -> None:
            raise SourceTimeout("no response in time")

    def dial(address: str, token: TokenSource) -> Peer:
        return CloseTimeoutPeer(fleet.peers, address, token)

    recorder = EventRecorder()
    transports: list[InMemoryTransport] = [CrossHostTransport(fleet.network, "shared_memory")]
    if has_second_transport:
        transports.append(InMemoryTransport(fleet.network))
    with running_peer_source(fleet, recorder, transports, dial=dial):
        (recorder.offered if has_second_transport else recorder.failed).wait(NEVER_S)
        refused, failures = list(recorder.transport_errors), [error.kind for error in recorder.failures]
    assert (["NotSameHost"] if has_second_transport else []) == refused
    assert ([] if has_second_transport else ["NotSameHost"]) == failures


def test_a_source_reports_the_deadline_of_its_connection(fleet: Fleet) -> None:
    """Until it is connected, silence does not count before that."""
    connect_started, proceed = threading.Event(), threading.Event()

    class BlockingTransport(InMemoryTransport):
        def connect(
            self,
            endpoint: Endpoint,
            image: Image,
            token: TokenSource,
            deadline: float,
            talk: OpenControlStream = no_control_stream,
        ) -> InMemoryReader:
            connect_started.set()
            proceed.wait(NEVER_S)
            return super().connect(endpoint, image, token, deadline, talk)

    recorder = EventRecorder()
    with running_peer_source(fleet, recorder, [BlockingTransport(fleet.network)]) as (_, peer_source):
        assert connect_started.wait(NEVER_S)
        now = time.monotonic()
        while_connecting = peer_source.activity(now)
        proceed.set()
        assert recorder.offered.wait(NEVER_S)
        connected = peer_source.activity(now)
    assert now + NEVER_S / 2 < while_connecting.connecting_until
    assert while_connecting.has_no_bytes
    assert 0.0 == connected.connecting_until


@pytest.mark.parametrize("opened", ["shared_memory", "unknown"])
def test_a_source_that_opens_another_transport_is_blamed(fleet: Fleet, opened: str) -> None:
    """The transport may be one that was skipped before, or an unknown one."""

    class WrongTransportPeer(InMemoryPeer):
        def open(self, layout_id: str, transports: tuple[str, ...], deadline: float) -> tuple[str, Endpoint]:
            channel_id, endpoint = super().open(layout_id, transports, deadline)
            if endpoint.transport == "shared_memory":
                return channel_id, endpoint
            return channel_id, replace(endpoint, transport=opened)

    def dial(address: str, token: TokenSource) -> Peer:
        return WrongTransportPeer(fleet.peers, address, token)

    recorder = EventRecorder()
    transports = [CrossHostTransport(fleet.network, "shared_memory"), InMemoryTransport(fleet.network)]
    with running_peer_source(fleet, recorder, transports, dial=dial):
        assert recorder.failed.wait(NEVER_S)
        outcome = [(error.kind, error.fault) for error in recorder.failures]
    assert [("SourceCorrupt", "source")] == outcome
    assert opened in str(recorder.failures[0])


def test_an_unreachable_source_is_replaced_immediately(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner receives one network fault, and another source serves everything."""
    source_image = image(1)
    a, b = fleet.source("a", source_image), fleet.source("b", source_image)
    unreachable_name = next(iter(fleet.network.exports))
    connect = InMemoryTransport.connect

    def connect_if_reachable(
        transport: InMemoryTransport,
        endpoint: Endpoint,
        image: Image,
        token: TokenSource,
        deadline: float,
        talk: OpenControlStream = no_control_stream,
    ) -> InMemoryReader:
        if endpoint.parameters["name"] == unreachable_name:
            raise NotSameHost("memory: the source runs on another host")
        return connect(transport, endpoint, image, token, deadline, talk)

    monkeypatch.setattr(InMemoryTransport, "connect", connect_if_reachable)
    script = Script([lambda: plan(route(a, ALL)), lambda: plan(route(b, ALL))])
    target = Target(fleet, script)
    target.run()
    assert [("a", "network", "NotSameHost")] == script.faults
    assert ["NotSameHost"] == target.reasons
    assert {"b": CHUNKS} == {share.source_id: share.verified_chunks for share in target.transfer.stats.shares}
