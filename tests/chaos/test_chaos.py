"""Real forks between network namespaces, while what they need dies, hangs, or loses its link or its disk.

The short form of `benchmarks.chaos`, which runs a hundred such rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.chaos import unavailable_reason
from benchmarks.chaos_checks import check_round
from benchmarks.chaos_cluster import ChaosCluster
from benchmarks.chaos_runner import ChaosRunner
from benchmarks.chaos_scenarios import SHORT_STOP_S, generate_round

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "rounds can be run"),
]


@pytest.fixture(scope="module")
def runner() -> Iterator[ChaosRunner]:
    """A crew that lives through all rounds, so that what leaks in one is seen in the next."""
    with ChaosCluster() as crew:
        yield ChaosRunner(crew)


@pytest.mark.parametrize("number", SHORT_STOP_S, ids=lambda number: generate_round(number).description)
def test_every_fork_ends_right(runner: ChaosRunner, number: int) -> None:
    """The right bytes, a clean fallback or a clean failure; in time, and with nothing left behind."""
    seen = runner.run(generate_round(number))
    assert ((), sorted(fault.fault_type for fault in seen.round.faults)) == (
        check_round(seen),
        sorted(struck.fault_type for struck in seen.injected),
    )


def test_the_planners_forget_what_is_gone(runner: ChaosRunner) -> None:
    """A lease's time after the last round they know of no fork and no instance, and have nothing open."""
    assert () == runner.final_findings()
