"""Weights that change in their place while a fork reads them: it has the bytes of one version, or none."""

from __future__ import annotations

import pytest

from rfork.errors import NoSource
from rfork.image.board import ChunkBoard
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from tests.unit.fork.fleet import CHUNKS, Fleet, Script, Target, content, image, plan, route

ALL = (0, CHUNKS)
LAST = CHUNKS - 1


def scribble(held: Image, chunk: int) -> None:
    """Change one byte of a chunk, without a word."""
    with held.writable(chunk * MIB, chunk * MIB + 1) as (view,):
        view[0] ^= 0xFF


def test_a_silent_write_to_a_seed(fleet: Fleet) -> None:
    """The chunk that changed is read again elsewhere, and the seed is reported."""
    held = image(1)
    wrong = fleet.source("wrong", held)
    right = fleet.source("right", image(1))
    script = Script([lambda: plan(route(wrong, ALL)), lambda: plan(route(right, ALL))])
    target = Target(fleet, script)
    target.board.subscribe(lambda: scribble(held, LAST) if len(target.board) == 1 else None)
    target.run()
    assert (content(image(1)), [("wrong", "source", "SourceCorrupt")]) == (
        content(target.image),
        script.faults,
    )


def test_a_silent_write_to_a_relay(fleet: Fleet) -> None:
    """What a relay verified goes bad in its memory: its reader blames the relay, not the seed above it."""
    held = image(1)
    manifest = held.manifest()
    seed = fleet.source("seed", image(1), manifest=manifest)
    board = ChunkBoard(held.layout.chunks, range(CHUNKS))
    relay = fleet.source("relay", held, board=board, manifest=manifest)
    scribble(held, 2)
    script = Script([lambda: plan(route(relay, ALL)), lambda: plan(route(seed, ALL))])
    target = Target(fleet, script)
    target.run()
    assert (content(image(1)), [("relay", "source", "SourceCorrupt")]) == (
        content(target.image),
        script.faults,
    )


@pytest.mark.parametrize("updates", [1, 2])
def test_an_update_of_the_only_seed(fleet: Fleet, updates: int) -> None:
    """What was verified stays that of the old version, chunk by chunk, and the new one is not mixed in."""
    held, new = image(1), image(2)
    old = held.manifest()
    seed = fleet.source("seed", held, manifest=old)

    def update() -> None:
        if len(target.board) != 2 or seed.generation:
            return
        for _ in range(updates):
            with seed.updating():
                for region, other in zip(held.regions, new.regions, strict=True):
                    region.copy_(other)

    script = Script([lambda: plan(route(seed, ALL)), lambda: plan(route(seed, ALL)), lambda: plan()])
    target = Target(fleet, script)
    target.board.subscribe(update)
    with pytest.raises(NoSource):
        target.run()
    verified = [index for begin, end in target.board.verified for index in range(begin, end)]
    assert [old.digests[index] for index in verified] == [target.image.digest(index) for index in verified]
    assert {("seed", "source", "SourceChanged")} == set(script.faults)
    assert (updates, new.manifest().digests) == (seed.generation, seed.manifest and seed.manifest.digests)
