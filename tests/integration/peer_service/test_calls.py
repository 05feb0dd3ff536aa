"""Single calls: manifests, channels, leases, health, and failed connections."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rfork.errors import (
    LayoutMismatch,
    LeaseRejected,
    PortInUse,
    SettingsError,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
)
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB, ChunkState
from rfork.image.memory import compute_manifest
from rfork.peer.client import PeerClient
from rfork.peer.v1 import peer_pb2, peer_pb2_grpc
from rfork.planner_client.lease import derive_key
from rfork.settings import TlsSettings
from rfork.source.seed import Seed
from rfork.transport.base import Endpoint
from tests.integration.peer_service.seeds import SOON_S, StartSeed, client, request_channel, soon, token


def test_a_manifest_of_100_000_tensors_is_streamed(start_seed: StartSeed) -> None:
    """The layout arrives with all its tensors, in messages that fit gRPC's limits."""
    memory = torch.zeros(100_000)
    seed = start_seed(image_from_tensors({f"layers.{index}.w": memory[index] for index in range(100_000)}))
    peer = client(seed)
    assert seed.manifest == peer.full_manifest(soon())
    assert 100_000 == len(seed.image.layout.tensors)
    assert seed.manifest == peer.manifest(seed.image.layout, soon())
    peer.close()


def test_a_fence_during_open_rejects_the_channel(start_seed: StartSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease was valid when the call arrived; the weights changed before the channel was open."""
    seed = start_seed()
    peer = client(seed)
    open_channel = seed.open_channel

    def overtaken(fork_id: str, layout_id: str, transports: list[str], address: str) -> tuple[str, Endpoint]:
        seed.fence()
        return open_channel(fork_id, layout_id, transports, address)

    monkeypatch.setattr(seed, "open_channel", overtaken)
    with pytest.raises(SourceWeightsChanged):
        request_channel(seed, peer)
    assert () == seed.report().readers
    peer.close()


def test_an_unknown_manifest_is_awaited(start_seed: StartSeed) -> None:
    """A relay responds once it knows its manifest, and not before."""
    image = image_from_tensors({"a": torch.zeros(2 * MIB, dtype=torch.uint8)})
    relay = start_seed(image, ChunkState(image.layout.chunks), has_manifest=False)
    peer = client(relay)
    with pytest.raises(SourceTimeout):
        peer.manifest(image.layout, time.monotonic() + 0.2)
    relay.set_manifest(compute_manifest(image))
    assert relay.manifest == peer.manifest(image.layout, soon())
    peer.close()


BAD_TOKENS: dict[str, Callable[[Seed], str]] = {
    "none": lambda seed: "",
    "forged": lambda seed: token(seed, key=derive_key(b"x" * 32, "seed-1")),
    "expired": lambda seed: token(seed, lifetime_s=-1),
}
CALLS: dict[str, Callable[[Seed, PeerClient], object]] = {
    "manifest": lambda seed, peer: peer.full_manifest(soon()),
    "open": request_channel,
    "placement": lambda seed, peer: peer.placement(soon()),
    "boxes": lambda seed, peer: peer.open_boxes(b"boxes", soon()),
    "watch": lambda seed, peer: next(peer.watch("any", 1.0)),
    "renew": lambda seed, peer: peer.renew(soon()),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("bad", BAD_TOKENS)
def test_no_call_without_a_lease(start_seed: StartSeed, bad: str, call: str) -> None:
    """Every call without a valid lease is refused."""
    seed = start_seed()
    peer = client(seed, BAD_TOKENS[bad](seed))
    with pytest.raises(LeaseRejected):
        CALLS[call](seed, peer)
    peer.close()


def test_a_refusal_is_permission_denied_on_the_wire(start_seed: StartSeed) -> None:
    """Third-party clients see gRPC's own status."""
    seed = start_seed()
    with grpc.insecure_channel(seed.report().address) as channel, pytest.raises(grpc.RpcError) as caught:
        peer_pb2_grpc.PeerStub(channel).OpenChannel(peer_pb2.OpenChannelRequest(), timeout=SOON_S)
    assert grpc.StatusCode.PERMISSION_DENIED is caught.value.code()


def test_health_needs_no_lease(start_seed: StartSeed) -> None:
    """A probe calls the standard health service."""
    seed = start_seed()
    with grpc.insecure_channel(seed.report().address) as channel:
        response = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="rfork.v1.Peer"), timeout=SOON_S
        )
    assert health_pb2.HealthCheckResponse.SERVING == response.status


def test_another_forks_channel_cannot_be_watched(start_seed: StartSeed) -> None:
    """A fork cannot use the id of another fork's channel."""
    seed = start_seed()
    first, second = client(seed), client(seed, token(seed, "fork-2"))
    channel = request_channel(seed, first)
    with pytest.raises(SourceWeightsChanged):
        next(second.watch(channel, 1.0))
    assert ("fork-1",) == seed.report().readers
    first.close()
    second.close()


def test_another_layout_is_refused(start_seed: StartSeed) -> None:
    """A target of another layout gets no channel."""
    seed = start_seed()
    peer = client(seed)
    with pytest.raises(LayoutMismatch):
        peer.open("0" * 32, ("memory",), soon())
    peer.close()


def test_a_port_in_use_is_named(start_seed: StartSeed) -> None:
    """If two instances are configured with one port, the second one's error names the setting to change."""
    port = int(start_seed().report().address.rpartition(":")[2])
    with pytest.raises(PortInUse, match=str(port)) as caught:
        start_seed(port=port)
    assert "RFORK_PEER_PORT" in caught.value.hint


@pytest.mark.parametrize("port", [0, 8701])
def test_an_address_of_another_machine_is_not_a_port_in_use(start_seed: StartSeed, port: int) -> None:
    """The error states the system's reason and names the setting of the address."""
    with pytest.raises(SettingsError, match=f"cannot listen on 192.0.2.1:{port}: Cannot assign") as caught:
        start_seed(bind="192.0.2.1", port=port)
    assert "RFORK_BIND" in caught.value.hint


def test_a_refused_connection_is_unavailable(free_port: int) -> None:
    """A refused connection raises SourceUnavailable."""
    peer = PeerClient(f"127.0.0.1:{free_port}", lambda: "token", TlsSettings())
    with pytest.raises(SourceUnavailable):
        peer.full_manifest(soon())
    peer.close()


def test_a_closed_client_is_unavailable(start_seed: StartSeed) -> None:
    """Calls on a connection that this side closed fail like on any lost connection."""
    seed = start_seed()
    peer = client(seed)
    peer.close()
    with pytest.raises(SourceUnavailable):
        request_channel(seed, peer)
    with pytest.raises(SourceUnavailable):
        next(peer.watch("any", 1.0))
