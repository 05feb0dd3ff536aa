"""Simulated fleets with faults keep the promises of `tests.simulation.world`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.defects import DEFECTS, Defect
from tests.simulation.layouts import LayoutsWorld
from tests.simulation.run import silence_logs, world_of
from tests.simulation.world import World, run_world

WORLDS = 500
MAX_WORLDS_FOR_A_DEFECT = 2000


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    with silence_logs():
        yield


@pytest.mark.parametrize("first", range(1, WORLDS, 50))
def test_simulated_fleets_keep_their_promises(first: int) -> None:
    """`python -m tests.simulation.run --seed N --worlds 1 --trace` replays a world that fails."""
    failures = {seed: error for seed in range(first, first + 50) if (error := run_world(world_of(seed))) is not None}
    assert failures == {}


def outcomes(world: World) -> list[tuple[str, str, float | None]]:
    world.run()
    return [(target.instance.name, target.outcome, target.ended_at) for target in world.targets]


@pytest.mark.parametrize("world", [World, LayoutsWorld])
def test_a_seed_replays_its_world(world: type[World]) -> None:
    """The same forks end in the same way at the same virtual times."""
    assert outcomes(world(3)) == outcomes(world(3))


def test_worlds_with_several_layouts_read_boxes() -> None:
    """Targets read boxes from one rank and from two, from other targets, and after a source failed."""
    worlds = [LayoutsWorld(seed) for seed in range(30)]
    for world in worlds:
        world.run()
    forks = [fork for world in worlds for target in world.layout_targets() for fork in target.box_forks]
    assert {1, 2} <= {len({each.part.layout for each in fork.fetched}) for fork in forks}
    attempts = [attempt for fork in forks for _, attempt in fork.attempts]
    assert any(attempt.outcome != "forked" for attempt in attempts)
    sources = {share.source_id for attempt in attempts for share in attempt.machine.stats.shares}
    assert any("-part-" in source for source in sources)


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_the_simulation_finds_known_defects(defect: Defect) -> None:
    """Each defect that is put back into production code breaks a promise in one of few worlds."""
    with defect():
        # Some show only in a few worlds of the simplest type, which is a minority of all.
        worlds = (make(seed) for seed in range(1, MAX_WORLDS_FOR_A_DEFECT) for make in (world_of, World))
        found = next((world.seed for world in worlds if run_world(world) is not None), None)
    assert found is not None
