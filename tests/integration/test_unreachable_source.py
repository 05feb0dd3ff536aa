"""Detection of a source whose packets are dropped, on its peer service and on its data port."""

from __future__ import annotations

import time

import pytest

from rfork.errors import SourceUnreachable
from rfork.peer.client import PeerClient
from rfork.settings import TlsSettings
from rfork.transport.base import Endpoint
from rfork.transport.http import HttpTransport
from tests.hostile_planner import unaccepting_address
from tests.unit.receiver.fleet import image, settings

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
