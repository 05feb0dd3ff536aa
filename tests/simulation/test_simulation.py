"""Simulated fleets with faults keep the promises of `tests.simulation.world`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.defects import DEFECTS, Defect
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


def outcomes(seed: int) -> list[tuple[str, str, float | None]]:
    world = World(seed)
    world.run()
    return [(target.instance.name, target.outcome, target.ended_at) for target in world.targets]


def test_a_seed_replays_its_world() -> None:
    """The same forks end in the same way at the same virtual times."""
    assert outcomes(3) == outcomes(3)


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_the_simulation_finds_known_defects(defect: Defect) -> None:
    """Each defect that is put back into production code breaks a promise in one of few worlds."""
    with defect():
        found = next(
            (seed for seed in range(1, MAX_WORLDS_FOR_A_DEFECT) if run_world(world_of(seed)) is not None), None
        )
    assert found is not None
