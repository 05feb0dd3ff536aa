"""Snapshots of a seed that is suspended or changed meanwhile, in a local folder."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rfork.errors import SourceWeightsChanged
from rfork.image.chunks import MIB
from rfork.source.snapshot import GenerationReader, snapshot_seed
from tests.unit.source.suspendable_seeds import build_seed, image_with


def test_suspending_aborts_a_snapshot(tmp_path: Path) -> None:
    """Memory that may be unmapped is not read; the snapshot fails and leaves no file."""
    with build_seed() as seed, pytest.raises(SourceWeightsChanged, match="is discarded"):
        snapshot_seed(seed, str(tmp_path), progress=lambda count: seed.suspend())
    assert [] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_snapshot_reads_one_generation_only(resumed: bool) -> None:
    """It reads neither bytes nor digests of suspended weights, nor of the weights that replaced them."""
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


def test_a_suspended_seed_cannot_be_saved(tmp_path: Path) -> None:
    """The snapshot fails before anything is written."""
    with build_seed() as seed:
        seed.suspend()
        with pytest.raises(SourceWeightsChanged, match="no complete image"):
            snapshot_seed(seed, str(tmp_path))
    assert [] == [*tmp_path.iterdir()]


def test_suspending_waits_for_an_inflight_read_but_not_for_storage() -> None:
    """Memory is not released during a read; writing the copy to storage delays no caller."""
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
                thread.join(0.3)  # a suspend that does not wait for this block is done by then
                events.append(f"read {sum(view.nbytes for view in views)}")
        thread.join()
        seed.resume(image_with(1))
        generation, _ = seed.manifest_snapshot()
        with GenerationReader(seed, generation).readable(0, MIB):
            seed.suspend()
    assert [f"read {MIB}", "suspended"] == events
