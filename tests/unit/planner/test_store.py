from __future__ import annotations

from planner.store.memory import MemoryStore
from planner.store.records import ForkRecord
from rfork.wire import ForkFinish, Plan, Rank


def fork(fork_id: str, *, ended: bool) -> ForkRecord:
    """A fork's record."""
    finish = ForkFinish(outcome="forked", seconds=1, bytes_read=1) if ended else None
    return ForkRecord(
        fork_id=fork_id, instance_id=f"of-{fork_id}", model="m", rank=Rank(), chunk_count=1, image_bytes=1,
        plan=Plan(fork_id=fork_id), asked_at=0, seen_at=0, finish=finish,
    )  # fmt: skip


def test_only_the_last_ended_forks_are_kept() -> None:
    """The oldest to end goes first; forks under way never go."""
    store = MemoryStore(keep_forks=2)
    store.put_fork(fork("live", ended=False))
    for name in ("a", "b", "c"):
        store.put_fork(fork(name, ended=False))
        store.put_fork(fork(name, ended=True))
    assert ["live", "b", "c"] == [record.fork_id for record in store.forks()]


def test_a_fork_that_came_back_to_life_is_not_dropped_as_ended() -> None:
    """Its place among the ended ones is taken back."""
    store = MemoryStore(keep_forks=1)
    store.put_fork(fork("a", ended=True))
    store.put_fork(fork("a", ended=False))
    store.put_fork(fork("b", ended=True))
    store.put_fork(fork("c", ended=True))
    assert (["a", "c"], ["a"]) == (
        [record.fork_id for record in store.forks()],
        [record.fork_id for record in store.live_forks()],
    )
