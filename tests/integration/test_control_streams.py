"""Control streams between a reader and its source's exporter: in memory, and over gRPC on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
import torch

from rfork.errors import (
    LeaseRejected,
    RforkError,
    SourceBusy,
    SourceError,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
)
from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image, compute_manifest
from rfork.peer.base import Peer
from rfork.peer.client import PeerClient
from rfork.peer.control_stream import MAX_CONTROL_STREAMS, MAX_MESSAGE_BYTES, MAX_QUEUED_MESSAGES
from rfork.peer.server import PeerServer
from rfork.peer.v1 import peer_pb2, peer_pb2_grpc
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.settings import InstanceSettings, TlsSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.testing.peers import InMemoryPeers
from rfork.testing.transport import FaultInjection, InMemoryExporter, InMemoryNetwork, InMemoryTransport
from rfork.transport.base import AccessGate, ControlStream

KEY = derive_key(b"s" * 32, "seed-1")
SOON_S = 30.0
LINE_THREADS = ("rfork-control",)


class EchoExporter(InMemoryExporter):
    """Responds to each message with its reverse; `hush` ends the stream, `flood` sends more than can be
    queued.

    Notes are received without a response.
    """

    def __init__(self, network: InMemoryNetwork, image: Image, gate: AccessGate) -> None:
        super().__init__(network, image, gate, FaultInjection())
        self.begun = threading.Semaphore(0)
        self.notes: list[bytes] = []
        self.ended: list[RforkError] = []
        self.stopped = threading.Semaphore(0)

    def run_control_stream(self, channel_id: str, line: ControlStream) -> None:
        self.begun.release()
        try:
            while (message := line.receive(soon())) != b"hush":
                if message == b"flood":
                    while True:
                        line.send(bytes(MAX_MESSAGE_BYTES))
                if message.startswith(b"note"):
                    self.notes.append(message)
                    continue
                if message == b"break":
                    raise ValueError("a bug")
                line.send(message[::-1])
            line.close()
        except RforkError as error:
            self.ended.append(error)
            raise
        finally:
            self.stopped.release()


class EchoTransport(InMemoryTransport):
    def __init__(self) -> None:
        self.network = InMemoryNetwork()
        super().__init__(self.network)
        self.exporters: list[EchoExporter] = []

    def export(self, image: Image, gate: AccessGate) -> InMemoryExporter:
        self.exporters.append(EchoExporter(self.network, image, gate))
        return self.exporters[-1]


class SeedAndReader:
    """A seed, and a reader of it with an open channel."""

    def __init__(self, peer_transport: str) -> None:
        image = image_from_tensors({"a": torch.arange(100)})
        self.transport = EchoTransport()
        self.peers = InMemoryPeers()
        serve_peer = self.peers.service if peer_transport == "memory" else PeerServer
        self.seed = Seed(
            image,
            InstanceIdentity("model", instance_id="seed-1"),
            InstanceSettings(),
            Connections([self.transport], serve_peer=serve_peer),
            manifest=compute_manifest(image),
        )
        self.seed.set_lease_keys([KEY])
        self.seed.start()
        self.peer_transport = peer_transport
        self.peer = self.dial()
        self.channel_id = self.peer.open(image.layout.layout_id, ("memory",), soon())[0]

    def dial(self, token_text: str | None = None) -> Peer:
        token = token_text or self.token()
        address = self.seed.report().address
        if self.peer_transport == "memory":
            return self.peers.dial(address, lambda: token)
        return PeerClient(address, lambda: token, TlsSettings())

    def token(self, fork_id: str = "fork-1", lifetime_s: float = 60.0) -> str:
        layout_id = self.seed.image.layout.layout_id
        claims = LeaseClaims(fork_id, "seed-1", layout_id, None, self.seed.generation, time.time() + lifetime_s)
        return sign(claims, decode_key(KEY))

    @property
    def exporter(self) -> EchoExporter:
        return self.transport.exporters[0]

    def close(self) -> None:
        self.peer.close()
        self.seed.close()


def soon() -> float:
    return time.monotonic() + SOON_S


def stream_thread_count() -> int:
    return sum(thread.name in LINE_THREADS for thread in threading.enumerate())


def until(condition: Callable[[], bool]) -> bool:
    """Return True if the condition becomes true within half a minute."""
    deadline, changed = soon(), threading.Event()
    while time.monotonic() < deadline:
        if condition():
            return True
        changed.wait(0.01)
    return False


@pytest.fixture(params=["memory", "grpc"])
def seed_and_reader(request: pytest.FixtureRequest) -> Iterator[SeedAndReader]:
    """One seed and one reader; no stream's thread is left at the end."""
    made = SeedAndReader(request.param)
    yield made
    made.close()
    assert until(lambda: stream_thread_count() == 0)


