"""How long forks took, what they saved against storage, and what held them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.fork_stats import RECENT, ForkDurationStats, origin_of
from planner.source_rate_limits import source_rate_limits
from planner.store.records import ForkRecord, RouteRecord
from rfork.schema import ForkResult
from rfork.schema.types import Outcome
from tests.unit.planner.records import fork, instance

FORK: ForkRecord = fork("f", image_bytes=12)


def finish(seconds: float, outcome: Outcome = "forked", /, **sources: int) -> ForkResult:
    """One that read so many bytes from a peer, `s`, and from `storage`."""
    names = {"storage": "checkpoint:file:///c"}
    bytes_by_source = {names.get(name, name): nbytes for name, nbytes in sources.items()}
    return ForkResult(outcome=outcome, seconds=seconds, bytes_read=12, sources=bytes_by_source)


def stats_after(*finishes: ForkResult) -> tuple[float | None, float | None, float]:
    """What is known of storage and of forks after these, and what these saved."""
    stats = ForkDurationStats()
    for each in finishes:
        stats.record(FORK, each)
    return stats.storage_s, stats.fork_s, stats.total_seconds_saved


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
        "nothing", "forked before any read storage", "saved", "slower", "both", "peers first",
        "not the whole image", "the median",
    ],
)  # fmt: skip
def test_what_forks_from_one_another_save(
    finishes: list[ForkResult], expected: tuple[float | None, float | None, float]
) -> None:
    """Against the median of those that read storage, as it was known when each ended."""
    assert expected == stats_after(*finishes)


def test_only_the_last_forks_count() -> None:
    """The fleet, or its storage, may be another by now."""
    slow, quick = [finish(9.0, storage=12)] * RECENT, [finish(1.0, storage=12)] * RECENT
    assert (1.0, None, 0.0) == stats_after(*slow, *quick)


def test_an_image_without_a_size_tells_nothing() -> None:
    """Clients of other protocols do not say how large theirs is."""
    stats = ForkDurationStats()
    stats.record(replace(FORK, image_bytes=0), finish(1.0, s=12))
    assert stats.fork_s is None


@pytest.mark.parametrize(
    ("sources", "expected"),
    [({}, "nothing"), ({"s": 0}, "nothing"), ({"s": 1}, "peers"), ({"storage": 1}, "storage"),
     ({"s": 1, "storage": 1}, "both")],
)  # fmt: skip
def test_where_it_came_from(sources: dict[str, int], expected: str) -> None:
    """A source that gave nothing does not count."""
    assert expected == origin_of(finish(1.0, "forked", **sources))


def test_what_sources_held_a_fork_to() -> None:
    """As they say now; of one that is gone, as it said before; of one without a limit, nothing."""
    known = {"s": instance("s", egress_rate=7), "free": instance("free")}
    reads = tuple(RouteRecord(name, ((0, 1),), ("http",), 0) for name in ("s", "free", "gone", "stranger"))
    before = {"s": 5, "free": 5, "gone": 3, "left": 1}
    assert {"s": 7, "gone": 3} == source_rate_limits(replace(FORK, reads=reads, source_rate_limits=before), known.get)
