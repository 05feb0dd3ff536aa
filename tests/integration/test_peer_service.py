"""The peer service over gRPC on the loopback interface: one real seed, real clients."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.errors import (
    LayoutMismatch,
    LeaseRefused,
    PortInUse,
    SettingsError,
    SourceBusy,
    SourceChanged,
    SourceError,
    SourceGone,
    SourceStalled,
)
from rfork.image.board import ChunkBoard
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.peer.base import Progress, Reading
from rfork.peer.client import PeerClient
from rfork.peer.v1 import peer_pb2, peer_pb2_grpc
from rfork.seed.holding import seal
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings, TlsSettings
from rfork.transport.base import Endpoint
from rfork.transport.memory import MemoryNetwork, MemoryTransport

KEY = derive_key(b"s" * 32, "seed-1")
SOON_S = 30.0
StartSeed = Callable[..., Seed]


@pytest.fixture
def start_seed() -> Iterator[StartSeed]:
    """Starts seeds of a 3-chunk image over gRPC, and closes them."""
    started: list[Seed] = []

    def start(
        image: Image | None = None,
        board: ChunkBoard | None = None,
        *,
        knows: bool = True,
        port: int = 0,
        readers: int = 1,
    ) -> Seed:
        held = image or image_of({"a": torch.arange(3 * MIB, dtype=torch.uint8)})
        seed = Seed(
            held,
            Identity("model", instance_id="seed-1"),
            Settings(peer_port=port, max_readers=readers),
            [MemoryTransport(MemoryNetwork())],
            board=board,
            manifest=seal(held) if knows else None,
        )
        seed.learn_keys([KEY])
        started.append(seed.start())
        return seed

    yield start
    for seed in started:
        seed.close()


def token(seed: Seed, fork_id: str = "fork-1", *, lives_s: float = 60.0, key: str = KEY) -> str:
    claims = LeaseClaims(
        fork_id, "seed-1", seed.image.layout.layout_id, None, seed.generation, time.time() + lives_s
    )
    return sign(claims, decode_key(key))


def client(seed: Seed, shown: str | None = None, tls: TlsSettings | None = None) -> PeerClient:
    shown = token(seed) if shown is None else shown
    return PeerClient(seed.report().address, lambda: shown, tls or TlsSettings())


def soon() -> float:
    return time.monotonic() + SOON_S


def opened(seed: Seed, peer: PeerClient) -> str:
    return peer.open(seed.image.layout.layout_id, ("memory",), soon())[0]


def chunks_of(news: Iterator[Progress]) -> tuple[Range, ...]:
    """The next chunks, past any keep-alives."""
    return next(progress.chunks for progress in news if progress.chunks)


def test_a_manifest_of_100_000_tensors_is_streamed(start_seed: StartSeed) -> None:
    """The layout comes with all its tensors, in messages that fit gRPC's limits."""
    memory = torch.zeros(100_000)
    seed = start_seed(image_of({f"layers.{index}.w": memory[index] for index in range(100_000)}))
    peer = client(seed)
    assert (seed.manifest, 100_000) == (peer.full_manifest(soon()), len(seed.image.layout.tensors))
    assert seed.manifest == peer.manifest(seed.image.layout, soon())
    peer.close()


def test_progress_is_told_as_it_is_made(start_seed: StartSeed) -> None:
    """What there is comes at once, then each chunk as it is verified."""
    held = image_of({"a": torch.zeros(3 * MIB, dtype=torch.uint8)})
    board = ChunkBoard(held.layout.chunks, [1])
    seed = start_seed(held, board)
    peer = client(seed)
    news = peer.watch(opened(seed, peer), SOON_S)
    heard = [chunks_of(news)]
    board.mark(0)
    heard.append(chunks_of(news))
    board.mark(2)
    heard.append(chunks_of(news))
    peer.close()
    assert [((1, 2),), ((0, 1),), ((2, 3),)] == heard


