"""A seed, without sockets: what it admits, what it tells, and how it ends."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from rfork.errors import LayoutMismatch, LeaseRejected, SourceBusy, SourceWeightsChanged, TransportUnavailable
from rfork.image.memory import Image
from rfork.peer.server import PeerService
from rfork.peer.servicer import PeerBackend
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.lease import derive_key
from rfork.schema import InstanceAck, Rank
from rfork.settings import InstanceSettings
from rfork.source.image_state import compute_manifest
from rfork.source.seed import InstanceIdentity, Seed
from rfork.testing.peers import InMemoryPeers
from rfork.testing.transport import InMemoryExporter, InMemoryNetwork, InMemoryTransport
from rfork.transport.base import AccessGate
from tests.unit.receiver.fleet import FORK_ID, SECRET, lease
from tests.unit.source.seeds import IMAGE, LAYOUT_ID, build_seed, token


def test_a_server_names_the_instances_of_its_ranks() -> None:
    """Each start has an id of its own, which begins with the server's name where it has one."""
    rank = Rank(tp=1, tp_size=2, dp=3)
    one, other = (InstanceIdentity.of("model", rank, "pod-7").instance_id for _ in range(2))
    standalone = InstanceIdentity.of("model", rank, None).instance_id
    start = "pod-7-main-tp1of2-pp0of1-ep0of1-dp3-"
    begin = [each.startswith(start) for each in (one, other, standalone)]
    assert ([True, True, False], True, 32) == (begin, one != other, len(standalone))


def test_a_seed_reports_a_whole_image() -> None:
    """All chunks, its weights, where it is, and that it serves."""
    with build_seed() as seed:
        report = seed.report()
    assert ("serving", ((0, 3),), compute_manifest(IMAGE).weights_id, ("memory",), "node") == (
        report.state,
        report.verified,
        report.weights_id,
        report.transports,
        report.placement.host,
    )


def test_no_lease_no_bytes() -> None:
    """A token that is no lease is refused before the range is looked at."""
    with build_seed() as seed, pytest.raises(LeaseRejected):
        seed.authorize("forged", 0, 1)


def test_a_channel_of_another_layout_is_refused() -> None:
    """Only a target of the same layout gets a place."""
    with build_seed() as seed:
        with pytest.raises(LayoutMismatch):
            seed.open_channel(seed.check(token()), "0" * 32, ["memory"], "127.0.0.1")
        assert () == seed.report().readers


def test_a_channel_needs_a_transport_of_both() -> None:
    """The first transport that both sides have is used; without one there is no channel."""
    with build_seed() as seed:
        fork_id = seed.check(token())
        _, endpoint = seed.open_channel(fork_id, LAYOUT_ID, ["carrier pigeon", "memory"], "127.0.0.1")
        with pytest.raises(SourceWeightsChanged):
            seed.open_channel(fork_id, LAYOUT_ID, ["carrier pigeon"], "127.0.0.1")
    assert "memory" == endpoint.transport


def test_draining_waits_for_readers_and_takes_no_more() -> None:
    """A draining seed refuses new readers and is done when the last one has left."""
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
    assert ([True], "draining") == (drained, seed.report().state)


def test_draining_gives_up_in_time() -> None:
    """A reader that stays does not hold the seed past its time."""
    with build_seed() as seed:
        seed.open_channel(seed.check(token()), LAYOUT_ID, ["memory"], "127.0.0.1")
        assert not seed.drain(0.01)
        seed.close()


def test_what_is_given_is_counted() -> None:
    """Every byte that passes the governor counts."""
    with build_seed() as seed:
        seed.acquire_bytes(3, "fork-1")
        seed.acquire_bytes(4, "fork-2")
    assert 7 == seed.served_bytes


def test_closing_leaves_nothing_open() -> None:
    """A closed seed has left the network; closing twice is harmless."""
    network = InMemoryNetwork()
    seed = build_seed(network=network).start()
    seed.close()
    seed.close()
    assert ({}, "closed:0") == (network.exports, seed.report().address)


def test_a_start_that_fails_leaves_nothing_open() -> None:
    """When the peer service cannot start, the exporters that already run are closed."""
    network = InMemoryNetwork()

    def failing_peer_service(host: PeerBackend, settings: InstanceSettings) -> PeerService:
        raise OSError("taken")

    seed = Seed(
        IMAGE,
        InstanceIdentity("model"),
        InstanceSettings(),
        [InMemoryTransport(network)],
        serve_peer=failing_peer_service,
    )
    with pytest.raises(OSError, match="taken"):
        seed.start()
    assert {} == network.exports


def test_a_seed_that_drains_goes_on_draining() -> None:
    """New weights, or the end of its own fork, do not bring readers back to an instance that is to go."""
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
        raise TransportUnavailable(f"{self._name}: not for this image", hint="take another")


def seed_offering(*transports: InMemoryTransport) -> Seed:
    """A seed that was told to offer these; not started."""
    return Seed(
        IMAGE,
        InstanceIdentity("model", instance_id="seed-1"),
        InstanceSettings(node_name="node", drain_timeout_s=0),
        list(transports),
        manifest=compute_manifest(IMAGE),
        serve_peer=InMemoryPeers().service,
    )


def test_a_transport_that_cannot_export_the_image_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """The others are offered, and one warning names it with what to do."""
    with seed_offering(UnusableTransport("cuda_ipc"), InMemoryTransport(InMemoryNetwork())) as seed:
        offered = seed.report().transports
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    is_explained = ["cuda_ipc: not for this image" in line and "take another" in line for line in warnings]
    assert (("memory",), [True]) == (offered, is_explained)


def test_a_seed_that_no_transport_can_export_does_not_start() -> None:
    """The first one's error says why; nothing stays open."""
    with pytest.raises(TransportUnavailable, match="cuda_ipc: not for this image"):
        seed_offering(UnusableTransport("cuda_ipc"), UnusableTransport("shared_memory")).start()


def test_leases_end_by_the_planners_time() -> None:
    """A seed whose clock is an hour fast takes the leases that its planner signs, and no others."""
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
        [InMemoryTransport(InMemoryNetwork())],
        manifest=compute_manifest(IMAGE),
        planner=planner,
        serve_peer=InMemoryPeers().service,
    )
    with seed:
        assert seed.wait_registered(60.0)
        assert FORK_ID == seed.check(lease(seed, ttl_s=30.0 - hour_s).token)
        with pytest.raises(LeaseRejected, match="expired"):
            seed.check(lease(seed, ttl_s=-30.0 - hour_s).token)
        assert hour_s == pytest.approx(seed.report().clock_skew_s, abs=60.0)
