"""Lines between a reader and its source's exporter: in memory and over gRPC on the loopback interface."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
import torch

from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.errors import (
    LeaseRefused,
    RforkError,
    SourceBusy,
    SourceChanged,
    SourceError,
    SourceGone,
    SourceStalled,
)
from rfork.image.capture import image_of
from rfork.image.memory import Image
from rfork.peer.base import Peer
from rfork.peer.client import PeerClient
from rfork.peer.lines import LARGEST_MESSAGE, MOST_LINES, MOST_WAITING
from rfork.peer.memory import MemoryPeers
from rfork.peer.v1 import peer_pb2, peer_pb2_grpc
from rfork.seed.holding import seal
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings, TlsSettings
from rfork.transport.base import Gate, Line
from rfork.transport.memory import Faults, MemoryExporter, MemoryNetwork, MemoryTransport

KEY = derive_key(b"s" * 32, "seed-1")
SOON_S = 30.0
LINE_THREADS = ("rfork-line",)


class Talker(MemoryExporter):
    """Answers each message with itself reversed; `hush` ends the line, `flood` says more than can wait.

    Notes are heard, and not answered.
    """

    def __init__(self, network: MemoryNetwork, image: Image, gate: Gate) -> None:
        super().__init__(network, image, gate, Faults())
        self.begun = threading.Semaphore(0)
        self.notes: list[bytes] = []
        self.ended: list[RforkError] = []
        self.over = threading.Semaphore(0)

    def converse(self, channel_id: str, line: Line) -> None:
        self.begun.release()
        try:
            while (message := line.receive(soon())) != b"hush":
                if message == b"flood":
                    while True:
                        line.send(bytes(LARGEST_MESSAGE))
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
            self.over.release()


class TalkerTransport(MemoryTransport):
    def __init__(self) -> None:
        self.network = MemoryNetwork()
        super().__init__(self.network)
        self.talkers: list[Talker] = []

    def export(self, image: Image, gate: Gate) -> MemoryExporter:
        self.talkers.append(Talker(self.network, image, gate))
        return self.talkers[-1]


class Scene:
    """A seed, and a reader of it with an open channel."""

    def __init__(self, carrier: str) -> None:
        image = image_of({"a": torch.arange(100)})
        self.transport = TalkerTransport()
        self.peers = MemoryPeers()
        service = {"serve_peer": self.peers.service} if carrier == "memory" else {}
        self.seed = Seed(
            image,
            Identity("model", instance_id="seed-1"),
            Settings(),
            [self.transport],
            manifest=seal(image),
            **service,  # type: ignore[arg-type]  # one keyword, or none
        )
        self.seed.learn_keys([KEY])
        self.seed.start()
        self.carrier = carrier
        self.peer = self.dial()
        self.channel_id = self.peer.open(image.layout.layout_id, ("memory",), soon())[0]

    def dial(self, shown: str | None = None) -> Peer:
        token = shown or self.token()
        address = self.seed.report().address
        if self.carrier == "memory":
            return self.peers.dial(address, lambda: token)
        return PeerClient(address, lambda: token, TlsSettings())

    def token(self, fork_id: str = "fork-1", lives_s: float = 60.0) -> str:
        layout_id = self.seed.image.layout.layout_id
        claims = LeaseClaims(fork_id, "seed-1", layout_id, None, self.seed.generation, time.time() + lives_s)
        return sign(claims, decode_key(KEY))

    @property
    def talker(self) -> Talker:
        return self.transport.talkers[0]

    def close(self) -> None:
        self.peer.close()
        self.seed.close()


def soon() -> float:
    return time.monotonic() + SOON_S


def talking_threads() -> int:
    return sum(thread.name in LINE_THREADS for thread in threading.enumerate())


def until(condition: Callable[[], bool]) -> bool:
    """Whether the condition holds within half a minute."""
    deadline, changed = soon(), threading.Event()
    while time.monotonic() < deadline:
        if condition():
            return True
        changed.wait(0.01)
    return False


@pytest.fixture(params=["memory", "grpc"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """One seed and one reader; at the end no line's thread is left."""
    made = Scene(request.param)
    yield made
    made.close()
    assert until(lambda: talking_threads() == 0)