def test_a_draft_is_told_with_its_digests(start_seed: StartSeed) -> None:
    """While a relay's manifest is not known each chunk comes with its digest; then its weights are told."""
    held = image_of({"a": torch.zeros(3 * MIB, dtype=torch.uint8)})
    manifest, draft, reading = held.manifest(), "a" * 32, Reading(0.0, relayed=True)
    board = ChunkBoard(held.layout.chunks)
    board.begin(draft)
    board.mark(1, manifest.digests[1])
    relay = start_seed(held, board, knows=False)
    relay.say_reading(lambda: time.monotonic() + 1.0, relayed=True)
    peer = client(relay)
    # On a busy machine keep-alives come in between.
    news = (each for each in peer.watch(opened(relay, peer), SOON_S) if each.chunks or each.weights_id)
    heard = [next(news)]
    board.mark(0, manifest.digests[0])
    heard.append(next(news))
    relay.learn(manifest)
    heard.append(next(news))
    peer.close()
    assert [
        Progress(((1, 2),), False, manifest.digests[1:2], draft, None, reading),
        Progress(((0, 1),), False, manifest.digests[:1], draft, None, reading),
        Progress((), False, weights_id=manifest.weights_id, reading=reading),
    ] == heard


def test_a_dropped_chunk_ends_the_stream(start_seed: StartSeed) -> None:
    """Who may have read a chunk that turned out wrong hears that the weights changed."""
    held = image_of({"a": torch.zeros(3 * MIB, dtype=torch.uint8)})
    seed = start_seed(held, ChunkBoard(held.layout.chunks, [0, 1]))
    peer = client(seed)
    news = peer.watch(opened(seed, peer), SOON_S)
    next(news)
    seed.drop([1])
    with pytest.raises(SourceChanged):
        next(news)
    peer.close()


def test_a_quiet_source_sends_keep_alives(start_seed: StartSeed) -> None:
    """A source with nothing new to say says so, again and again."""
    seed = start_seed()
    peer = client(seed)
    news = peer.watch(opened(seed, peer), 0.1)
    assert [((0, 3),), (), ()] == [next(news).chunks for _ in range(3)]
    peer.close()


def test_draining_is_told(start_seed: StartSeed) -> None:
    """A reader hears that its source will go away, and new readers are refused."""
    seed = start_seed()
    peer = client(seed)
    news = peer.watch(opened(seed, peer), SOON_S)
    before = next(news).draining
    seed.drain(0.0)
    assert (False, True) == (before, next(news).draining)
    with pytest.raises(SourceBusy):
        opened(seed, peer)
    peer.close()


def test_a_broken_stream_gives_the_place_back(start_seed: StartSeed) -> None:
    """A reader that drops its connection, without a word, makes room for the next."""
    seed = start_seed()
    first, freed = client(seed), threading.Event()
    news = first.watch(opened(seed, first), SOON_S)
    next(news)
    second = client(seed, token(seed, "fork-2"))
    with pytest.raises(SourceBusy):
        opened(seed, second)
    with seed.on_change(lambda: freed.set() if not seed.report().readers else None):
        first.close()
        assert freed.wait(SOON_S)
    assert opened(seed, second)
    second.close()


def test_a_fence_ends_the_stream(start_seed: StartSeed) -> None:
    """Who reads the old weights hears that they changed."""
    seed = start_seed()
    peer = client(seed)
    news = peer.watch(opened(seed, peer), SOON_S)
    next(news)
    seed.fence()
    with pytest.raises(SourceChanged):
        next(news)
    peer.close()


def test_a_channel_that_a_fence_ended_says_so(start_seed: StartSeed) -> None:
    """Its place is gone before the stream looks again: the reader still hears why."""
    seed = start_seed()
    peer = client(seed)
    channel = opened(seed, peer)
    news = peer.watch(channel, SOON_S)
    next(news)
    seed.generation += 1
    seed.close_channel(channel)
    with pytest.raises(SourceChanged):
        next(news)
    peer.close()


