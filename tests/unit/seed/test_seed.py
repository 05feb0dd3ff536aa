"""A seed, without sockets: what it admits, what it tells, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.errors import LayoutMismatch, LeaseRefused, SourceBusy, SourceChanged, TransportUnusable
from rfork.image.board import ChunkBoard
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.peer.answers import PeerHost
from rfork.peer.base import Progress
from rfork.peer.memory import MemoryPeers
from rfork.peer.server import PeerService
from rfork.seed import holding
from rfork.seed.holding import seal
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings
from rfork.transport.base import Gate
from rfork.transport.memory import MemoryExporter, MemoryNetwork, MemoryTransport
from rfork.wire import Rank, StorageOffer

KEY = derive_key(b"s" * 32, "seed-1")
IMAGE = image_of({"a": torch.arange(3 * MIB, dtype=torch.uint8)})
LAYOUT_ID = IMAGE.layout.layout_id


def made(
    board: ChunkBoard | None = None,
    *,
    network: MemoryNetwork | None = None,
    of: Image = IMAGE,
    peers: MemoryPeers | None = None,
) -> Seed:
    seed = Seed(
        of,
        Identity("model", instance_id="seed-1"),
        Settings(host="node", drain_s=0),
        [MemoryTransport(network or MemoryNetwork())],
        board=board,
        manifest=seal(of) if board is None else None,
        serve_peer=(peers or MemoryPeers()).service,
    )
    seed.learn_keys([KEY])
    return seed


def token(fork_id: str = "fork-1", generation: int = 0) -> str:
    claims = LeaseClaims(fork_id, "seed-1", LAYOUT_ID, None, generation, time.time() + 60)
    return sign(claims, decode_key(KEY))


def test_a_server_names_the_instances_of_its_ranks() -> None:
    """Each start has an id of its own, which begins with the server's name where it has one."""
    rank = Rank(tp=1, tp_size=2, dp=3)
    one, other = (Identity.of("model", rank, "pod-7").instance_id for _ in range(2))
    alone = Identity.of("model", rank, None).instance_id
    start = "pod-7-target-tp1of2-pp0of1-ep0of1-dp3-"
    begin = [each.startswith(start) for each in (one, other, alone)]
    assert ([True, True, False], True, 32) == (begin, one != other, len(alone))


def test_a_seed_reports_a_whole_image() -> None:
    """All chunks, its weights, where it is, and that it serves."""
    with made() as seed:
        report = seed.report()
    assert ("serving", ((0, 3),), seal(IMAGE).weights_id, ("memory",), "node") == (
        report.state,
        report.verified,
        report.weights_id,
        report.transports,
        report.placement.host,
    )


def test_a_relay_starts_with_nothing() -> None:
    """An empty board is a board: a relay that has received nothing claims nothing and gives nothing."""
    with made(ChunkBoard(IMAGE.layout.chunks)) as relay:
        report = relay.report()
        with pytest.raises(SourceBusy):
            relay.admit(token(), 0, 1)
    assert ("loading", (), None) == (report.state, report.verified, report.weights_id)


def test_a_relay_admits_what_it_has_verified() -> None:
    """A range is admitted once every chunk it touches is verified."""
    with made(ChunkBoard(IMAGE.layout.chunks, [1])) as relay:
        assert "fork-1" == relay.admit(token(), MIB, 2 * MIB)
        with pytest.raises(SourceBusy):
            relay.admit(token(), MIB, 2 * MIB + 1)


def test_no_lease_no_bytes() -> None:
    """A token that is no lease is refused before the range is looked at."""
    with made() as seed, pytest.raises(LeaseRefused):
        seed.admit("forged", 0, 1)


def test_a_seed_that_was_fenced_gives_again_once_it_is_resealed() -> None:
    """Under the new generation, with the digests of the bytes as they are now."""
    with made() as seed:
        seed.fence()
        fenced = seed.report()
        seed.reseal()
        report = seed.report()
    assert [("loading", 1, (), None), ("serving", 1, ((0, 3),), seal(IMAGE).weights_id)] == [
        (told.state, told.generation, told.verified, told.weights_id) for told in (fenced, report)
    ]


