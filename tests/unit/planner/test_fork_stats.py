"""Durations of forks, time saved against storage, and rate limits of their sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.core.group_history import RECENT, GroupHistory, origin_of
from planner.core.records import ForkRecord, RouteRecord, StoreChange
from planner.core.state import PlannerState
from rfork.schema import ForkResult, Outcome
from tests.unit.planner.records import fork, instance

FORK: ForkRecord = fork("f", image_bytes=12)


def finish(seconds: float, outcome: Outcome = "forked", /, **sources: int) -> ForkResult:
    """Return the result of a fork with these bytes from peer `s` and from `storage`."""
    names = {"storage": "checkpoint:file:///c"}
    bytes_by_source = {names.get(name, name): nbytes for name, nbytes in sources.items()}
    return ForkResult(outcome=outcome, seconds=seconds, bytes_read=12, sources=bytes_by_source)


def stats_after(*finishes: ForkResult) -> tuple[float | None, float | None, float]:
    """Return the statistics after these results, and the time saved."""
    history = GroupHistory()
    for each in finishes:
        history.record(FORK, each)
    return history.storage_s, history.fork_s, history.total_seconds_saved


@pytest.mark.parametrize(
    ("finishes", "expected"),
    [
        ([], (None, None, 0.0)),
        ([finish(2.0, s=12)], (None, 2.0, 0.0)),
        ([finish(9.0, storage=12), finish(2.0, s=12)], (9.0, 2.0, 7.0)),
        ([finish(9.0, "fallback", storage=12), finish(11.0, s=12)], (9.0, 11.0, -2.0)),
        ([finish(9.0, storage=12), finish(5.0, s=6, storage=6)], (9.0, None, 0.0)),
        ([finish(9.0, "fallback", s=3, storage=12)], (None, None, 0.0)),
        ([finish(9.0, "failed", s=12), finish(9.0, s=6), finish(9.0)], (None, None, 0.0)),
        ([finish(seconds, storage=12) for seconds in (1.0, 9.0, 2.0)], (2.0, None, 0.0)),
    ],
    ids=[
        "nothing", "forked before any storage read", "saved", "slower", "both", "peers first",
        "incomplete image", "median",
    ],
)  # fmt: skip
def test_saved_time_is_relative_to_the_median_storage_read(
    finishes: list[ForkResult], expected: tuple[float | None, float | None, float]
) -> None:
    """It is relative to the median of storage reads known when each fork ended."""
    assert expected == stats_after(*finishes)


def test_only_recent_forks_count() -> None:
    """The fleet or its storage may have changed since."""
    slow, quick = [finish(9.0, storage=12)] * RECENT, [finish(1.0, storage=12)] * RECENT
    assert (1.0, None, 0.0) == stats_after(*slow, *quick)


def test_an_image_of_unknown_size_is_not_counted() -> None:
    """Clients of other protocols do not report its size."""
    history = GroupHistory()
    history.record(replace(FORK, image_bytes=0), finish(1.0, s=12))
    assert history.fork_s is None


@pytest.mark.parametrize(
    ("sources", "expected"),
    [({}, "nothing"), ({"s": 0}, "nothing"), ({"s": 1}, "peers"), ({"storage": 1}, "storage"),
     ({"s": 1, "storage": 1}, "both")],
)  # fmt: skip
def test_sources_that_sent_nothing_are_no_origin(sources: dict[str, int], expected: str) -> None:
    """A source that sent nothing does not count."""
    assert expected == origin_of(finish(1.0, "forked", **sources))


def test_rate_limits_of_removed_sources_come_from_the_forks_record() -> None:
    """They come from the latest reports, or from the fork's record for removed sources."""
    state = PlannerState(max_finished_forks=1)
    state.apply(StoreChange(instances=(instance("s", egress_rate=7), instance("free"))))
    reads = tuple(RouteRecord(name, ((0, 1),), ("http",), 0) for name in ("s", "free", "gone", "unknown"))
    before = {"s": 5, "free": 5, "gone": 3, "left": 1}
    assert {"s": 7, "gone": 3} == state.source_rate_limits(replace(FORK, reads=reads, source_rate_limits=before))
