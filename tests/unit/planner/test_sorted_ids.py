"""SortedIds against a sorted set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.core.state import SortedIds

IDS = st.text("ab-", min_size=1, max_size=4)


@given(st.lists(st.tuples(st.booleans(), IDS)), st.none() | IDS, st.just("") | IDS)
def test_ids_are_sorted(changes: list[tuple[bool, str]], cursor: str | None, prefix: str) -> None:
    """The result equals sorting a set after any additions and removals."""
    sorted_ids, model = SortedIds(), set[str]()
    for added, name in changes:
        (sorted_ids.add if added else sorted_ids.discard)(name)
        (model.add if added else model.discard)(name)
    expected = [name for name in sorted(model) if name > (cursor or "") and name.startswith(prefix)]
    assert expected == list(sorted_ids.after(cursor, prefix))


def test_clear_removes_all_ids() -> None:
    """Ids added later are sorted again."""
    sorted_ids = SortedIds()
    sorted_ids.add("c")
    sorted_ids.clear()
    left = list(sorted_ids.after(None))
    for name in "ba":
        sorted_ids.add(name)
    assert [] == left
    assert ["a", "b"] == list(sorted_ids.after(None))
