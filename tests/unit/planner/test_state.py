"""The planner's records of instances and forks, and the indices over them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.core.records import ForkRecord, RouteRecord, StoreChange
from planner.core.state import PlannerState
from rfork.schema import ForkResult, Rank
from tests.unit.planner.builders import LAYOUT, demand, loading, seed_report
from tests.unit.planner.records import GROUP, fork, instance

OTHER = GROUP._replace(model="other")


def state(max_finished_forks: int = 10) -> PlannerState:
    """Return an empty state."""
    return PlannerState(max_finished_forks=max_finished_forks)


def reading(name: str, source: str, *, ended: bool = False, **changes: object) -> ForkRecord:
    """Return the fork `name` of instance `of-name`, which reads an entire image of one chunk."""
    return fork(name, ended=ended, reads=(RouteRecord(source, ((0, 1),), ("http",), 0),), **changes)


def test_instances_are_listed_in_the_order_of_arrival() -> None:
    """A heartbeat does not change it."""
    known = state()
    known.apply(StoreChange(instances=(instance("b"), instance("a"))))
    known.apply(StoreChange(instances=(instance("b", seen_at=5.0),)))
    assert ["b", "a"] == [each.report.instance_id for each in known.instances()]


def test_instances_are_ordered_by_id() -> None:
    """They follow the cursor, whatever was added, removed or updated in between."""
    known = state()
    known.apply(StoreChange(instances=tuple(instance(name) for name in "dbac")))
    known.apply(StoreChange(instances=(instance("b", seen_at=5.0),), removed=("c", "unknown")))
    pages = [known.instances_after(cursor) for cursor in (None, "a", "c", "d")]
    found = [[each.source.instance_id for each in one] for one in pages]
    assert [["a", "b", "d"], ["b", "d"], ["d"], []] == found


@pytest.mark.parametrize(
    ("replica", "cursor", "expected"),
    [
        ("p", None, ["p-main-a", "p-main-b", "p-speculative-a"]),
        ("p", "p-main-a", ["p-main-b", "p-speculative-a"]),
        ("p", "p-main-b", ["p-speculative-a"]),
        ("p", "q", []),
        ("p", "a", ["p-main-a", "p-main-b", "p-speculative-a"]),
        ("p-2", None, ["p-2-main-a"]),
        ("q", None, []),
        ("p-main-a", None, []),
    ],
)
def test_the_ranks_of_a_replica_are_listed(replica: str, cursor: str | None, expected: list[str]) -> None:
    """Replicas with a similar name, and instances with other names, are excluded."""
    known = state()
    names = ["p", "p-", "p-2-main-a", "p-main-a", "p-main-b", "p-other-a", "p-speculative-a", "p2-main-a"]
    known.apply(StoreChange(instances=tuple(instance(name) for name in names)))
    assert expected == [each.source.instance_id for each in known.instances_after(cursor, replica)]


def test_forks_are_ordered_by_id() -> None:
    """Dropped ones are not listed."""
    known = state(max_finished_forks=1)
    known.apply(StoreChange(forks=(fork("c"), fork("a", ended=True), fork("d"), fork("b", ended=True))))
    known.apply(StoreChange(forks=(fork("c", seen_at=2.0),)))
    pages = [known.forks_after(cursor) for cursor in (None, "b", "d")]
    assert [["b", "c", "d"], ["c", "d"], []] == [[each.fork_id for each in one] for one in pages]


def test_overdue_instances_are_past_their_ttl() -> None:
    """The TTL of ten seconds counts from the last report."""
    known = state()
    known.apply(StoreChange(instances=(instance("a", seen_at=0.0), instance("b", seen_at=1.0))))
    known.apply(StoreChange(instances=(instance("a", seen_at=2.0),)))
    silent = [[each.report.instance_id for each in known.overdue_instances(now)] for now in (10.0, 11.0, 12.0)]
    assert [[], ["b"], ["b", "a"]] == silent


def test_overdue_forks_are_listed_oldest_first() -> None:
    """Finished forks are not listed."""
    known = state()
    known.apply(StoreChange(forks=(fork("a", seen_at=1.0), fork("b", seen_at=2.0), fork("c", ended=True))))
    assert [["a"], ["a", "b"]] == [[each.fork_id for each in known.overdue_forks(at)] for at in (1.0, 2.0)]


def test_an_instance_that_changes_its_model_changes_its_group() -> None:
    """The old group is removed with its last member."""
    known = state()
    known.apply(StoreChange(instances=(instance("a"),)))
    known.apply(StoreChange(instances=(instance("a", model="other"),)))
    assert [OTHER] == [group.key for group in known.groups()]
    assert {} == known.group(GROUP).sources


def test_other_ranks_of_a_model_are_listed() -> None:
    """They are for the reason of a plan without routes."""
    known = state()
    known.apply(
        StoreChange(instances=(instance("a"), instance("b", rank=Rank(tp=1, tp_size=2)), instance("c", model="other")))
    )
    assert (Rank(tp=1, tp_size=2).key,) == known.other_ranks(GROUP)


def test_a_model_with_two_served_versions_is_reported() -> None:
    """Targets, draining instances, in-place updates and other models do not count."""
    known = state()

    def put(name: str, version: str, **changes: object) -> None:
        known.apply(
            StoreChange(instances=(replace(instance(name), report=seed_report(name, version=version, **changes)),))
        )

    put("a", "v1")
    put("b", "v2", state="loading", verified=())
    put("c", "v3", state="draining")
    put("d", "update:r:1")
    put("e", "v4", model="other")
    assert set() == known.models_with_several_versions()
    put("f", "v2")
    assert {"m"} == known.models_with_several_versions()


def test_readers_from_before_a_restart_count_until_they_replan() -> None:
    """A known fork counts by its plan."""
    known = state()
    known.apply(StoreChange(instances=(instance("s", readers=("x", "y")),)))
    unplanned = set(known.group(GROUP).readers["s"])
    known.apply(StoreChange(instances=(instance("of-x"),), forks=(reading("x", "t"),)))
    known.apply(StoreChange(instances=(instance("s", readers=("x", "y")),)))
    assert {"x", "y"} == unplanned
    assert {"y"} == set(known.group(GROUP).readers["s"])


def test_a_fork_counts_as_a_reader_until_it_ends() -> None:
    """It counts for each source of its newest plan only."""
    known = state()
    known.apply(StoreChange(instances=(instance("s"), instance("t"), instance("of-x")), forks=(reading("x", "s"),)))
    known.apply(StoreChange(forks=(reading("x", "t"),)))
    during = {name: set(readers) for name, readers in known.group(GROUP).readers.items()}
    known.apply(StoreChange(forks=(reading("x", "t", ended=True),)))
    after = {name: set(readers) for name, readers in known.group(GROUP).readers.items()}
    assert {"t": {"x"}} == during
    assert {} == after


def test_the_running_fork_of_an_instance_is_found() -> None:
    """It is found until it ends; a later one replaces it."""
    known = state()
    known.apply(StoreChange(forks=(fork("a"),)))
    found = [known.live_fork_of("of-a")]
    known.apply(StoreChange(forks=(fork("a", ended=True),)))
    found.append(known.live_fork_of("of-a"))
    assert [fork("a"), None] == found


def test_progress_alone_moves_no_reader() -> None:
    """The group's index does not change, and the listener is notified anyway."""
    known = state()
    notified: list[ForkRecord] = []
    stop = known.subscribe(notified.append)
    known.apply(StoreChange(instances=(instance("s"), instance("of-x")), forks=(reading("x", "s"),)))
    known.apply(StoreChange(forks=(reading("x", "s", seen_at=3.0),)))
    stop()
    known.apply(StoreChange(forks=(reading("x", "s", seen_at=4.0),)))
    assert [0.0, 3.0] == [each.seen_at for each in notified]
    assert {"x": 1.0} == known.group(GROUP).readers["s"]


def test_bytes_of_forks_are_summed_by_group() -> None:
    """They are added when a fork ends."""
    known = state()
    known.apply(StoreChange(instances=(instance("s"), instance("of-x")), forks=(reading("x", "s"),)))
    finish = ForkResult(outcome="forked", seconds=1, bytes_read=9, sources={"s": 5, "loader:": 4})
    known.apply(StoreChange(forks=(replace(reading("x", "s"), finish=finish),)))
    group = known.group(GROUP)
    assert 5 == group.history.forked_bytes
    assert 4 == group.history.storage_bytes


def test_clearing_removes_everything() -> None:
    """The store's contents are loaded afterwards."""
    known = state()
    known.apply(StoreChange(instances=(instance("s"), instance("of-x")), forks=(reading("x", "s"),)))
    known.clear()
    view = known.group(GROUP).view([demand(loading("t"))])
    assert [] == known.instances()
    assert [] == known.forks()
    assert [] == known.groups()
    assert {} == view.content_counts
    assert [] == list(known.instances_after(None))
    assert [] == list(known.forks_after(None))
    known.apply(StoreChange(instances=(instance("s"),)))
    assert 1 == sum(each.seeds for each in known.group(GROUP).content_counts(LAYOUT).values())