def test_a_channel_that_a_fence_overtook_is_none(
    start_seed: StartSeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease was good when the call came; the weights changed before the channel was there."""
    seed = start_seed()
    peer = client(seed)
    open_channel = seed.open_channel

    def overtaken(fork_id: str, layout_id: str, transports: list[str], address: str) -> tuple[str, Endpoint]:
        seed.fence()
        return open_channel(fork_id, layout_id, transports, address)

    monkeypatch.setattr(seed, "open_channel", overtaken)
    with pytest.raises(SourceChanged):
        opened(seed, peer)
    assert () == seed.report().readers
    peer.close()


def test_a_manifest_that_is_not_known_yet_is_waited_for(start_seed: StartSeed) -> None:
    """A relay answers once it has learnt what its image holds, and not at all until then."""
    held = image_of({"a": torch.zeros(2 * MIB, dtype=torch.uint8)})
    relay = start_seed(held, ChunkBoard(held.layout.chunks), knows=False)
    peer = client(relay)
    with pytest.raises(SourceStalled):
        peer.manifest(held.layout, time.monotonic() + 0.2)
    relay.learn(seal(held))
    assert relay.manifest == peer.manifest(held.layout, soon())
    peer.close()


BAD_TOKENS: dict[str, Callable[[Seed], str]] = {
    "none": lambda seed: "",
    "forged": lambda seed: token(seed, key=derive_key(b"x" * 32, "seed-1")),
    "expired": lambda seed: token(seed, lives_s=-1),
}
CALLS: dict[str, Callable[[Seed, PeerClient], object]] = {
    "manifest": lambda seed, peer: peer.full_manifest(soon()),
    "open": opened,
    "watch": lambda seed, peer: next(peer.watch("any", 1.0)),
    "renew": lambda seed, peer: peer.renew(soon()),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("bad", BAD_TOKENS)
def test_no_call_without_a_lease(start_seed: StartSeed, bad: str, call: str) -> None:
    """Every call is refused without a good lease."""
    seed = start_seed()
    peer = client(seed, BAD_TOKENS[bad](seed))
    with pytest.raises(LeaseRefused):
        CALLS[call](seed, peer)
    peer.close()


def test_a_refusal_is_permission_denied_on_the_wire(start_seed: StartSeed) -> None:
    """Clients that are not ours see gRPC's own word for it."""
    seed = start_seed()
    with grpc.insecure_channel(seed.report().address) as channel, pytest.raises(grpc.RpcError) as caught:
        peer_pb2_grpc.PeerStub(channel).OpenChannel(peer_pb2.OpenChannelRequest(), timeout=SOON_S)
    assert grpc.StatusCode.PERMISSION_DENIED is caught.value.code()


def test_health_needs_no_lease(start_seed: StartSeed) -> None:
    """A probe asks the standard health service."""
    seed = start_seed()
    with grpc.insecure_channel(seed.report().address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="rfork.v1.Peer"), timeout=SOON_S
        )
    assert health_pb2.HealthCheckResponse.SERVING == answer.status


def test_another_forks_channel_cannot_be_watched(start_seed: StartSeed) -> None:
    """A channel's id is of no use to another fork."""
    seed = start_seed()
    first, second = client(seed), client(seed, token(seed, "fork-2"))
    channel = opened(seed, first)
    with pytest.raises(SourceChanged):
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
    """Two instances told one port: the second says which setting to change."""
    port = int(start_seed().report().address.rpartition(":")[2])
    with pytest.raises(PortInUse, match=str(port)) as caught:
        start_seed(port=port)
    assert "RFORK_PEER_PORT" in caught.value.hint


def test_nobody_there(free_port: int) -> None:
    """A connection that is refused is a source that is gone."""
    peer = PeerClient(f"127.0.0.1:{free_port}", lambda: "token", TlsSettings())
    with pytest.raises(SourceGone):
        peer.full_manifest(soon())
    peer.close()


def test_a_seed_that_closes_ends_its_streams(start_seed: StartSeed) -> None:
    """A reader of a seed that stops hears of it at once."""
    seed = start_seed()
    peer = client(seed)
    news = peer.watch(opened(seed, peer), SOON_S)
    next(news)
    seed.close()
    with pytest.raises(SourceGone):
        for _ in news:
            pass
    peer.close()


