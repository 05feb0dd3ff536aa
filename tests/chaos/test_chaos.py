"""Real forks between network namespaces, while processes die or hang and links or disks fail.

The short form of `benchmarks.chaos`, which runs a hundred such rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.chaos.__main__ import unavailable_reason
from benchmarks.chaos.checks import check_round
from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.runner import ChaosRunner
from benchmarks.chaos.scenarios import SHORT_ROUNDS, generate_round

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,  # logic: tests/simulation; `make chaos` and `.ci/run` run these rounds
    pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "rounds can be run"),
]


@pytest.fixture(scope="module")
def runner() -> Iterator[ChaosRunner]:
    """Return a cluster that survives all rounds, so that leaks of one round show in the next."""
    with ChaosCluster() as crew:
        yield ChaosRunner(crew)


@pytest.mark.parametrize("number", SHORT_ROUNDS, ids=lambda number: generate_round(number).description)
def test_every_fork_ends_correctly(runner: ChaosRunner, number: int) -> None:
    """Correct bytes, a clean fallback or a clean failure; in time, and without leaks."""
    seen = runner.run(generate_round(number))
    assert () == check_round(seen)
    assert sorted(fault.fault_type for fault in seen.round.faults) == sorted(
        struck.fault_type for struck in seen.injected
    )


def test_the_planners_remove_dead_instances(runner: ChaosRunner) -> None:
    """One lease duration after the last round the planners list no fork and no instance, and have no open
    connections.
    """
    assert () == runner.final_findings()