@pytest.fixture
def over_grpc() -> Iterator[Scene]:
    """One seed and one reader, over gRPC."""
    made = Scene("grpc")
    yield made
    made.close()
    assert until(lambda: talking_threads() == 0)


def test_messages_go_both_ways_in_order(scene: Scene) -> None:
    """Of any size up to the largest, and each once."""
    line = scene.peer.talk(scene.channel_id)
    said = [b"one", b"", b"x" * (LARGEST_MESSAGE - 1) + b"y", b"four"]
    for message in said:
        line.send(message)
    assert [message[::-1] for message in said] == [line.receive(soon()) for _ in said]


def test_a_message_that_is_too_large_is_the_callers_error(scene: Scene) -> None:
    """It is not sent, and the line goes on."""
    line = scene.peer.talk(scene.channel_id)
    with pytest.raises(ValueError, match="65536"):
        line.send(bytes(LARGEST_MESSAGE + 1))
    line.send(b"ab")
    assert b"ba" == line.receive(soon())


def test_silence_ends_at_the_deadline(scene: Scene) -> None:
    """Nothing was said: SourceStalled, and the line goes on."""
    line = scene.peer.talk(scene.channel_id)
    with pytest.raises(SourceStalled):
        line.receive(time.monotonic() + 0.05)
    line.send(b"ab")
    assert b"ba" == line.receive(soon())


def test_the_source_hangs_up(scene: Scene) -> None:
    """What it said before is heard; then there is nothing more to hear or to say."""
    line = scene.peer.talk(scene.channel_id)
    line.send(b"ab")
    line.send(b"hush")
    heard = line.receive(soon())
    with pytest.raises(SourceGone):
        line.receive(soon())
    with pytest.raises(SourceGone):
        line.send(b"more")
    assert b"ba" == heard


def test_the_reader_hangs_up(scene: Scene) -> None:
    """The source's thread ends; closing twice is harmless."""
    line = scene.peer.talk(scene.channel_id)
    assert scene.talker.begun.acquire(timeout=SOON_S)
    line.close()
    line.close()
    assert scene.talker.over.acquire(timeout=SOON_S)
    with pytest.raises(SourceGone):
        line.receive(soon())
    assert [SourceGone] == [type(error) for error in scene.talker.ended]


def test_what_was_said_before_hanging_up_is_heard(scene: Scene) -> None:
    """A reader that says it is done and closes the line has said so."""
    line = scene.peer.talk(scene.channel_id)
    line.send(b"note one")
    line.send(b"note two")
    line.close()
    assert scene.talker.over.acquire(timeout=SOON_S)
    assert [b"note one", b"note two"] == scene.talker.notes


def test_a_bug_in_one_conversation_ends_that_line_alone(scene: Scene) -> None:
    """The reader hears that it is over, and can open another."""
    line, other = scene.peer.talk(scene.channel_id), scene.peer.talk(scene.channel_id)
    line.send(b"break")
    with pytest.raises(SourceGone):
        line.receive(soon())
    other.send(b"ab")
    assert b"ba" == other.receive(soon())


def test_a_channel_that_closes_ends_its_line(scene: Scene) -> None:
    """On both sides, though neither said so on the line."""
    line = scene.peer.talk(scene.channel_id)
    assert scene.talker.begun.acquire(timeout=SOON_S)
    scene.seed.close_channel(scene.channel_id)
    with pytest.raises(SourceError):
        line.receive(soon())
    assert scene.talker.over.acquire(timeout=SOON_S)


def test_a_fence_ends_lines(over_grpc: Scene) -> None:
    """Weights that change end the channels and so their lines; the reader hears why."""
    line = over_grpc.peer.talk(over_grpc.channel_id)
    line.send(b"ab")
    line.receive(soon())
    over_grpc.seed.fence()
    with pytest.raises(SourceChanged):
        line.receive(soon())
    assert over_grpc.talker.over.acquire(timeout=SOON_S)