def test_a_seed_that_closes_lets_its_calls_end(
    start_seed: StartSeed, caplog: pytest.LogCaptureFixture
) -> None:
    """However many readers it cuts, nothing is left of their calls that complains when it is collected."""
    for _ in range(4):
        seed = start_seed(readers=8)
        peers = [client(seed, token(seed, f"fork-{number}")) for number in range(8)]
        streams = [peer.watch(opened(seed, peer), SOON_S) for peer in peers]
        for news in streams:
            next(news)
        seed.close()
        gc.collect()
        for peer in peers:
            peer.close()
    assert [] == [record.message for record in caplog.records if record.levelname == "ERROR"]


def test_a_closed_client_is_a_source_that_is_gone(start_seed: StartSeed) -> None:
    """Calls on a connection that this side closed fail as any other lost connection."""
    seed = start_seed()
    peer = client(seed)
    peer.close()
    with pytest.raises(SourceGone):
        opened(seed, peer)
    with pytest.raises(SourceGone):
        next(peer.watch("any", 1.0))


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, Path]:
    """An authority, a certificate it issued for loopback, its key, and an authority of strangers."""
    authority, strangers = trustme.CA(), trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    blobs = {
        "ca": authority.cert_pem,
        "strangers": strangers.cert_pem,
        "certificate": issued.cert_chain_pems[0],
        "key": issued.private_key_pem,
    }
    for name, blob in blobs.items():
        blob.write_to_path(str(tmp_path / name))
    return {name: tmp_path / name for name in blobs}


def serve_tls(monkeypatch: pytest.MonkeyPatch, pem: dict[str, Path], *names: str) -> None:
    for name in names:
        monkeypatch.setenv(f"RFORK_TLS_{name.upper()}", str(pem[name]))


def tls_of(**files: Path) -> TlsSettings:
    """A client's own files, whatever the environment says."""
    return TlsSettings(certificate=None, key=None, ca=None).model_copy(update=files)


@pytest.mark.parametrize(
    ("server", "shows", "trusts", "expected"),
    [
        (("certificate", "key"), False, "ca", True),
        (("certificate", "key"), False, "strangers", False),
        (("certificate", "key"), False, None, False),
        (("certificate", "key", "ca"), True, "ca", True),
        (("certificate", "key", "ca"), False, "ca", False),
    ],
    ids=["TLS", "TLS, authority unknown", "TLS, client without", "mTLS", "mTLS, no certificate shown"],
)
def test_tls(
    start_seed: StartSeed,
    monkeypatch: pytest.MonkeyPatch,
    pem: dict[str, Path],
    server: tuple[str, ...],
    shows: bool,
    trusts: str | None,
    expected: bool,
) -> None:
    """Who trusts the authority, and shows a certificate where one is asked for, gets through; nobody else."""
    serve_tls(monkeypatch, pem, *server)
    seed = start_seed()
    files = {"ca": pem[trusts]} if trusts else {}
    if shows:
        files |= {"certificate": pem["certificate"], "key": pem["key"]}
    peer = client(seed, tls=tls_of(**files))
    try:
        got = peer.full_manifest(time.monotonic() + (SOON_S if expected else 2.0)) == seed.manifest
    except SourceError:
        got = False
    finally:
        peer.close()
    assert expected == got


@pytest.mark.parametrize("spoiled", ["certificate", "ca"])
def test_a_tls_file_of_no_use_is_named(
    start_seed: StartSeed, monkeypatch: pytest.MonkeyPatch, pem: dict[str, Path], spoiled: str
) -> None:
    """A file that is no certificate is the user's to mend, and not a port that is taken."""
    serve_tls(monkeypatch, pem, "certificate", "key", "ca")
    pem[spoiled].write_text("not a certificate")
    with pytest.raises(SettingsError, match=f"RFORK_TLS_{spoiled.upper()}"):
        start_seed()
