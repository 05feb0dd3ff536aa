"""Runs many simulated fleets: ``python -m tests.simulation.run --worlds N --seed S``.

Prints one line for each world that fails, with the seed that replays it, and ``worlds N, failures F, S s`` at the
end; exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulation.background import BackgroundWorld
from tests.simulation.layouts import LayoutsWorld
from tests.simulation.race import RaceWorld
from tests.simulation.world import World, run_world

INTERVAL = 5
"""Of this many worlds, one is a race, in one holders compete with engines for links, and one has several layouts."""


def world_of(seed: int) -> World:
    """Return the world of a seed."""
    if seed % INTERVAL == 0:
        return RaceWorld(seed)
    if seed % INTERVAL == 1:
        return BackgroundWorld(seed)
    return LayoutsWorld(seed) if seed % INTERVAL == 2 else World(seed)


@contextmanager
def silence_logs() -> Iterator[None]:
    """Drop log lines inside the block: a world writes thousands."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def main() -> int:
    parser = argparse.ArgumentParser(description="simulate fleets with faults")
    parser.add_argument("--worlds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first world; the others follow it")
    parser.add_argument("--trace", action="store_true", help="print the traceback of each failure")
    arguments = parser.parse_args()
    began, failures = time.perf_counter(), 0
    with silence_logs():
        for seed in range(arguments.seed, arguments.seed + arguments.worlds):
            error = run_world(world_of(seed))
            if error is not None:
                failures += 1
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
                if arguments.trace:
                    traceback.print_exception(error)
    print(f"worlds {arguments.worlds}, failures {failures}, {time.perf_counter() - began:.1f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
