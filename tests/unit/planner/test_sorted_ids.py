"""Ids that are kept in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.sorted_ids import SortedIds

IDS = st.text("ab-", min_size=1, max_size=4)


@given(st.lists(st.tuples(st.booleans(), IDS)), st.none() | IDS, st.just("") | IDS)
def test_what_is_in_comes_in_order(changes: list[tuple[bool, str]], cursor: str | None, prefix: str) -> None:
    """As sorting all of a set would have it, after any comings and goings."""
    sorted_ids, model = SortedIds(), set[str]()
    for added, name in changes:
        (sorted_ids.add if added else sorted_ids.discard)(name)
        (model.add if added else model.discard)(name)
    expected = [name for name in sorted(model) if name > (cursor or "") and name.startswith(prefix)]
    assert expected == list(sorted_ids.after(cursor, prefix))


def test_nothing_is_left_once_all_are_let_go() -> None:
    """And what comes then is in order again."""
    sorted_ids = SortedIds()
    sorted_ids.add("c")
    sorted_ids.clear()
    left = list(sorted_ids.after(None))
    for name in "ba":
        sorted_ids.add(name)
    assert ([], ["a", "b"]) == (left, list(sorted_ids.after(None)))
