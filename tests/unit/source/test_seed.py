"""A seed without sockets: which readers it admits, what it reports, and how it closes."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from rfork.errors import LayoutMismatch, LeaseRejected, SourceBusy, SourceWeightsChanged, TransportUnavailable
from rfork.image.memory import Image, compute_manifest
from rfork.peer.server import PeerService
from rfork.peer.servicer import PeerBackend
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.lease import derive_key
from rfork.schema import InstanceAck, Rank
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.testing.peers import InMemoryPeers
from rfork.testing.transport import InMemoryExporter, InMemoryNetwork, InMemoryTransport
from rfork.transport.base import AccessGate
from tests.unit.receiver.fleet import FORK_ID, SECRET, lease
from tests.unit.source.seeds import IMAGE, LAYOUT_ID, build_seed, token


def test_each_start_has_a_unique_instance_id() -> None:
    """The id begins with the server's name, if it has one."""
    rank = Rank(tp=1, tp_size=2, dp=3)
    one, other = (InstanceIdentity.of("model", rank, "pod-7").instance_id for _ in range(2))
    standalone = InstanceIdentity.of("model", rank, None).instance_id
    prefix = "pod-7-main-tp1of2-pp0of1-ep0of1-dp3-"
    assert one.startswith(prefix)
    assert other.startswith(prefix)
    assert one != other
    assert 32 == len(standalone)
    assert not standalone.startswith(prefix)


def test_a_seed_reports_a_complete_image() -> None:
    """It reports all chunks, its weights, transports and host, and that it is serving."""
    with build_seed() as seed:
        report = seed.report()
    assert "serving" == report.state
    assert ((0, 3),) == report.verified
    assert compute_manifest(IMAGE).weights_id == report.weights_id
    assert ("memory",) == report.transports
    assert "node" == report.placement.host


def test_a_read_without_a_lease_is_rejected() -> None:
    """An invalid token is rejected before the range is checked."""
    with build_seed() as seed, pytest.raises(LeaseRejected):
        seed.authorize("forged", 0, 1)


def test_a_channel_of_another_layout_is_rejected() -> None:
    """Only a target with the same layout occupies a reader slot."""
    with build_seed() as seed:
        with pytest.raises(LayoutMismatch):
            seed.open_channel(seed.check(token()), "0" * 32, ["memory"], "127.0.0.1")
        assert () == seed.report().readers


def test_a_channel_needs_a_shared_transport() -> None:
    """The first transport that both sides have is used; without one there is no channel."""
    with build_seed() as seed:
        fork_id = seed.check(token())
        _, endpoint = seed.open_channel(fork_id, LAYOUT_ID, ["unknown", "memory"], "127.0.0.1")
        with pytest.raises(SourceWeightsChanged):
            seed.open_channel(fork_id, LAYOUT_ID, ["unknown"], "127.0.0.1")
    assert "memory" == endpoint.transport


def test_draining_waits_for_readers_and_admits_no_more() -> None:
    """A draining seed rejects new readers and finishes when the last reader has closed its channel."""
    with build_seed() as seed:
        channel, _ = seed.open_channel(seed.check(token()), LAYOUT_ID, ["memory"], "127.0.0.1")
        draining, drained = threading.Event(), []
        with seed.on_change(lambda: draining.set() if seed.draining else None):
            thread = threading.Thread(target=lambda: drained.append(seed.drain(60.0)))
            thread.start()
            assert draining.wait(60)
            with pytest.raises(SourceBusy):
                seed.open_channel(seed.check(token("fork-2")), LAYOUT_ID, ["memory"], "127.0.0.1")
            seed.close_channel(channel)
            thread.join()
    assert [True] == drained
    assert "draining" == seed.report().state


def test_draining_stops_at_its_timeout() -> None:
    """A reader that stays does not delay the seed beyond the timeout."""
    with build_seed() as seed:
        seed.open_channel(seed.check(token()), LAYOUT_ID, ["memory"], "127.0.0.1")
        assert not seed.drain(0.01)
        seed.close()


