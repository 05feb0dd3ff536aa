"""Detection of a source whose packets are dropped, on its peer service and on its data port."""

from __future__ import annotations

import time

import pytest

from rfork.errors import SourceUnreachable
from rfork.peer.client import PeerClient
from rfork.planner_client.lease import derive_key
from rfork.receiver.events import ReadChunk
from rfork.receiver.report import ForkTimer
from rfork.receiver.sources import ForkContext, PeerSource
from rfork.settings import TlsSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.testing.peers import InMemoryPeers
from rfork.transport.base import Endpoint
from rfork.transport.http import HttpTransport
from tests.hostile_planner import unaccepting_address
from tests.unit.receiver.event_recorder import ALL, EventRecorder
from tests.unit.receiver.fleet import NEVER_S, SECRET, image, route, settings

LONG_DEADLINE_S = 30.0


def test_an_unreachable_peer_service_suggests_a_firewall() -> None:
    """It is no stall of the source, which others may reach: no instance is blamed."""
    with unaccepting_address() as (host, port):
        peer = PeerClient(f"{host}:{port}", lambda: "", TlsSettings())
        with pytest.raises(SourceUnreachable, match="no connection to") as raised:
            peer.open("a" * 32, ("http",), time.monotonic() + LONG_DEADLINE_S)
        peer.close()
    assert "network" == raised.value.fault
    assert "firewall" in raised.value.hint
    assert "MTU" in raised.value.hint


def test_an_unreachable_data_port_suggests_a_firewall() -> None:
    """The same for a source whose peer service responds and whose data port does not."""
    with unaccepting_address() as (host, port):
        endpoint = Endpoint("http", {"url": f"http://{host}:{port}/image"})
        with pytest.raises(SourceUnreachable, match="no connection to"):
            HttpTransport(settings()).connect(endpoint, image(), lambda: "", time.monotonic() + LONG_DEADLINE_S)


def test_a_source_over_http_has_no_bytes_until_its_first_response() -> None:
    """A network that drops large packets lets it connect, so the fork must know that no byte has arrived."""
    transport, peers, recorder, source_image = HttpTransport(settings()), InMemoryPeers(), EventRecorder(), image(1)
    connections = Connections([transport], serve_peer=peers.service)
    identity = InstanceIdentity("model", instance_id="a")
    with Seed(source_image, identity, settings(), connections, manifest=source_image.manifest()) as seed:
        seed.set_lease_keys([derive_key(SECRET, "a")])
        context = ForkContext("target", image(), {"http": transport}, peers.dial, settings(), ForkTimer(NEVER_S))
        peer_source = PeerSource(route(seed, ALL).model_copy(update={"transports": ("http",)}), 1, recorder, context)
        peer_source.thread.start()
        assert recorder.offered.wait(NEVER_S)
        before = peer_source.activity(time.monotonic())
        peer_source.read(ReadChunk(1, 0, time.monotonic() + NEVER_S))
        after = peer_source.activity(time.monotonic())
        peer_source.close()
        peer_source.thread.join()
    assert before.has_no_bytes
    assert not after.has_no_bytes
