"""The number of concurrent reads from a source, by transport and measured rate."""

from __future__ import annotations

import pytest

from rfork.receiver.chunk_scheduler import ChunkRead, ChunkScheduler, ReadConcurrency

MIB = 1 << 20


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(25 * MIB, 1), (255 * MIB, 1), (300 * MIB, 2), (1200 * MIB, 4), (10_000 * MIB, 4)],
)
def test_faster_links_allow_more_concurrent_reads(rate: int, expected: int) -> None:
    """One connection fills a link of one or two gigabits; the configured window is the maximum."""
    concurrency = ReadConcurrency(4)
    concurrency.record_chunk(rate, 1.0, 0)
    assert expected == concurrency.window("http")


def test_the_first_read_measures_the_rate() -> None:
    """Before the first chunk has arrived the rate is unknown, so there is only one read."""
    assert 1 == ReadConcurrency(4).window("http")


def test_sources_on_this_host_use_the_full_window() -> None:
    """They share no link, and concurrent copies use more memory bandwidth."""
    concurrency = ReadConcurrency(4)
    concurrency.record_chunk(100 * MIB, 1.0, 0)
    assert 4 == concurrency.window("shared_memory")
    assert 1 == concurrency.window("http")


def test_concurrent_reads_share_the_rate() -> None:
    """Four chunks of 100 MiB that arrive within the same second make 400 MiB per second."""
    concurrency = ReadConcurrency(4)
    concurrency.record_chunk(100 * MIB, 1.0, 3)
    assert 2 == concurrency.window("http")


def one_per_source(_source_id: str) -> int:
    return 1


def test_reads_of_one_source_stay_within_its_window() -> None:
    """A second source is read from while the first is busy; the third read waits."""
    scheduler = ChunkScheduler(4)
    scheduler.assign({"a": ((0, 2),), "b": ((2, 4),)})
    for name in "ab":
        scheduler.mark_available(name, ((0, 4),))
    first = scheduler.next_read(one_per_source)
    assert ChunkRead("a", 0) == first
    assert ChunkRead("b", 2) == scheduler.next_read(one_per_source)
    assert scheduler.next_read(one_per_source) is None
    assert first is not None
    scheduler.verified(first)
    assert ChunkRead("a", 1) == scheduler.next_read(one_per_source)