def test_a_lease_that_ends_ends_its_line(over_grpc: Scene) -> None:
    """A reader that is silent holds a thread of the seed no longer than its lease."""
    peer = over_grpc.dial(over_grpc.token("fork-2", lives_s=4.0))
    line = peer.talk(peer.open(over_grpc.seed.image.layout.layout_id, ("memory",), soon())[0])
    with pytest.raises(SourceError):
        line.receive(soon())
    peer.close()
    assert over_grpc.talker.over.acquire(timeout=SOON_S)


def test_a_seed_that_stops_ends_its_lines(scene: Scene) -> None:
    """The reader hears that the source is gone, at once."""
    line = scene.peer.talk(scene.channel_id)
    assert scene.talker.begun.acquire(timeout=SOON_S)
    scene.seed.close()
    with pytest.raises(SourceGone):
        line.receive(soon())
    assert scene.talker.over.acquire(timeout=SOON_S)


def test_only_who_holds_the_channel_talks(over_grpc: Scene) -> None:
    """Another fork's channel, one that is none, a forged lease: no thread of the seed is begun."""
    refused: list[type[Exception]] = []
    for shown, channel_id in (
        (over_grpc.token("fork-2"), over_grpc.channel_id),
        (over_grpc.token(), "none"),
        ("forged", over_grpc.channel_id),
    ):
        peer = over_grpc.dial(shown)
        line = peer.talk(channel_id)
        with pytest.raises(RforkError) as raised:
            line.receive(soon())
        refused.append(raised.type)
        peer.close()
    assert [SourceChanged, SourceChanged, LeaseRefused] == refused
    assert not over_grpc.talker.begun.acquire(blocking=False)


def test_one_fork_has_few_lines(over_grpc: Scene) -> None:
    """The next one is refused; once one has ended there is room again."""
    lines = [over_grpc.peer.talk(over_grpc.channel_id) for _ in range(MOST_LINES)]
    for line in lines:
        line.send(b"ab")
        line.receive(soon())
    with pytest.raises(SourceBusy):
        over_grpc.peer.talk(over_grpc.channel_id).receive(soon())
    lines[0].close()
    assert over_grpc.talker.over.acquire(timeout=SOON_S)

    def talks() -> bool:
        try:
            line = over_grpc.peer.talk(over_grpc.channel_id)
            line.send(b"ab")
            return line.receive(soon()) == b"ba"
        except (SourceBusy, SourceGone):
            return False

    assert until(talks)


def test_a_reader_that_does_not_listen_is_cut_off(over_grpc: Scene) -> None:
    """What waits for it is bounded: the source's thread ends instead of waiting."""
    address = over_grpc.seed.report().address
    held = threading.Event()

    def said() -> Iterator[peer_pb2.ConverseRequest]:
        yield peer_pb2.ConverseRequest(channel_id=over_grpc.channel_id)
        yield peer_pb2.ConverseRequest(content=b"flood")
        held.wait(SOON_S)

    with grpc.insecure_channel(address) as channel:
        stub = peer_pb2_grpc.PeerStub(channel)
        call = stub.Converse(said(), metadata=(("authorization", f"Bearer {over_grpc.token()}"),))
        over = over_grpc.talker.over.acquire(timeout=SOON_S)
        call.cancel()
        held.set()
    assert over


def test_a_source_that_is_not_heard_out_waits(over_grpc: Scene) -> None:
    """A reader may say far more than fits into memory as long as it hears: nothing is lost."""
    line = over_grpc.peer.talk(over_grpc.channel_id)
    count = 3 * MOST_WAITING
    heard: list[bytes] = []
    for index in range(count):
        line.send(b"%d" % index)
        heard.append(line.receive(soon()))
    assert [(b"%d" % index)[::-1] for index in range(count)] == heard
