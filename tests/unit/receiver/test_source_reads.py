"""Reads in flight, and the rate while there are any."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.image.chunks import MIB
from rfork.receiver.source_reads import MIN_ACTIVE_S, SourceReads

CHUNK_S = 0.25
RATE = MIB / CHUNK_S


def read(reads: SourceReads[int], chunks: int, began_at: float, chunk_s: float = CHUNK_S) -> float:
    """Read chunks one after the other; returns when the last one arrived."""
    for chunk in range(chunks):
        reads.start(chunk, MIB, began_at)
        began_at += chunk_s
        reads.received(chunk, chunk_s, began_at)
    return began_at


def test_without_a_read_there_is_no_rate() -> None:
    """Nothing was measured."""
    assert SourceReads[int]().bytes_per_s(5.0) is None


def test_the_rate_is_that_of_the_chunks_received() -> None:
    """One chunk in each quarter of a second."""
    reads = SourceReads[int]()
    assert pytest.approx(RATE) == reads.bytes_per_s(read(reads, 1, 10.0))


def test_time_without_a_read_does_not_count() -> None:
    """A target that waited ten seconds for its source reads as fast as before."""
    reads = SourceReads[int]()
    end = read(reads, 1, 0.0)
    before = reads.bytes_per_s(end)
    assert before == reads.bytes_per_s(end + 10.0)
    again = read(reads, 1, end + 10.0)
    assert pytest.approx(RATE) == reads.bytes_per_s(again)


def test_the_first_chunk_in_flight_counts_as_received() -> None:
    """The rate is an upper bound, which falls while the chunk does not arrive."""
    reads = SourceReads[int]()
    reads.start(0, MIB, 0.0)
    bounds = [reads.bytes_per_s(seconds) for seconds in (0.5, 1.0, 4.0)]
    assert pytest.approx([2 * MIB, MIB, MIB / 4]) == bounds


def test_later_chunks_in_flight_count_by_the_duration_of_the_earlier_ones() -> None:
    """Half of the time that the first chunk took has passed."""
    reads = SourceReads[int]()
    end = read(reads, 1, 0.0)
    reads.start(1, MIB, end)
    assert pytest.approx(0.5 * MIB) == reads.expected_bytes(end + CHUNK_S / 2)
    assert pytest.approx(MIB) == reads.expected_bytes(end + 10 * CHUNK_S)


def test_concurrent_reads_share_the_time() -> None:
    """Four chunks at once in one second are four chunks a second, before and after they arrive."""
    reads = SourceReads[int]()
    for chunk in range(4):
        reads.start(chunk, MIB, 0.0)
    assert pytest.approx(4 * MIB) == reads.bytes_per_s(1.0)
    for chunk in range(4):
        reads.received(chunk, 1.0, 1.0)
    assert pytest.approx(4 * MIB) == reads.bytes_per_s(1.0)


def test_a_failed_read_leaves_no_bytes() -> None:
    """Its time counts, and its chunk does not."""
    reads = SourceReads[int]()
    end = read(reads, 1, 0.0)
    reads.start(1, MIB, end)
    reads.failed(1, end + CHUNK_S)
    rate = reads.bytes_per_s(end + CHUNK_S)
    assert rate is not None
    assert rate < 0.6 * RATE
    assert 0 == reads.expected_bytes(end + CHUNK_S)


def test_a_new_rate_replaces_the_old_one() -> None:
    """After some seconds of slower reads, the faster ones before do not count any more."""
    reads = SourceReads[int]()
    end = read(reads, 40, read(reads, 40, 0.0), 1.0)
    assert pytest.approx(MIB, rel=0.01) == reads.bytes_per_s(end)


def test_an_instant_shows_no_rate() -> None:
    """The rate of a read that has just begun would be any number."""
    reads = SourceReads[int]()
    reads.start(0, MIB, 0.0)
    assert reads.bytes_per_s(MIN_ACTIVE_S / 2) is None


@given(
    chunk_s=st.floats(0.01, 10.0),
    waits=st.lists(st.floats(0.0, 30.0), min_size=1, max_size=20),
    polled=st.floats(0.0, 1.0),
)
def test_a_constant_rate_is_measured_at_any_moment(chunk_s: float, waits: list[float], polled: float) -> None:
    """The rate of a source that sends each chunk in the same time is exact from its first chunk on."""
    reads, now = SourceReads[int](), 0.0
    for chunk, wait in enumerate(waits):
        now += wait
        reads.start(chunk, MIB, now)
        if chunk:
            moment = reads.bytes_per_s(now + polled * chunk_s)
            assert moment is not None
            assert math.isclose(MIB / chunk_s, moment, rel_tol=1e-6)
        now += chunk_s
        reads.received(chunk, chunk_s, now)
        measured = reads.bytes_per_s(now)
        assert measured is not None
        assert math.isclose(MIB / chunk_s, measured, rel_tol=1e-6)