def test_a_fence_cuts_readers_off() -> None:
    """From the fence on nothing is given, leases of the old generation are void, and the tag is another."""
    with made() as seed:
        before = seed.etag()
        seed.fence()
        with pytest.raises(SourceChanged):
            seed.admit(token(), 0, 1)
        with pytest.raises(SourceBusy):
            seed.admit(token(generation=1), 0, 1)
        report = seed.report()
    assert (1, "loading", (), None, True) == (
        report.generation,
        report.state,
        report.verified,
        report.weights_id,
        before != seed.etag(),
    )


def test_a_fence_waits_for_the_slice_under_way() -> None:
    """A reader that does not take its slice is cut; after the fence nothing is read any more."""
    said: list[str] = []
    begun, ended = threading.Event(), threading.Event()

    def cut() -> None:
        said.append("cut")
        ended.set()

    def read() -> None:
        with seed.reading(token(), 0, MIB, cut):
            begun.set()
            ended.wait(60)
            said.append("read")

    with made() as seed:
        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        seed.fence()
        said.append("fenced")
        with pytest.raises(SourceChanged), seed.reading(token(), 0, MIB, cut):
            said.append("read after all")
        thread.join()
    assert ["cut", "read", "fenced"] == said


@pytest.mark.parametrize("change", [Seed.fence, lambda seed: seed.drop([0])], ids=["fence", "drop"])
def test_new_bytes_end_all_channels(change: Callable[[Seed], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads without asking is out when the bytes may change, and is told why before that."""
    said: list[str] = []
    monkeypatch.setattr(MemoryExporter, "let_out", lambda self, channel_id: said.append("out"))
    peers = MemoryPeers()
    with made(peers=peers) as seed:
        peer = peers.dial(seed.report().address, token)
        channel, _ = peer.open(LAYOUT_ID, ("memory",), time.monotonic() + 60)
        news = peer.watch(channel, 60)
        next(news)
        with seed.on_change(lambda: said.append(f"told of {seed.generation}")):
            change(seed)
        said.append("changed")
        with pytest.raises(SourceChanged, match="the weights changed"):
            next(news)
        assert () == seed.report().readers
    out = said.index("out")
    assert ({"told of 1"}, 1, "changed") == ({*said[:out]}, said.count("out"), said[-1])


def test_dropped_chunks_are_not_read_any_more() -> None:
    """Who dropped them is about to write them anew: reads under way are over first."""
    said: list[str] = []
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        with seed.reading(token(), MIB, 2 * MIB, ended.set):
            begun.set()
            ended.wait(60)
            said.append("read")

    with made(ChunkBoard(IMAGE.layout.chunks, [0, 1])) as seed:
        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        seed.drop([1])
        said.append("dropped")
        thread.join()
    assert ["read", "dropped"] == said


def test_an_update_gives_the_new_bytes_afterwards() -> None:
    """Inside the block nothing is given; after it the new weights are, under another generation."""
    image = image_of({"a": torch.zeros(2 * MIB, dtype=torch.uint8)})
    before = seal(image).weights_id
    with made(of=image) as seed:
        with seed.updating():
            inside = seed.report()
            image.regions[0].fill_(1)
        after = seed.report()
    assert (before != after.weights_id, seal(image).weights_id) == (True, after.weights_id)
    assert [("loading", 1, None), ("serving", 1, after.weights_id)] == [
        (told.state, told.generation, told.weights_id) for told in (inside, after)
    ]


def test_an_update_that_fails_gives_nothing() -> None:
    """What the weights are then nobody knows: it stays fenced until an update that does not fail."""
    with made() as seed:
        with pytest.raises(RuntimeError, match="half written"), seed.updating():
            raise RuntimeError("half written")
        failed = seed.report()
        with seed.updating():
            pass
        report = seed.report()
    assert [("loading", 1, ()), ("serving", 2, ((0, 3),))] == [
        (told.state, told.generation, told.verified) for told in (failed, report)
    ]


def test_a_fence_while_the_digests_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests may be of bytes that changed meanwhile: they are not given."""
    with made() as seed:

        def sealed(image: Image) -> Manifest:
            manifest = seal(image)
            seed.fence()
            return manifest

        monkeypatch.setattr(holding, "seal", sealed)
        seed.reseal()
        report = seed.report()
    assert ("loading", (), None) == (report.state, report.verified, report.weights_id)


def test_a_manifest_of_another_layout_is_not_learnt() -> None:
    """A relay takes no manifest that does not describe its image."""
    other = seal(image_of({"b": torch.zeros(8)}))
    with made(ChunkBoard(IMAGE.layout.chunks)) as relay, pytest.raises(LayoutMismatch):
        relay.learn(other)


def test_a_channel_of_another_layout_is_refused() -> None:
    """Only a target of the same layout gets a place."""
    with made() as seed:
        with pytest.raises(LayoutMismatch):
            seed.open_channel(seed.check(token()), "0" * 32, ["memory"], "127.0.0.1")
        assert () == seed.report().readers


def test_a_channel_needs_a_transport_of_both() -> None:
    """The first transport that both sides have is used; without one there is no channel."""
    with made() as seed:
        fork_id = seed.check(token())
        _, endpoint = seed.open_channel(fork_id, LAYOUT_ID, ["carrier pigeon", "memory"], "127.0.0.1")
        with pytest.raises(SourceChanged):
            seed.open_channel(fork_id, LAYOUT_ID, ["carrier pigeon"], "127.0.0.1")
    assert "memory" == endpoint.transport


def test_draining_waits_for_readers_and_takes_no_more() -> None:
    """A draining seed refuses new readers and is done when the last one has left."""
    with made() as seed:
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
    with made() as seed:
        seed.open_channel(seed.check(token()), LAYOUT_ID, ["memory"], "127.0.0.1")
        assert not seed.drain(0.01)
        seed.close()


def test_changes_are_told() -> None:
    """Board, manifest, state and readers: whoever listens hears of each, until it leaves."""
    heard: list[str] = []
    with made(ChunkBoard(IMAGE.layout.chunks)) as relay:
        with relay.on_change(lambda: heard.append(relay.report().state)):
            relay.learn(seal(IMAGE))
            relay.board.mark(0)
            relay.serve()
            relay.close_channel("none")
        relay.board.mark(1)
    assert ["loading", "loading", "serving", "serving"] == heard


def test_what_is_given_is_counted() -> None:
    """Every byte that passes the governor counts."""
    with made() as seed:
        seed.grant(3, "fork-1")
        seed.grant(4, "fork-2")
    assert 7 == seed.given_bytes


def test_closing_leaves_nothing_open() -> None:
    """A closed seed has left the network; closing twice is harmless."""
    network = MemoryNetwork()
    seed = made(network=network).start()
    seed.close()
    seed.close()
    assert ({}, "closed:0") == (network.exports, seed.report().address)


def test_a_start_that_fails_leaves_nothing_open() -> None:
    """When the peer service cannot start, the exporters that already run are closed."""
    network = MemoryNetwork()

    def taken(host: PeerHost, settings: Settings) -> PeerService:
        raise OSError("taken")

    seed = Seed(IMAGE, Identity("model"), Settings(), [MemoryTransport(network)], serve_peer=taken)
    with pytest.raises(OSError, match="taken"):
        seed.start()
    assert {} == network.exports


def test_a_relay_without_a_manifest_tells_digests() -> None:
    """Chunks of a draft are told with their digests, and only where these are known."""
    with made(ChunkBoard(IMAGE.layout.chunks, [2])) as seed:
        seed.board.begin("files")
        seed.board.mark(0, b"0" * 16)
        seed.board.mark(1, b"1" * 16)
        assert Progress(((1, 2),), False, (b"1" * 16,), "files") == seed.news(((0, 1),))


@pytest.mark.parametrize("relayed", [True, False])
def test_storage_that_is_read_is_told_by_its_age(relayed: bool) -> None:
    """Readers hear how long ago it gave something, by the time they are told; and when nobody reads."""
    with made(ChunkBoard(IMAGE.layout.chunks)) as seed:
        began = time.monotonic()
        seed.say_reading(lambda: began - 5.0, relayed=relayed)
        told = seed.news(()).reading
        most = time.monotonic() - began + 5.0
        seed.say_reading(None)
        assert told is not None
        assert (True, relayed, None) == (5.0 <= told.idle_s <= most, told.relayed, seed.news(()).reading)


def test_readers_are_woken_when_storage_has_advanced_by_a_while() -> None:
    """Not for each block, and not for what only was told once more."""
    heard: list[float] = []
    with made(ChunkBoard(IMAGE.layout.chunks)) as seed, seed.on_change(lambda: heard.append(at)):
        for at in (100.0, 100.5, 101.0, 101.5, 101.5):
            seed.say_reading(partial(float, at))
    assert [100.0, 101.0] == heard


def test_a_seed_that_drains_goes_on_draining() -> None:
    """New weights, or the end of its own fork, do not bring readers back to an instance that is to go."""
    with made() as seed:
        seed.drain(0.0)
        states = [seed.report().state]
        for change in (seed.fence, seed.reseal, seed.serve):
            change()
            states.append(seed.report().state)
    assert ["draining"] * 4 == states


def test_a_sealed_relay_tells_its_weights() -> None:
    """Once the manifest is known its weights_id stands for all digests."""
    manifest = seal(IMAGE)
    with made(ChunkBoard(IMAGE.layout.chunks)) as seed:
        seed.board.begin("files")
        seed.board.mark(0, manifest.digests[0])
        seed.learn(manifest)
        assert Progress(((0, 1),), False, weights_id=manifest.weights_id) == seed.news(())


def test_dropped_chunks_fence_their_readers() -> None:
    """Whoever read a chunk that turned out wrong sees another generation."""
    with made(ChunkBoard(IMAGE.layout.chunks, [0, 1])) as seed:
        seed.drop([1])
        assert (1, ((0, 1),)) == (seed.generation, seed.report().verified)
        with pytest.raises(SourceChanged):
            seed.admit(token(generation=0), 0, 1)


def test_a_report_says_what_it_could_read() -> None:
    """Offers of storage, the origin of a draft, and the shares and labels of the settings."""
    offer = StorageOffer(kind="checkpoint", uri="file:///files", origin="a" * 32)
    with made(ChunkBoard(IMAGE.layout.chunks)) as seed:
        seed.storage = (offer,)
        seed.board.begin(f"{'a' * 32}-01")
        report = seed.report()
    assert ((offer,), "a" * 32, 1.0, None) == (
        report.storage,
        report.draft,
        report.weight,
        report.placement.nvlink,
    )


class Unusable(MemoryTransport):
    """A transport that cannot export an image."""

    def __init__(self, name: str) -> None:
        super().__init__(MemoryNetwork())
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def export(self, image: Image, gate: Gate) -> MemoryExporter:
        raise TransportUnusable(f"{self._name}: not for this image", hint="take another")


def offering(*transports: MemoryTransport) -> Seed:
    """A seed that was told to offer these; not started."""
    return Seed(
        IMAGE,
        Identity("model", instance_id="seed-1"),
        Settings(host="node", drain_s=0),
        list(transports),
        manifest=seal(IMAGE),
        serve_peer=MemoryPeers().service,
    )


def test_a_transport_that_cannot_export_the_image_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """The others are offered, and one warning names it with what to do."""
    with offering(Unusable("cuda_ipc"), MemoryTransport(MemoryNetwork())) as seed:
        offered = seed.report().transports
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    told = ["cuda_ipc: not for this image" in line and "take another" in line for line in warnings]
    assert (("memory",), [True]) == (offered, told)


def test_a_seed_that_no_transport_can_export_does_not_start() -> None:
    """The first one's error says why; nothing stays open."""
    with pytest.raises(TransportUnusable, match="cuda_ipc: not for this image"):
        offering(Unusable("cuda_ipc"), Unusable("shared_memory")).start()
