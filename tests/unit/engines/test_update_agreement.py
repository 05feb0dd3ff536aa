"""Agreement of ranks on an update: it is served by all of them or by none."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from rfork.engines.update_agreement import (
    Decision,
    StoreRecords,
    UpdateAgreement,
    agreement_of,
    other_ranks,
)
from rfork.schema import Rank
from rfork.source.seed import InstanceIdentity


def records_of(
    size: int, *, role: str = "main", ranks: int | None = None, store: Store | None = None
) -> list[StoreRecords]:
    """Return the records of the first `ranks` of a process group of this size, in one store."""
    shared = store or HashStore()
    return [StoreRecords(shared, "model", role, rank, size) for rank in range(size if ranks is None else ranks)]


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return a store of each type that a process group may have."""
    match request.param:
        case "hash":
            return HashStore()
        case "file":
            return FileStore(str(tmp_path / "store"), 1)
        case _:
            tcp = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            return PrefixStore("default_pg", tcp)


@pytest.mark.parametrize(
    ("completed", "expected"),
    [
        ({0: 3, 1: 3}, {}),
        ({0: 3, 1: 2}, {1: 2}),
        ({0: 3, 1: 4}, {1: 4}),
        ({0: 3, 1: None}, {1: None}),
        ({1: 0, 0: 3, 2: 2}, {1: 0, 2: 2}),
    ],
)
def test_other_ranks_have_not_completed_this_update(
    completed: Mapping[int, int | None], expected: Mapping[int, int | None]
) -> None:
    """A rank that is behind, ahead, or no seed has other weights."""
    assert expected == other_ranks(3, completed)


@pytest.mark.parametrize(
    ("text", "covers", "serves"),
    [("", False, False), ("1:served", False, False), ("2:served", True, True), ("2:withdrawn", True, False),
     ("3:served", True, False)],
)  # fmt: skip
def test_a_decision_is_about_one_update(text: str, covers: bool, serves: bool) -> None:
    """A later decision rules out that an earlier update is served again."""
    decision = Decision.parse(text)
    assert covers == decision.covers(2)
    assert serves == decision.serves(2)


def test_a_decision_is_recorded_as_text() -> None:
    """It is read by the other ranks."""
    decision = Decision(7, "withdrawn")
    assert decision == Decision.parse(str(decision))


def test_records_are_shared_by_all_ranks(store: Store) -> None:
    """A rank of the main model without a record is one that serves no weights."""
    first, second = records_of(3, ranks=2, store=store)
    second.record(4)
    assert {0: 0, 1: 4, 2: None} == first.completed()


def test_a_draft_may_be_on_some_ranks_only() -> None:
    """For example on those of the last pipeline stage."""
    first, second = records_of(3, role="speculative", ranks=2)
    first.record(1)
    assert {0: 1, 1: 0} == second.completed()


def test_the_first_decision_stands(store: Store) -> None:
    """A rank that decides later gets the same one, and a later update is decided again."""
    first, second = records_of(2, store=store)
    assert Decision(1, "served") == first.decide(Decision(1, "served"))
    assert Decision(1, "served") == second.decide(Decision(1, "withdrawn"))
    assert Decision(2, "withdrawn") == second.decide(Decision(2, "withdrawn"))
    assert Decision(2, "withdrawn") == first.decide(Decision(1, "served"))


def test_concurrent_ranks_get_one_decision(store: Store) -> None:
    """Whichever is first."""
    records = records_of(8, store=store)
    for count in range(1, 30):
        barrier = threading.Barrier(len(records))

        def decide(rank: int, count: int = count, barrier: threading.Barrier = barrier) -> Decision:
            barrier.wait()
            return records[rank].decide(Decision(count, "served" if rank % 2 else "withdrawn"))

        with ThreadPoolExecutor(len(records)) as pool:
            assert 1 == len(set(pool.map(decide, range(len(records)))))


def test_a_rank_waits_for_the_others() -> None:
    """It serves once the last rank has completed the update."""
    first, second = records_of(2)
    first.record(1)
    agreement = UpdateAgreement(first)
    assert agreement.poll(1, is_expired=False) is None
    second.record(1)
    assert agreement.poll(1, is_expired=False) is True


def test_all_ranks_serve_a_complete_update() -> None:
    """Each waits on its own thread."""
    records = records_of(4)
    with ThreadPoolExecutor(len(records)) as pool:
        served = pool.map(lambda each: UpdateAgreement(each).reach(1, lambda: False), records)
    assert [True] * 4 == list(served)


def test_an_update_that_failed_on_one_rank_is_served_by_none(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that completes it after the others have given up is too late, too; the next one is served."""
    first, second = records_of(2)
    assert not UpdateAgreement(first, timeout_s=0.0).reach(1, lambda: False)
    assert "1 (update 0)" in caplog.text
    assert not UpdateAgreement(second).reach(1, lambda: False)
    with ThreadPoolExecutor(2) as pool:
        served = pool.map(lambda each: UpdateAgreement(each).reach(2, lambda: False), (first, second))
    assert [True, True] == list(served)


def test_a_superseded_update_is_not_served() -> None:
    """The next one has begun on this rank, or the instance closes."""
    first, second = records_of(2)
    second.record(1)
    assert not UpdateAgreement(first).reach(1, lambda: True)


RANKS = 3
Event = tuple[int, str]
EVENTS = st.lists(
    st.tuples(st.integers(0, RANKS - 1), st.sampled_from(["succeed", "fail", "poll", "poll", "expire"])), max_size=60
)


@given(events=EVENTS)
def test_no_update_is_served_by_some_ranks_only(events: list[Event]) -> None:
    """Whatever fails, in whatever order ranks are reached: all completed an update that one serves, and all that
    are asked about it agree.
    """
    records = records_of(RANKS)
    agreements = [UpdateAgreement(each) for each in records]
    counts, waiting = [0] * RANKS, [False] * RANKS
    completed: list[set[int]] = [set() for _ in range(RANKS)]
    results: dict[int, set[bool]] = {}
    for rank, event in events:
        if event in ("succeed", "fail"):
            counts[rank] += 1
            waiting[rank] = event == "succeed"
            if waiting[rank]:
                completed[rank].add(counts[rank])
                records[rank].record(counts[rank])
        elif waiting[rank]:
            result = agreements[rank].poll(counts[rank], is_expired=event == "expire")
            if result is not None:
                waiting[rank] = False
                results.setdefault(counts[rank], set()).add(result)
    for count, found in results.items():
        assert 1 == len(found)
        if True in found:
            assert all(count in each for each in completed)


def test_a_complete_model_needs_no_agreement() -> None:
    """Its weights are named by their bytes."""
    assert agreement_of(InstanceIdentity("model", Rank())) is None


def test_ranks_without_a_process_group_cannot_agree() -> None:
    """They have not met."""
    assert agreement_of(InstanceIdentity("model", Rank(tp=1, tp_size=2))) is None
