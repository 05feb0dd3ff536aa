"""A seed that receives what it gives: what it claims, and what its readers hear."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from rfork.errors import LayoutMismatch, SourceBusy
from rfork.image.capture import image_from_tensors
from rfork.image.chunk_state import ChunkState
from rfork.image.chunks import MIB
from rfork.peer.base import Progress
from rfork.schema import StorageCandidate
from rfork.source.image_state import compute_manifest
from tests.unit.source.seeds import IMAGE, build_seed, token


def test_a_relay_starts_with_nothing() -> None:
    """An empty board is a board: a relay that has received nothing claims nothing and gives nothing."""
    with build_seed(ChunkState(IMAGE.layout.chunks)) as relay:
        report = relay.report()
        with pytest.raises(SourceBusy):
            relay.authorize(token(), 0, 1)
    assert ("loading", (), None) == (report.state, report.verified, report.weights_id)


def test_a_relay_admits_what_it_has_verified() -> None:
    """A range is admitted once every chunk it touches is verified."""
    with build_seed(ChunkState(IMAGE.layout.chunks, [1])) as relay:
        assert "fork-1" == relay.authorize(token(), MIB, 2 * MIB)
        with pytest.raises(SourceBusy):
            relay.authorize(token(), MIB, 2 * MIB + 1)


def test_a_manifest_of_another_layout_is_not_learnt() -> None:
    """A relay takes no manifest that does not describe its image."""
    other = compute_manifest(image_from_tensors({"b": torch.zeros(8)}))
    with build_seed(ChunkState(IMAGE.layout.chunks)) as relay, pytest.raises(LayoutMismatch):
        relay.set_manifest(other)


def test_changes_are_told() -> None:
    """Board, manifest, state and readers: whoever listens hears of each, until it leaves."""
    states: list[str] = []
    with build_seed(ChunkState(IMAGE.layout.chunks)) as relay:
        with relay.on_change(lambda: states.append(relay.report().state)):
            relay.set_manifest(compute_manifest(IMAGE))
            relay.chunk_state.mark_verified(0)
            relay.serve()
            relay.close_channel("none")
        relay.chunk_state.mark_verified(1)
    assert ["loading", "loading", "serving", "serving"] == states


def test_a_relay_without_a_manifest_tells_digests() -> None:
    """Chunks of a draft are told with their digests, and only where these are known."""
    with build_seed(ChunkState(IMAGE.layout.chunks, [2])) as seed:
        seed.chunk_state.set_provisional_id("files")
        seed.chunk_state.mark_verified(0, b"0" * 16)
        seed.chunk_state.mark_verified(1, b"1" * 16)
        assert Progress(((1, 2),), False, (b"1" * 16,), "files") == seed.progress_since(((0, 1),))


@pytest.mark.parametrize("relayed", [True, False])
def test_storage_that_is_read_is_told_by_its_age(relayed: bool) -> None:
    """Readers hear how long ago it gave something, by the time they are told; and when nobody reads."""
    with build_seed(ChunkState(IMAGE.layout.chunks)) as seed:
        started_at = time.monotonic()
        seed.report_storage_activity(lambda: started_at - 5.0, relayed=relayed)
        activity = seed.progress_since(()).storage_activity
        max_idle_s = time.monotonic() - started_at + 5.0
        seed.report_storage_activity(None)
        assert activity is not None
        assert (True, relayed, None) == (
            5.0 <= activity.idle_s <= max_idle_s,
            activity.relayed,
            seed.progress_since(()).storage_activity,
        )


def test_readers_are_woken_when_storage_has_advanced_by_a_while() -> None:
    """Not for each block, and not for what only was told once more."""
    notified_at: list[float] = []
    with build_seed(ChunkState(IMAGE.layout.chunks)) as seed, seed.on_change(lambda: notified_at.append(at)):
        for at in (100.0, 100.5, 101.0, 101.5, 101.5):
            seed.report_storage_activity(partial(float, at))
    assert [100.0, 101.0] == notified_at


def test_a_sealed_relay_tells_its_weights() -> None:
    """Once the manifest is known its weights_id stands for all digests."""
    manifest = compute_manifest(IMAGE)
    with build_seed(ChunkState(IMAGE.layout.chunks)) as seed:
        seed.chunk_state.set_provisional_id("files")
        seed.chunk_state.mark_verified(0, manifest.digests[0])
        seed.set_manifest(manifest)
        assert Progress(((0, 1),), False, weights_id=manifest.weights_id) == seed.progress_since(())


def test_a_report_says_what_it_could_read() -> None:
    """Offers of storage, the origin of a draft, and the shares and labels of the settings."""
    offer = StorageCandidate(kind="checkpoint", uri="file:///files", origin="a" * 32)
    with build_seed(ChunkState(IMAGE.layout.chunks)) as seed:
        seed.storage = (offer,)
        seed.chunk_state.set_provisional_id(f"{'a' * 32}-01")
        report = seed.report()
    assert ((offer,), "a" * 32, 1.0, None) == (
        report.storage,
        report.provisional_id,
        report.egress_share,
        report.placement.nvlink,
    )