def test_served_bytes_are_counted() -> None:
    """Every byte that the limiter grants is counted."""
    with build_seed() as seed:
        seed.acquire_bytes(3, "fork-1")
        seed.acquire_bytes(4, "fork-2")
    assert 7 == seed.served_bytes


def test_closing_leaves_nothing_open() -> None:
    """A closed seed exports nothing; closing twice is harmless."""
    network = InMemoryNetwork()
    seed = build_seed(network=network).start()
    seed.close()
    seed.close()
    assert {} == network.exports
    assert "closed:0" == seed.report().address


def test_a_failed_start_leaves_nothing_open() -> None:
    """If the peer service cannot start, the exporters that already run are closed."""
    network = InMemoryNetwork()

    def failing_peer_service(backend: PeerBackend, settings: InstanceSettings) -> PeerService:
        raise OSError("taken")

    seed = Seed(
        IMAGE,
        InstanceIdentity("model"),
        InstanceSettings(),
        Connections([InMemoryTransport(network)], serve_peer=failing_peer_service),
    )
    with pytest.raises(OSError, match="taken"):
        seed.start()
    assert {} == network.exports


def test_a_draining_seed_stays_draining() -> None:
    """New weights and the end of its own fork do not make it serve again."""
    with build_seed() as seed:
        seed.drain(0.0)
        states = [seed.report().state]
        for change in (seed.fence, seed.publish, seed.serve):
            change()
            states.append(seed.report().state)
    assert ["draining"] * 4 == states


class UnusableTransport(InMemoryTransport):
    """A transport that cannot export an image."""

    def __init__(self, name: str) -> None:
        super().__init__(InMemoryNetwork())
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def export(self, image: Image, gate: AccessGate) -> InMemoryExporter:
        raise TransportUnavailable(f"{self._name}: not for this image", hint="use another transport")


def seed_offering(*transports: InMemoryTransport) -> Seed:
    """Return a seed with these transports; it is not started."""
    return Seed(
        IMAGE,
        InstanceIdentity("model", instance_id="seed-1"),
        InstanceSettings(node_name="node", drain_timeout_s=0),
        Connections(list(transports), serve_peer=InMemoryPeers().service),
        manifest=compute_manifest(IMAGE),
    )


def test_a_transport_that_cannot_export_the_image_is_omitted(caplog: pytest.LogCaptureFixture) -> None:
    """The others are offered, and one warning names the transport with a hint."""
    with seed_offering(UnusableTransport("cuda_ipc"), InMemoryTransport(InMemoryNetwork())) as seed:
        offered = seed.report().transports
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ("memory",) == offered
    assert "cuda_ipc: not for this image" in warning
    assert "use another transport" in warning


def test_a_seed_that_no_transport_can_export_does_not_start() -> None:
    """The error of the first transport is raised, and nothing stays open."""
    with pytest.raises(TransportUnavailable, match="cuda_ipc: not for this image"):
        seed_offering(UnusableTransport("cuda_ipc"), UnusableTransport("shared_memory")).start()


def test_leases_expire_by_the_planners_clock() -> None:
    """A seed whose clock is an hour fast accepts the leases that its planner signs, and no others."""
    hour_s, name = 3600.0, "seed-1"
    acknowledgement = InstanceAck(
        heartbeat_s=hour_s, lease_keys=(derive_key(SECRET, name),), unix_s=time.time() - hour_s
    )
    response = httpx.Response(200, content=acknowledgement.model_dump_json())
    planner = PlannerClient("http://p", transport=httpx.MockTransport(lambda _: response))
    seed = Seed(
        IMAGE,
        InstanceIdentity("model", instance_id=name),
        InstanceSettings(node_name="node"),
        Connections([InMemoryTransport(InMemoryNetwork())], planner=planner, serve_peer=InMemoryPeers().service),
        manifest=compute_manifest(IMAGE),
    )
    with seed:
        assert seed.wait_registered(60.0)
        assert FORK_ID == seed.check(lease(seed, ttl_s=30.0 - hour_s).token)
        with pytest.raises(LeaseRejected, match="expired"):
            seed.check(lease(seed, ttl_s=-30.0 - hour_s).token)
        assert hour_s == pytest.approx(seed.report().clock_skew_s, abs=60.0)
