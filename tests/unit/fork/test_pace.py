from __future__ import annotations

import pytest

from rfork.fork.pace import Pace
from rfork.fork.schedule import Read, Schedule

MIB = 1 << 20


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(25 * MIB, 1), (255 * MIB, 1), (300 * MIB, 2), (1200 * MIB, 4), (10_000 * MIB, 4)],
)
def test_faster_links_take_more_reads_at_once(rate: int, expected: int) -> None:
    """One connection fills a link of a gigabit or two; the window of the settings is the most."""
    pace = Pace(4)
    pace.arrived(rate, 1.0, 0)
    assert expected == pace.window("http")


def test_one_read_shows_how_fast_it_goes() -> None:
    """Before the first chunk has arrived nothing is known."""
    assert 1 == Pace(4).window("http")


def test_sources_of_this_host_share_no_link() -> None:
    """What is slow there is the kernel, which finds more memory for several."""
    pace = Pace(4)
    pace.arrived(100 * MIB, 1.0, 0)
    assert (4, 1) == (pace.window("shared_memory"), pace.window("http"))


def test_reads_beside_one_another_share_the_rate() -> None:
    """Four chunks of 100 MiB that arrive within a second together are 400 MiB a second."""
    pace = Pace(4)
    pace.arrived(100 * MIB, 1.0, 3)
    assert 2 == pace.window("http")


def one_each(_source_id: str) -> int:
    return 1


def test_no_source_is_asked_for_more_than_its_window() -> None:
    """A second source is read from while the first is busy; the third read waits."""
    schedule = Schedule(4)
    schedule.adopt({"a": ((0, 2),), "b": ((2, 4),)})
    for name in "ab":
        schedule.offer(name, ((0, 4),))
    first = schedule.take(one_each)
    assert (Read("a", 0), Read("b", 2), None) == (first, schedule.take(one_each), schedule.take(one_each))
    assert first is not None
    schedule.verified(first)
    assert Read("a", 1) == schedule.take(one_each)
