"""Detection of targets and sources that are slower than the rest of their line."""

from __future__ import annotations

from planner.policy.group_plan import stragglers
from tests.unit.planner.builders import NOW, Reads, decide, group, loading, routes, seed

ALL = ((0, 12),)
LINE: Reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}, "d": {"c": ALL}, "e": {"d": ALL}}


def line(**chunks: int) -> frozenset[str]:
    """Return the stragglers of the line s-a-b-c-d-e with these numbers of chunks."""
    members = [loading(name, *([(0, number)] if number else [])) for name, number in chunks.items()]
    return stragglers(group(seed("s"), *members, reads=LINE), NOW)


def test_a_line_that_progresses_together_has_no_straggler() -> None:
    """Each relay is one chunk after the one before it."""
    assert frozenset() == line(a=10, b=9, c=8, d=7, e=6)


def test_a_lagging_relay_is_found() -> None:
    """It is the relay with readers that follows the gap."""
    assert {"c"} == line(a=10, b=9, c=3, d=2, e=1)


def test_the_last_of_a_line_is_no_straggler() -> None:
    """It delays no reader, however far it lags."""
    assert frozenset() == line(a=10, b=9, c=8, d=7, e=0)


def test_if_all_readers_of_a_source_lag_the_source_is_slow() -> None:
    """Two lagging relays of one source point to the source."""
    reads: Reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"a": ALL}, "d": {"b": ALL}, "e": {"c": ALL},
                    "f": {"d": ALL}, "g": {"e": ALL}}  # fmt: skip
    chunks = {"a": 10, "b": 2, "c": 2, "d": 1, "e": 1, "f": 1, "g": 1}
    members = [loading(name, (0, number)) for name, number in chunks.items()]
    assert {"a"} == stragglers(group(seed("s"), *members, reads=reads), NOW)


def test_expired_and_complete_targets_do_not_count() -> None:
    """Neither is a straggler."""
    members = [loading("a", (0, 12)), loading("b", (0, 1), expires_at=NOW), loading("c")]
    reads: Reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}}
    assert frozenset() == stragglers(group(seed("s"), *members, reads=reads), NOW)


def test_an_empty_group_has_no_stragglers() -> None:
    """There are no forks."""
    assert frozenset() == stragglers(group(seed("s")), NOW)


def test_a_slow_source_is_left_and_chosen_last() -> None:
    """Its reader moves to the busier seed; without another source the slow one is used."""
    reads: Reads = {"a": {"s": ALL}, "t": {"a": ALL}}
    slow = loading("a", (0, 3), slow=True)
    both = [
        decide(group(seed("s", max_readers=max_readers), slow, reads=reads), loading("t")) for max_readers in (2, 1)
    ]
    assert [{"s": ALL}, {"a": ALL}] == [routes(each) for each in both]
