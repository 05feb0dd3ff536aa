"""A snapshot of what a seed holds, while its weights go away: without storage other than a folder."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rfork.errors import SourceChanged
from rfork.image.chunks import MIB
from rfork.seed.snapshotting import Passing, snapshot_of
from tests.unit.seed.going_away import image_with, made


def test_nothing_is_read_after_it_was_suspended(tmp_path: Path) -> None:
    """Memory that may be unmapped by then is not touched: the snapshot is given up, and there is none."""
    with made() as seed, pytest.raises(SourceChanged, match="given up"):
        snapshot_of(seed, str(tmp_path), progress=lambda count: seed.suspend())
    assert [] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_snapshot_keeps_to_its_generation(resumed: bool) -> None:
    """Neither pieces nor digests are of what was put away, nor of what came in its place."""
    with made() as seed:
        generation, _ = seed.whole()
        passing = Passing(seed, generation)
        with passing.readable(MIB - 1, MIB + 1) as views:
            before = b"".join(views)
        seed.suspend()
        if resumed:
            seed.resume(image_with(2))
        with pytest.raises(SourceChanged), passing.readable(0, 1):
            pass
        with pytest.raises(SourceChanged):
            passing.digest(0)
    assert b"\x01\x01" == before


def test_what_is_put_away_has_no_snapshot(tmp_path: Path) -> None:
    """It is refused before anything is written."""
    with made() as seed:
        seed.suspend()
        with pytest.raises(SourceChanged, match="no whole image"):
            snapshot_of(seed, str(tmp_path))
    assert [] == [*tmp_path.iterdir()]


def test_suspending_waits_for_the_piece_under_way_not_for_storage() -> None:
    """The memory is not given back under a read; what storage does with the copy holds nobody up."""
    said: list[str] = []

    def suspend() -> None:
        seed.suspend()
        said.append("suspended")

    with made() as seed:
        generation, _ = seed.whole()
        thread = threading.Thread(target=suspend)
        with seed.own_reading(generation) as image:
            thread.start()
            with image.readable(0, MIB) as views:
                thread.join(0.3)  # who does not wait for this block is done by then
                said.append(f"read {sum(view.nbytes for view in views)}")
        thread.join()
        seed.resume(image_with(1))
        generation, _ = seed.whole()
        with Passing(seed, generation).readable(0, MIB):
            seed.suspend()
    assert [f"read {MIB}", "suspended"] == said
