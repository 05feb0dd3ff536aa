"""A relay serves what it receives: what it reports, and when its readers are notified."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from rfork.errors import LayoutMismatch, SourceBusy
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB, ChunkState
from rfork.image.memory import compute_manifest
from rfork.peer.base import Progress
from rfork.schema import StorageCandidate
from tests.unit.source.seeds import IMAGE, build_seed, token


def test_a_relay_starts_with_nothing() -> None:
    """A relay that has received nothing reports no chunks and serves none."""
    with build_seed(ChunkState(IMAGE.layout.chunks)) as relay:
        report = relay.report()
        with pytest.raises(SourceBusy):
            relay.authorize(token(), 0, 1)
    assert "loading" == report.state
    assert () == report.verified
    assert report.weights_id is None


def test_a_relay_admits_what_it_has_verified() -> None:
    """A range is admitted once every chunk that it touches is verified."""
    with build_seed(ChunkState(IMAGE.layout.chunks, [1])) as relay:
        assert "fork-1" == relay.authorize(token(), MIB, 2 * MIB)
        with pytest.raises(SourceBusy):
            relay.authorize(token(), MIB, 2 * MIB + 1)


def test_a_manifest_of_another_layout_is_rejected() -> None:
    """A relay accepts only a manifest that describes its image."""
    other = compute_manifest(image_from_tensors({"b": torch.zeros(8)}))
    with build_seed(ChunkState(IMAGE.layout.chunks)) as relay, pytest.raises(LayoutMismatch):
        relay.set_manifest(other)


def test_listeners_are_notified_of_changes() -> None:
    """A listener is called for each change of chunks, manifest, state and readers, until it unsubscribes."""
    states: list[str] = []
    with build_seed(ChunkState(IMAGE.layout.chunks)) as relay:
        with relay.on_change(lambda: states.append(relay.report().state)):
            relay.set_manifest(compute_manifest(IMAGE))
            relay.chunk_state.mark_verified(0)
            relay.serve()
            relay.close_channel("none")
        relay.chunk_state.mark_verified(1)
    assert ["loading", "loading", "serving", "serving"] == states


def test_a_relay_without_a_manifest_sends_digests() -> None:
    """Chunks of a provisional manifest are reported with their digests, and only where these are known."""
    with build_seed(ChunkState(IMAGE.layout.chunks, [2])) as seed:
        seed.chunk_state.set_provisional_id("files")
        seed.chunk_state.mark_verified(0, b"0" * 16)
        seed.chunk_state.mark_verified(1, b"1" * 16)
        assert Progress(((1, 2),), False, (b"1" * 16,), "files") == seed.progress_since(((0, 1),))


@pytest.mark.parametrize("relayed", [True, False])
def test_storage_activity_is_reported_by_its_age(relayed: bool) -> None:
    """Readers receive the time since storage last made progress, or none while the relay reads no storage."""
    with build_seed(ChunkState(IMAGE.layout.chunks)) as seed:
        started_at = time.monotonic()
        seed.report_storage_activity(lambda: started_at - 5.0, relayed=relayed)
        activity = seed.progress_since(()).storage_activity
        max_idle_s = time.monotonic() - started_at + 5.0
        seed.report_storage_activity(None)
        assert activity is not None
        assert 5.0 <= activity.idle_s <= max_idle_s
        assert relayed == activity.relayed
        assert seed.progress_since(()).storage_activity is None


def test_readers_are_notified_of_storage_progress_at_intervals() -> None:
    """They are not notified of each block, nor of a report that repeats the last one."""
    notified_at: list[float] = []
    with build_seed(ChunkState(IMAGE.layout.chunks)) as seed, seed.on_change(lambda: notified_at.append(at)):
        for at in (100.0, 100.5, 101.0, 101.5, 101.5):
            seed.report_storage_activity(partial(float, at))
    assert [100.0, 101.0] == notified_at


def test_a_relay_with_a_manifest_sends_its_weights_id() -> None:
    """Once the manifest is known, its weights_id replaces the digests."""
    manifest = compute_manifest(IMAGE)
    with build_seed(ChunkState(IMAGE.layout.chunks)) as seed:
        seed.chunk_state.set_provisional_id("files")
        seed.chunk_state.mark_verified(0, manifest.digests[0])
        seed.set_manifest(manifest)
        assert Progress(((0, 1),), False, weights_id=manifest.weights_id) == seed.progress_since(())


def test_a_report_names_the_readable_storage() -> None:
    """It contains the storage candidates, the provisional id, and the egress share and labels from the
    settings.
    """
    offer = StorageCandidate(kind="checkpoint", uri="file:///files", origin="a" * 32)
    with build_seed(ChunkState(IMAGE.layout.chunks)) as seed:
        seed.storage = (offer,)
        seed.chunk_state.set_provisional_id(f"{'a' * 32}-01")
        report = seed.report()
    assert (offer,) == report.storage
    assert "a" * 32 == report.provisional_id
    assert 1.0 == report.egress_share
    assert report.placement.nvlink is None