@pytest.fixture
def grpc_pair() -> Iterator[SeedAndReader]:
    """One seed and one reader, over gRPC."""
    made = SeedAndReader("grpc")
    yield made
    made.close()
    assert until(lambda: stream_thread_count() == 0)


def test_messages_arrive_in_order_in_both_directions(seed_and_reader: SeedAndReader) -> None:
    """Messages of any size up to the maximum arrive once."""
    line = seed_and_reader.peer.open_control_stream(seed_and_reader.channel_id)
    messages = [b"one", b"", b"x" * (MAX_MESSAGE_BYTES - 1) + b"y", b"four"]
    for message in messages:
        line.send(message)
    assert [message[::-1] for message in messages] == [line.receive(soon()) for _ in messages]


def test_a_message_that_is_too_large_is_the_callers_error(seed_and_reader: SeedAndReader) -> None:
    """It is not sent, and the stream stays open."""
    line = seed_and_reader.peer.open_control_stream(seed_and_reader.channel_id)
    with pytest.raises(ValueError, match="65536"):
        line.send(bytes(MAX_MESSAGE_BYTES + 1))
    line.send(b"ab")
    assert b"ba" == line.receive(soon())


def test_silence_ends_at_the_deadline(seed_and_reader: SeedAndReader) -> None:
    """Without a message the reader raises SourceTimeout, and the stream stays open."""
    line = seed_and_reader.peer.open_control_stream(seed_and_reader.channel_id)
    with pytest.raises(SourceTimeout):
        line.receive(time.monotonic() + 0.05)
    line.send(b"ab")
    assert b"ba" == line.receive(soon())


def test_the_source_closes_the_stream(seed_and_reader: SeedAndReader) -> None:
    """Earlier messages still arrive; afterwards nothing can be sent or received."""
    line = seed_and_reader.peer.open_control_stream(seed_and_reader.channel_id)
    line.send(b"ab")
    line.send(b"hush")
    received = line.receive(soon())
    with pytest.raises(SourceUnavailable):
        line.receive(soon())
    with pytest.raises(SourceUnavailable):
        line.send(b"more")
    assert b"ba" == received


def test_the_reader_closes_the_stream(seed_and_reader: SeedAndReader) -> None:
    """The source's thread ends; closing twice is harmless."""
    line = seed_and_reader.peer.open_control_stream(seed_and_reader.channel_id)
    assert seed_and_reader.exporter.begun.acquire(timeout=SOON_S)
    line.close()
    line.close()
    assert seed_and_reader.exporter.stopped.acquire(timeout=SOON_S)
    with pytest.raises(SourceUnavailable):
        line.receive(soon())
    assert [SourceUnavailable] == [type(error) for error in seed_and_reader.exporter.ended]


def test_messages_sent_before_closing_arrive(seed_and_reader: SeedAndReader) -> None:
    """A final message sent before the reader closes the stream arrives."""
    line = seed_and_reader.peer.open_control_stream(seed_and_reader.channel_id)
    line.send(b"note one")
    line.send(b"note two")
    line.close()
    assert seed_and_reader.exporter.stopped.acquire(timeout=SOON_S)
    assert [b"note one", b"note two"] == seed_and_reader.exporter.notes


def test_a_bug_in_one_conversation_ends_only_that_stream(seed_and_reader: SeedAndReader) -> None:
    """The reader is notified of the end, and can open another stream."""
    line, other = (
        seed_and_reader.peer.open_control_stream(seed_and_reader.channel_id),
        seed_and_reader.peer.open_control_stream(seed_and_reader.channel_id),
    )
    line.send(b"break")
    with pytest.raises(SourceUnavailable):
        line.receive(soon())
    other.send(b"ab")
    assert b"ba" == other.receive(soon())


def test_a_channel_that_closes_ends_its_stream(seed_and_reader: SeedAndReader) -> None:
    """It ends on both sides, although neither closed the stream."""
    line = seed_and_reader.peer.open_control_stream(seed_and_reader.channel_id)
    assert seed_and_reader.exporter.begun.acquire(timeout=SOON_S)
    seed_and_reader.seed.close_channel(seed_and_reader.channel_id)
    with pytest.raises(SourceError):
        line.receive(soon())
    assert seed_and_reader.exporter.stopped.acquire(timeout=SOON_S)


