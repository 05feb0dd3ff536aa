from __future__ import annotations

from planner.policy.group_plan import stragglers
from tests.unit.planner.builders import NOW, Reads, decide, group, loading, routes, seed

ALL = ((0, 12),)
LINE: Reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}, "d": {"c": ALL}, "e": {"d": ALL}}


def line(**chunks: int) -> frozenset[str]:
    """Who is slow in the line s-a-b-c-d-e, each with its first so many chunks."""
    members = [loading(name, *([(0, number)] if number else [])) for name, number in chunks.items()]
    return stragglers(group(seed("s"), *members, reads=LINE), NOW)


def test_a_line_that_moves_together_has_no_straggler() -> None:
    """Each is a chunk behind the one before it."""
    assert frozenset() == line(a=10, b=9, c=8, d=7, e=6)


def test_a_relay_that_falls_behind_its_source_is_found() -> None:
    """Of those that have a reader, the one with the gap before it."""
    assert {"c"} == line(a=10, b=9, c=3, d=2, e=1)


def test_the_last_of_a_line_holds_nobody_up() -> None:
    """However far behind it is."""
    assert frozenset() == line(a=10, b=9, c=8, d=7, e=0)


def test_where_all_readers_of_one_source_fall_behind_the_source_is_slow() -> None:
    """Two relays behind the same one, both late: it is the one that does not give."""
    reads: Reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"a": ALL}, "d": {"b": ALL}, "e": {"c": ALL},
                    "f": {"d": ALL}, "g": {"e": ALL}}  # fmt: skip
    chunks = {"a": 10, "b": 2, "c": 2, "d": 1, "e": 1, "f": 1, "g": 1}
    members = [loading(name, (0, number)) for name, number in chunks.items()]
    assert {"a"} == stragglers(group(seed("s"), *members, reads=reads), NOW)


def test_those_that_are_forgotten_or_done_do_not_count() -> None:
    """Neither is a straggler."""
    members = [loading("a", (0, 12)), loading("b", (0, 1), expires_at=NOW), loading("c")]
    reads: Reads = {"a": {"s": ALL}, "b": {"a": ALL}, "c": {"b": ALL}}
    assert frozenset() == stragglers(group(seed("s"), *members, reads=reads), NOW)


def test_an_empty_group_has_none() -> None:
    """Nobody reads."""
    assert frozenset() == stragglers(group(seed("s")), NOW)


def test_a_slow_source_is_left_by_its_reader_and_chosen_last() -> None:
    """The reader goes to the seed though that is busier; with nobody else the slow one has to do."""
    reads: Reads = {"a": {"s": ALL}, "t": {"a": ALL}}
    slow = loading("a", (0, 3), slow=True)
    both = [
        decide(group(seed("s", max_readers=max_readers), slow, reads=reads), loading("t")) for max_readers in (2, 1)
    ]
    assert [{"s": ALL}, {"a": ALL}] == [routes(each) for each in both]
