"""Real forks between network namespaces, while what they need dies, hangs, or loses its link or its disk.

The short form of `benchmarks.chaos`, which runs a hundred such rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.chaos import why_not
from benchmarks.chaos_crew import Crew
from benchmarks.chaos_draw import SHORT, draw
from benchmarks.chaos_judge import judge
from benchmarks.chaos_round import Runner

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "rounds can be run"),
]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """A crew that lives through all rounds, so that what leaks in one is seen in the next."""
    with Crew() as crew:
        yield Runner(crew)


@pytest.mark.parametrize("number", SHORT, ids=lambda number: draw(number).line)
def test_every_fork_ends_right(runner: Runner, number: int) -> None:
    """The right bytes, a clean fallback or a clean failure; in time, and with nothing left behind."""
    seen = runner.run(draw(number))
    assert ((), sorted(fault.kind for fault in seen.round.faults)) == (
        judge(seen),
        sorted(struck.kind for struck in seen.struck),
    )


def test_the_planners_forget_what_is_gone(runner: Runner) -> None:
    """A lease's time after the last round they know of no fork and no instance, and have nothing open."""
    assert () == runner.settle()
