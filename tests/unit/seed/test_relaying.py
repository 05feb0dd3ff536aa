"""A seed that receives what it gives: what it claims, and what its readers hear."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from rfork.errors import LayoutMismatch, SourceBusy
from rfork.image.board import ChunkBoard
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.peer.base import Progress
from rfork.seed.holding import seal
from rfork.wire import StorageOffer
from tests.unit.seed.seeds import IMAGE, made, token


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


def test_a_manifest_of_another_layout_is_not_learnt() -> None:
    """A relay takes no manifest that does not describe its image."""
    other = seal(image_of({"b": torch.zeros(8)}))
    with made(ChunkBoard(IMAGE.layout.chunks)) as relay, pytest.raises(LayoutMismatch):
        relay.learn(other)


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


def test_a_sealed_relay_tells_its_weights() -> None:
    """Once the manifest is known its weights_id stands for all digests."""
    manifest = seal(IMAGE)
    with made(ChunkBoard(IMAGE.layout.chunks)) as seed:
        seed.board.begin("files")
        seed.board.mark(0, manifest.digests[0])
        seed.learn(manifest)
        assert Progress(((0, 1),), False, weights_id=manifest.weights_id) == seed.news(())


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
