"""A snapshot of what a seed holds, while its weights go away: without storage other than a folder."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rfork.errors import SourceWeightsChanged
from rfork.image.chunks import MIB
from rfork.source.snapshot import GenerationReader, snapshot_seed
from tests.unit.source.suspendable_seeds import build_seed, image_with


def test_nothing_is_read_after_it_was_suspended(tmp_path: Path) -> None:
    """Memory that may be unmapped by then is not touched: the snapshot is given up, and there is none."""
    with build_seed() as seed, pytest.raises(SourceWeightsChanged, match="given up"):
        snapshot_seed(seed, str(tmp_path), progress=lambda count: seed.suspend())
    assert [] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_snapshot_keeps_to_its_generation(resumed: bool) -> None:
    """Neither pieces nor digests are of what was put away, nor of what came in its place."""
    with build_seed() as seed:
        generation, _ = seed.manifest_snapshot()
        generation_reader = GenerationReader(seed, generation)
        with generation_reader.readable(MIB - 1, MIB + 1) as views:
            before = b"".join(views)
        seed.suspend()
        if resumed:
            seed.resume(image_with(2))
        with pytest.raises(SourceWeightsChanged), generation_reader.readable(0, 1):
            pass
        with pytest.raises(SourceWeightsChanged):
            generation_reader.digest(0)
    assert b"\x01\x01" == before


def test_what_is_put_away_has_no_snapshot(tmp_path: Path) -> None:
    """It is refused before anything is written."""
    with build_seed() as seed:
        seed.suspend()
        with pytest.raises(SourceWeightsChanged, match="no whole image"):
            snapshot_seed(seed, str(tmp_path))
    assert [] == [*tmp_path.iterdir()]


def test_suspending_waits_for_the_piece_under_way_not_for_storage() -> None:
    """The memory is not given back under a read; what storage does with the copy holds nobody up."""
    events: list[str] = []

    def suspend() -> None:
        seed.suspend()
        events.append("suspended")

    with build_seed() as seed:
        generation, _ = seed.manifest_snapshot()
        thread = threading.Thread(target=suspend)
        with seed.local_read(generation) as image:
            thread.start()
            with image.readable(0, MIB) as views:
                thread.join(0.3)  # who does not wait for this block is done by then
                events.append(f"read {sum(view.nbytes for view in views)}")
        thread.join()
        seed.resume(image_with(1))
        generation, _ = seed.manifest_snapshot()
        with GenerationReader(seed, generation).readable(0, MIB):
            seed.suspend()
    assert [f"read {MIB}", "suspended"] == events