def test_a_fence_ends_streams(grpc_pair: SeedAndReader) -> None:
    """Changed weights end the channels and so their streams; the reader gets the reason."""
    line = grpc_pair.peer.open_control_stream(grpc_pair.channel_id)
    line.send(b"ab")
    line.receive(soon())
    grpc_pair.seed.fence()
    with pytest.raises(SourceWeightsChanged):
        line.receive(soon())
    assert grpc_pair.exporter.stopped.acquire(timeout=SOON_S)


@pytest.mark.slow  # logic: tests/unit/source/test_leases.py
def test_an_expired_lease_ends_its_stream(grpc_pair: SeedAndReader) -> None:
    """A silent reader occupies a thread of the seed no longer than its lease lasts."""
    peer = grpc_pair.dial(grpc_pair.token("fork-2", lifetime_s=4.0))
    line = peer.open_control_stream(peer.open(grpc_pair.seed.image.layout.layout_id, ("memory",), soon())[0])
    with pytest.raises(SourceError):
        line.receive(soon())
    peer.close()
    assert grpc_pair.exporter.stopped.acquire(timeout=SOON_S)


def test_a_seed_that_stops_ends_its_streams(seed_and_reader: SeedAndReader) -> None:
    """The reader raises SourceUnavailable immediately."""
    line = seed_and_reader.peer.open_control_stream(seed_and_reader.channel_id)
    assert seed_and_reader.exporter.begun.acquire(timeout=SOON_S)
    seed_and_reader.seed.close()
    with pytest.raises(SourceUnavailable):
        line.receive(soon())
    assert seed_and_reader.exporter.stopped.acquire(timeout=SOON_S)


def test_only_the_channels_owner_can_open_a_stream(grpc_pair: SeedAndReader) -> None:
    """Another fork's channel, an unknown channel or a forged lease starts no thread on the seed."""
    refused: list[type[Exception]] = []
    for token_text, channel_id in (
        (grpc_pair.token("fork-2"), grpc_pair.channel_id),
        (grpc_pair.token(), "none"),
        ("forged", grpc_pair.channel_id),
    ):
        peer = grpc_pair.dial(token_text)
        line = peer.open_control_stream(channel_id)
        with pytest.raises(RforkError) as raised:
            line.receive(soon())
        refused.append(raised.type)
        peer.close()
    assert [SourceWeightsChanged, SourceWeightsChanged, LeaseRejected] == refused
    assert not grpc_pair.exporter.begun.acquire(blocking=False)


def test_a_fork_has_few_streams(grpc_pair: SeedAndReader) -> None:
    """One above the limit is refused; once a stream has ended, another can be opened."""
    lines = [grpc_pair.peer.open_control_stream(grpc_pair.channel_id) for _ in range(MAX_CONTROL_STREAMS)]
    for line in lines:
        line.send(b"ab")
        line.receive(soon())
    with pytest.raises(SourceBusy):
        grpc_pair.peer.open_control_stream(grpc_pair.channel_id).receive(soon())
    lines[0].close()
    assert grpc_pair.exporter.stopped.acquire(timeout=SOON_S)

    def can_open_stream() -> bool:
        try:
            line = grpc_pair.peer.open_control_stream(grpc_pair.channel_id)
            line.send(b"ab")
            return line.receive(soon()) == b"ba"
        except (SourceBusy, SourceUnavailable):
            return False

    assert until(can_open_stream)


def test_a_reader_that_does_not_receive_is_cut_off(grpc_pair: SeedAndReader) -> None:
    """The queue of its messages is bounded: the source's thread ends instead of waiting."""
    address = grpc_pair.seed.report().address
    call_finished = threading.Event()

    def requests() -> Iterator[peer_pb2.ControlStreamRequest]:
        yield peer_pb2.ControlStreamRequest(channel_id=grpc_pair.channel_id)
        yield peer_pb2.ControlStreamRequest(content=b"flood")
        call_finished.wait(SOON_S)

    with grpc.insecure_channel(address) as channel:
        stub = peer_pb2_grpc.PeerStub(channel)
        call = stub.ControlStream(requests(), metadata=(("authorization", f"Bearer {grpc_pair.token()}"),))
        stopped = grpc_pair.exporter.stopped.acquire(timeout=SOON_S)
        call.cancel()
        call_finished.set()
    assert stopped


def test_a_source_with_unread_messages_waits(grpc_pair: SeedAndReader) -> None:
    """A reader that receives may send far more than fits into memory: nothing is lost."""
    line = grpc_pair.peer.open_control_stream(grpc_pair.channel_id)
    count = 3 * MAX_QUEUED_MESSAGES
    received: list[bytes] = []
    for index in range(count):
        line.send(b"%d" % index)
        received.append(line.receive(soon()))
    assert [(b"%d" % index)[::-1] for index in range(count)] == received
