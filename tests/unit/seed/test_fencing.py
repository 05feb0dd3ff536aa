"""Weights that change: what is cut off, what is dropped, and what is given afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from rfork.errors import SourceBusy, SourceChanged
from rfork.image.board import ChunkBoard
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.peer.memory import MemoryPeers
from rfork.seed import holding
from rfork.seed.holding import seal
from rfork.seed.seed import Seed
from rfork.transport.memory import MemoryExporter
from tests.unit.seed.seeds import IMAGE, LAYOUT_ID, made, token


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


def test_a_fence_while_a_read_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there a moment ago is not missing: the weights changed."""
    holds = ChunkBoard.holds

    def fenced(board: ChunkBoard, begin: int, end: int) -> bool:
        if not seed.generation:
            seed.fence()
        return holds(board, begin, end)

    with made() as seed:
        leased = token()
        monkeypatch.setattr(ChunkBoard, "holds", fenced)
        with pytest.raises(SourceChanged):
            seed.admit(leased, 0, 1)


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


def test_dropped_chunks_fence_their_readers() -> None:
    """Whoever read a chunk that turned out wrong sees another generation."""
    with made(ChunkBoard(IMAGE.layout.chunks, [0, 1])) as seed:
        seed.drop([1])
        assert (1, ((0, 1),)) == (seed.generation, seed.report().verified)
        with pytest.raises(SourceChanged):
            seed.admit(token(generation=0), 0, 1)
