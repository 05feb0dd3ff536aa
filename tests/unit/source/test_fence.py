"""Changing weights: which reads are aborted, which chunks are dropped, and what is served afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from rfork.errors import LayoutMismatch, SourceBusy, SourceWeightsChanged
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB, ChunkState
from rfork.image.layout import Manifest
from rfork.image.memory import Image, compute_manifest
from rfork.source import seed as seed_module
from rfork.source.seed import Seed
from rfork.testing.peers import InMemoryPeers
from rfork.testing.transport import InMemoryExporter
from tests.unit.source.seeds import IMAGE, LAYOUT_ID, build_seed, token


def test_a_fenced_seed_serves_again_after_publish() -> None:
    """It serves the new generation, with digests of the current bytes."""
    with build_seed() as seed:
        seed.fence()
        fenced = seed.report()
        seed.publish()
        published = seed.report()
    assert "loading" == fenced.state
    assert () == fenced.verified
    assert fenced.weights_id is None
    assert "serving" == published.state
    assert ((0, 3),) == published.verified
    assert compute_manifest(IMAGE).weights_id == published.weights_id
    assert 1 == fenced.generation == published.generation


def test_a_fence_rejects_reads() -> None:
    """After the fence nothing is served, leases of the old generation are void, and the version tag has
    changed.
    """
    with build_seed() as seed:
        before = seed.version_tag()
        seed.fence()
        with pytest.raises(SourceWeightsChanged):
            seed.authorize(token(), 0, 1)
        with pytest.raises(SourceBusy):
            seed.authorize(token(generation=1), 0, 1)
        report = seed.report()
    assert 1 == report.generation
    assert "loading" == report.state
    assert () == report.verified
    assert report.weights_id is None
    assert before != seed.version_tag()


def test_a_fence_during_the_admission_of_a_read_rejects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that the weights changed, not that the chunk is missing."""
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


def test_a_fence_waits_for_inflight_reads() -> None:
    """A reader that does not finish is aborted; nothing is read after the fence."""
    events: list[str] = []
    started, ended = threading.Event(), threading.Event()

    def abort() -> None:
        events.append("aborted")
        ended.set()

    def read() -> None:
        with seed.read_guard(token(), 0, MIB, abort):
            started.set()
            ended.wait(60)
            events.append("read")

    with build_seed() as seed:
        thread = threading.Thread(target=read)
        thread.start()
        assert started.wait(60)
        seed.fence()
        events.append("fenced")
        with pytest.raises(SourceWeightsChanged), seed.read_guard(token(), 0, MIB, abort):
            events.append("read after the fence")
        thread.join()
    assert ["aborted", "read", "fenced"] == events


@pytest.mark.parametrize("change", [Seed.fence, lambda seed: seed.invalidate([0])], ids=["fence", "invalidate"])
def test_changing_bytes_closes_all_channels(change: Callable[[Seed], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One-sided readers are notified and then revoked before the bytes may change."""
    events: list[str] = []
    monkeypatch.setattr(InMemoryExporter, "revoke_peer", lambda self, channel_id: events.append("revoked"))
    peers = InMemoryPeers()
    with build_seed(peers=peers) as seed:
        peer = peers.dial(seed.report().address, token)
        channel, _ = peer.open(LAYOUT_ID, ("memory",), time.monotonic() + 60)
        updates = peer.watch(channel, 60)
        next(updates)
        with seed.on_change(lambda: events.append(f"notified of {seed.generation}")):
            change(seed)
        events.append("changed")
        with pytest.raises(SourceWeightsChanged, match="the weights changed"):
            next(updates)
        assert () == seed.report().readers
    revoked_at = events.index("revoked")
    assert {"notified of 1"} == {*events[:revoked_at]}
    assert 1 == events.count("revoked")
    assert "changed" == events[-1]


def test_invalidating_chunks_waits_for_inflight_reads() -> None:
    """The caller is about to rewrite the chunks, so inflight reads finish first."""
    events: list[str] = []
    started, ended = threading.Event(), threading.Event()

    def read() -> None:
        with seed.read_guard(token(), MIB, 2 * MIB, ended.set):
            started.set()
            ended.wait(60)
            events.append("read")

    with build_seed(ChunkState(IMAGE.layout.chunks, [0, 1])) as seed:
        thread = threading.Thread(target=read)
        thread.start()
        assert started.wait(60)
        seed.invalidate([1])
        events.append("dropped")
        thread.join()
    assert ["read", "dropped"] == events


def test_an_update_serves_the_new_bytes() -> None:
    """Inside the block nothing is served; afterwards the new weights are served under a new generation."""
    image = image_from_tensors({"a": torch.zeros(2 * MIB, dtype=torch.uint8)})
    before = compute_manifest(image).weights_id
    with build_seed(seed_image=image) as seed:
        with seed.updating():
            inside = seed.report()
            image.regions[0].fill_(1)
        after = seed.report()
    assert before != after.weights_id
    assert compute_manifest(image).weights_id == after.weights_id
    assert "loading" == inside.state
    assert inside.weights_id is None
    assert "serving" == after.state
    assert 1 == inside.generation == after.generation


def test_an_update_that_replaces_tensors_serves_the_new_memory() -> None:
    """The seed serves what its module computes with now, not the tensors that it had."""
    image = image_from_tensors({"a": torch.zeros(2 * MIB, dtype=torch.uint8)})
    replaced = image_from_tensors({"a": torch.ones(2 * MIB, dtype=torch.uint8)})
    with build_seed(seed_image=image) as seed:
        seed.recapture = lambda: replaced
        with seed.updating():
            pass
        after = seed.report()
        assert seed.image is replaced
    assert "serving" == after.state
    assert compute_manifest(replaced).weights_id == after.weights_id


def test_an_update_that_changes_the_layout_leaves_the_seed_fenced() -> None:
    """The caller gets the reason, and no reader gets bytes."""

    def recapture() -> Image:
        raise LayoutMismatch("another dtype")

    with build_seed() as seed:
        seed.recapture = recapture
        with pytest.raises(LayoutMismatch, match="another dtype"), seed.updating():
            pass
        assert "loading" == seed.report().state


def test_a_failed_update_leaves_the_seed_fenced() -> None:
    """The weights are undefined, so the seed stays fenced until an update succeeds."""
    with build_seed() as seed:
        with pytest.raises(RuntimeError, match="half written"), seed.updating():
            raise RuntimeError("half written")
        failed = seed.report()
        with seed.updating():
            pass
        updated = seed.report()
    assert "loading" == failed.state
    assert () == failed.verified
    assert 1 == failed.generation
    assert "serving" == updated.state
    assert ((0, 3),) == updated.verified
    assert 2 == updated.generation


def test_digests_of_a_fenced_generation_are_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence during the computation means that the bytes may have changed since."""
    with build_seed() as seed:

        def digest_then_fence(image: Image) -> Manifest:
            manifest = compute_manifest(image)
            seed.fence()
            return manifest

        monkeypatch.setattr(seed_module, "compute_manifest", digest_then_fence)
        seed.publish()
        report = seed.report()
    assert "loading" == report.state
    assert () == report.verified
    assert report.weights_id is None


def test_invalidated_chunks_fence_their_readers() -> None:
    """A reader of a chunk that turned out to be wrong sees a new generation."""
    with build_seed(ChunkState(IMAGE.layout.chunks, [0, 1])) as seed:
        seed.invalidate([1])
        assert 1 == seed.generation
        assert ((0, 1),) == seed.report().verified
        with pytest.raises(SourceWeightsChanged):
            seed.authorize(token(generation=0), 0, 1)
