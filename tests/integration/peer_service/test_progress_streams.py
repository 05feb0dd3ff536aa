"""Progress streams: their messages and their ends."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from rfork.errors import SourceBusy, SourceUnavailable, SourceWeightsChanged
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB, ChunkState
from rfork.peer.base import Progress, StorageActivity
from tests.integration.peer_service.seeds import (
    SOON_S,
    StartSeed,
    client,
    next_chunks,
    request_channel,
    token,
)


def test_progress_is_sent_as_it_is_made(start_seed: StartSeed) -> None:
    """Verified chunks are sent immediately, then each further one as it is verified."""
    image = image_from_tensors({"a": torch.zeros(3 * MIB, dtype=torch.uint8)})
    board = ChunkState(image.layout.chunks, [1])
    seed = start_seed(image, board)
    peer = client(seed)
    updates = peer.watch(request_channel(seed, peer), SOON_S)
    received = [next_chunks(updates)]
    board.mark_verified(0)
    received.append(next_chunks(updates))
    board.mark_verified(2)
    received.append(next_chunks(updates))
    peer.close()
    assert [((1, 2),), ((0, 1),), ((2, 3),)] == received


def test_a_provisional_manifest_is_sent_with_digests(start_seed: StartSeed) -> None:
    """While a relay's manifest is unknown, each chunk comes with its digest; then the weights id is sent."""
    image = image_from_tensors({"a": torch.zeros(3 * MIB, dtype=torch.uint8)})
    manifest, draft, reading = image.manifest(), "a" * 32, StorageActivity(0.0, relayed=True)
    board = ChunkState(image.layout.chunks)
    board.set_provisional_id(draft)
    board.mark_verified(1, manifest.digests[1])
    relay = start_seed(image, board, has_manifest=False)
    relay.report_storage_activity(lambda: time.monotonic() + 1.0, relayed=True)
    peer = client(relay)
    # On a busy machine keep-alives arrive in between.
    updates = (each for each in peer.watch(request_channel(relay, peer), SOON_S) if each.chunks or each.weights_id)
    received = [next(updates)]
    board.mark_verified(0, manifest.digests[0])
    received.append(next(updates))
    relay.set_manifest(manifest)
    received.append(next(updates))
    peer.close()
    assert [
        Progress(((1, 2),), False, manifest.digests[1:2], draft, None, reading),
        Progress(((0, 1),), False, manifest.digests[:1], draft, None, reading),
        Progress((), False, weights_id=manifest.weights_id, storage_activity=reading),
    ] == received


def test_a_dropped_chunk_ends_the_stream(start_seed: StartSeed) -> None:
    """A reader that may have read a chunk that was wrong gets SourceWeightsChanged."""
    image = image_from_tensors({"a": torch.zeros(3 * MIB, dtype=torch.uint8)})
    seed = start_seed(image, ChunkState(image.layout.chunks, [0, 1]))
    peer = client(seed)
    updates = peer.watch(request_channel(seed, peer), SOON_S)
    next(updates)
    seed.invalidate([1])
    with pytest.raises(SourceWeightsChanged):
        next(updates)
    peer.close()


def test_a_quiet_source_sends_keep_alives(start_seed: StartSeed) -> None:
    """A source without progress sends keep-alives."""
    seed = start_seed()
    peer = client(seed)
    updates = peer.watch(request_channel(seed, peer), 0.1)
    assert [((0, 3),), (), ()] == [next(updates).chunks for _ in range(3)]
    peer.close()


def test_draining_is_reported(start_seed: StartSeed) -> None:
    """A reader is notified that its source will shut down, and new readers are refused."""
    seed = start_seed()
    peer = client(seed)
    updates = peer.watch(request_channel(seed, peer), SOON_S)
    before = next(updates).draining
    seed.drain(0.0)
    assert not before
    assert next(updates).draining
    with pytest.raises(SourceBusy):
        request_channel(seed, peer)
    peer.close()


def test_a_broken_stream_releases_its_slot(start_seed: StartSeed) -> None:
    """A reader that drops its connection without closing the channel frees its slot for the next one."""
    seed = start_seed()
    first, freed = client(seed), threading.Event()
    updates = first.watch(request_channel(seed, first), SOON_S)
    next(updates)
    second = client(seed, token(seed, "fork-2"))
    with pytest.raises(SourceBusy):
        request_channel(seed, second)
    with seed.on_change(lambda: freed.set() if not seed.report().readers else None):
        first.close()
        assert freed.wait(SOON_S)
    assert request_channel(seed, second)
    second.close()


def test_a_fence_ends_the_stream(start_seed: StartSeed) -> None:
    """A reader of the old weights gets SourceWeightsChanged."""
    seed = start_seed()
    peer = client(seed)
    updates = peer.watch(request_channel(seed, peer), SOON_S)
    next(updates)
    seed.fence()
    with pytest.raises(SourceWeightsChanged):
        next(updates)
    peer.close()


def test_a_channel_ended_by_a_fence_reports_the_reason(start_seed: StartSeed) -> None:
    """Its slot is released before the stream polls again; the reader still gets the reason."""
    seed = start_seed()
    peer = client(seed)
    channel = request_channel(seed, peer)
    updates = peer.watch(channel, SOON_S)
    next(updates)
    seed._served.generation += 1
    seed.close_channel(channel)
    with pytest.raises(SourceWeightsChanged):
        next(updates)
    peer.close()


def test_a_seed_that_closes_ends_its_streams(start_seed: StartSeed) -> None:
    """A reader of a seed that stops is notified immediately."""
    seed = start_seed()
    peer = client(seed)
    updates = peer.watch(request_channel(seed, peer), SOON_S)
    next(updates)
    seed.close()
    with pytest.raises(SourceUnavailable):
        for _ in updates:
            pass
    peer.close()


@pytest.mark.slow  # logic: tests/unit/source/test_seed.py
def test_a_seed_that_closes_ends_its_calls(start_seed: StartSeed, caplog: pytest.LogCaptureFixture) -> None:
    """However many readers it cuts, none of their calls leaves an object that warns when it is collected."""
    gc.collect()  # warnings of other tests' objects do not count
    caplog.clear()
    for _ in range(4):
        seed = start_seed(readers=8)
        peers = [client(seed, token(seed, f"fork-{number}")) for number in range(8)]
        streams = [peer.watch(request_channel(seed, peer), SOON_S) for peer in peers]
        for updates in streams:
            next(updates)
        seed.close()
        gc.collect()
        for peer in peers:
            peer.close()
    assert [] == [record.message for record in caplog.records if record.levelname == "ERROR"]
