"""Weights that change: what is cut off, what is dropped, and what is given afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from rfork.errors import SourceBusy, SourceWeightsChanged
from rfork.image.capture import image_from_tensors
from rfork.image.chunk_state import ChunkState
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.source import image_state
from rfork.source.image_state import compute_manifest
from rfork.source.seed import Seed
from rfork.testing.peers import InMemoryPeers
from rfork.testing.transport import InMemoryExporter
from tests.unit.source.seeds import IMAGE, LAYOUT_ID, build_seed, token


def test_a_seed_that_was_fenced_gives_again_once_it_is_resealed() -> None:
    """Under the new generation, with the digests of the bytes as they are now."""
    with build_seed() as seed:
        seed.fence()
        fenced = seed.report()
        seed.publish()
        report = seed.report()
    assert [("loading", 1, (), None), ("serving", 1, ((0, 3),), compute_manifest(IMAGE).weights_id)] == [
        (summary.state, summary.generation, summary.verified, summary.weights_id) for summary in (fenced, report)
    ]


def test_a_fence_cuts_readers_off() -> None:
    """From the fence on nothing is given, leases of the old generation are void, and the tag is another."""
    with build_seed() as seed:
        before = seed.version_tag()
        seed.fence()
        with pytest.raises(SourceWeightsChanged):
            seed.authorize(token(), 0, 1)
        with pytest.raises(SourceBusy):
            seed.authorize(token(generation=1), 0, 1)
        report = seed.report()
    assert (1, "loading", (), None, True) == (
        report.generation,
        report.state,
        report.verified,
        report.weights_id,
        before != seed.version_tag(),
    )


def test_a_fence_while_a_read_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there a moment ago is not missing: the weights changed."""
    contains_range = ChunkState.contains_range

    def fence_then_check(chunk_state: ChunkState, begin: int, end: int) -> bool:
        if not seed.generation:
            seed.fence()
        return contains_range(chunk_state, begin, end)

    with build_seed() as seed:
        leased = token()
        monkeypatch.setattr(ChunkState, "contains_range", fence_then_check)
        with pytest.raises(SourceWeightsChanged):
            seed.authorize(leased, 0, 1)


def test_a_fence_waits_for_the_slice_under_way() -> None:
    """A reader that does not take its slice is cut; after the fence nothing is read any more."""
    events: list[str] = []
    begun, ended = threading.Event(), threading.Event()

    def cut() -> None:
        events.append("cut")
        ended.set()

    def read() -> None:
        with seed.read_guard(token(), 0, MIB, cut):
            begun.set()
            ended.wait(60)
            events.append("read")

    with build_seed() as seed:
        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        seed.fence()
        events.append("fenced")
        with pytest.raises(SourceWeightsChanged), seed.read_guard(token(), 0, MIB, cut):
            events.append("read after all")
        thread.join()
    assert ["cut", "read", "fenced"] == events


@pytest.mark.parametrize("change", [Seed.fence, lambda seed: seed.invalidate([0])], ids=["fence", "invalidate"])
def test_new_bytes_end_all_channels(change: Callable[[Seed], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads without asking is out when the bytes may change, and is told why before that."""
    events: list[str] = []
    monkeypatch.setattr(InMemoryExporter, "revoke_peer", lambda self, channel_id: events.append("out"))
    peers = InMemoryPeers()
    with build_seed(peers=peers) as seed:
        peer = peers.dial(seed.report().address, token)
        channel, _ = peer.open(LAYOUT_ID, ("memory",), time.monotonic() + 60)
        updates = peer.watch(channel, 60)
        next(updates)
        with seed.on_change(lambda: events.append(f"told of {seed.generation}")):
            change(seed)
        events.append("changed")
        with pytest.raises(SourceWeightsChanged, match="the weights changed"):
            next(updates)
        assert () == seed.report().readers
    revoked_at = events.index("out")
    assert ({"told of 1"}, 1, "changed") == ({*events[:revoked_at]}, events.count("out"), events[-1])


def test_dropped_chunks_are_not_read_any_more() -> None:
    """Who dropped them is about to write them anew: reads under way are over first."""
    events: list[str] = []
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        with seed.read_guard(token(), MIB, 2 * MIB, ended.set):
            begun.set()
            ended.wait(60)
            events.append("read")

    with build_seed(ChunkState(IMAGE.layout.chunks, [0, 1])) as seed:
        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        seed.invalidate([1])
        events.append("dropped")
        thread.join()
    assert ["read", "dropped"] == events


def test_an_update_gives_the_new_bytes_afterwards() -> None:
    """Inside the block nothing is given; after it the new weights are, under another generation."""
    image = image_from_tensors({"a": torch.zeros(2 * MIB, dtype=torch.uint8)})
    before = compute_manifest(image).weights_id
    with build_seed(seed_image=image) as seed:
        with seed.updating():
            inside = seed.report()
            image.regions[0].fill_(1)
        after = seed.report()
    assert (before != after.weights_id, compute_manifest(image).weights_id) == (True, after.weights_id)
    assert [("loading", 1, None), ("serving", 1, after.weights_id)] == [
        (summary.state, summary.generation, summary.weights_id) for summary in (inside, after)
    ]


def test_an_update_that_fails_gives_nothing() -> None:
    """What the weights are then nobody knows: it stays fenced until an update that does not fail."""
    with build_seed() as seed:
        with pytest.raises(RuntimeError, match="half written"), seed.updating():
            raise RuntimeError("half written")
        failed = seed.report()
        with seed.updating():
            pass
        report = seed.report()
    assert [("loading", 1, ()), ("serving", 2, ((0, 3),))] == [
        (summary.state, summary.generation, summary.verified) for summary in (failed, report)
    ]


def test_a_fence_while_the_digests_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests may be of bytes that changed meanwhile: they are not given."""
    with build_seed() as seed:

        def sealed(image: Image) -> Manifest:
            manifest = compute_manifest(image)
            seed.fence()
            return manifest

        monkeypatch.setattr(image_state, "compute_manifest", sealed)
        seed.publish()
        report = seed.report()
    assert ("loading", (), None) == (report.state, report.verified, report.weights_id)


def test_dropped_chunks_fence_their_readers() -> None:
    """Whoever read a chunk that turned out wrong sees another generation."""
    with build_seed(ChunkState(IMAGE.layout.chunks, [0, 1])) as seed:
        seed.invalidate([1])
        assert (1, ((0, 1),)) == (seed.generation, seed.report().verified)
        with pytest.raises(SourceWeightsChanged):
            seed.authorize(token(generation=0), 0, 1)
