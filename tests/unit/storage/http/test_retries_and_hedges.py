"""Retries and hedges of ranged reads, without sockets."""

from __future__ import annotations

import threading
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.net.connect import CancelScope
from rfork.net.stream import ScatterCursor
from rfork.settings import StorageSettings
from rfork.storage.http.hedging import MAX_HEDGED_FRACTION, MIN_DELAY_S, MIN_SAMPLES, HedgedRequest, HedgePolicy
from rfork.storage.http.retry import (
    MAX_DELAY_S,
    MAX_RETRY_AFTER_S,
    MIN_PROGRESS_BYTES,
    RetryBudget,
    retry_after,
)
from rfork.storage.http.session import HttpSession
from tests.unit.fake_clock import FakeClock

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=timezone.utc)
MIB = 1 << 20

# Retries.


def test_waits_double_up_to_a_limit() -> None:
    """With maximum jitter, waits double from a tenth of a second to five seconds."""
    retry_budget = RetryBudget(9, 0.0, lambda: 1.0, lambda: 0.0)
    assert [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, None] == [retry_budget.failed(0) for _ in range(9)]


@given(st.integers(1, 100), st.floats(0, 1, exclude_max=True), st.floats(0, 1e9))
def test_no_wait_is_longer_than_its_limit(min_attempts: int, random: float, retry_after_s: float) -> None:
    """Without a minimum time there are exactly `min_attempts` attempts, and each wait is within its limits."""
    retry_budget = RetryBudget(min_attempts, 0.0, lambda: random, lambda: 0.0)
    waits = [retry_budget.failed(0, retry_after_s) for _ in range(min_attempts)]
    assert waits[-1] is None
    assert min_attempts == retry_budget.failed_attempts
    for wait in waits[:-1]:
        assert wait is not None
        assert min(retry_after_s, MAX_RETRY_AFTER_S) <= wait <= max(MAX_DELAY_S, MAX_RETRY_AFTER_S)


def seconds_until_exhausted(retry_budget: RetryBudget, clock: FakeClock, attempt_s: float) -> float:
    """Return the time until the attempts are exhausted if each one fails after `attempt_s`."""
    began = clock()
    clock.now += attempt_s
    while (wait_s := retry_budget.failed(0)) is not None:
        clock.now += wait_s + attempt_s
    return clock() - began


@pytest.mark.parametrize("random", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("min_attempts", "min_s", "attempt_s", "max_s"),
    [
        (5, 10.0, 0.0, 10.0),  # connection refused immediately: an outage of ten seconds is bridged
        (1, 10.0, 0.0, 10.0),
        (5, 10.0, 3.0, 5 * 3.0 + 1.5),  # the attempts themselves need more time
        (2, 600.0, 0.0, 600.0),
    ],
)
def test_attempts_end_within_their_bounds(
    min_attempts: int, min_s: float, attempt_s: float, max_s: float, random: float
) -> None:
    """Attempts stop once their number and time are exhausted, and not much later."""
    clock = FakeClock()
    retry_budget = RetryBudget(min_attempts, min_s, lambda: random, clock)
    elapsed_s = seconds_until_exhausted(retry_budget, clock, attempt_s)
    assert min_attempts <= retry_budget.failed_attempts
    assert min_s <= elapsed_s <= max_s + attempt_s + 1e-6


def test_an_unreachable_server_is_not_retried_too_often() -> None:
    """Ten seconds of refused connections cost about a dozen requests."""
    clock = FakeClock()
    retry_budget = RetryBudget(5, 10.0, lambda: 0.0, clock)
    seconds_until_exhausted(retry_budget, clock, 0.0)
    assert 12 >= retry_budget.failed_attempts


def test_progress_resets_the_attempts() -> None:
    """An attempt with enough progress resets the count; one with less does not."""
    retry_budget = RetryBudget(3, 0.0, lambda: 1.0, lambda: 0.0)
    received_bytes = [0, MIN_PROGRESS_BYTES - 1, MIN_PROGRESS_BYTES, 0, MIN_PROGRESS_BYTES, MIN_PROGRESS_BYTES, 1, 1]
    assert [0.1, 0.2, 0.1, 0.2, 0.1, 0.1, 0.2, None] == [retry_budget.failed(count) for count in received_bytes]


def test_progress_resets_the_time() -> None:
    """The minimum time is counted from the last attempt with enough progress."""
    clock = FakeClock()
    retry_budget = RetryBudget(1, 10.0, lambda: 0.0, clock)
    waits = []
    for received_bytes in (0, MIN_PROGRESS_BYTES, 0, 0):
        clock.now += 6.0
        waits.append(retry_budget.failed(received_bytes) is not None)
    assert [True, True, True, False] == waits


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 0.0),
        (" 17 ", 17.0),
        ("Mon, 04 May 2026 12:00:30 GMT", 30.0),
        ("Mon, 04 May 2026 11:00:00 GMT", 0.0),
        ("Mon, 04 May 2026 12:00:30 -0000", 30.0),
        ("", 0.0),
        ("-1", 0.0),
        ("1.5", 0.0),
        ("9" * 5000, 0.0),
        ("Mon, 04 May 99999999999999999999 12:00:30 GMT", 0.0),
        ("Mon, 04 May 2026 12:00:30 +99999999999999999", 0.0),
        ("soon", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, expected: float) -> None:
    """Both forms are parsed; anything else means no delay."""
    assert expected == retry_after(value, NOW)


@given(st.text(max_size=60))
def test_an_invalid_retry_after_does_not_raise(value: str) -> None:
    """Every value results in a non-negative time."""
    assert 0.0 <= retry_after(value, NOW)


# Hedges.


def hedges_after(hedges: HedgePolicy, count: int, seconds: float = 0.2) -> HedgePolicy:
    """Return the hedges after `count` responses of a mebibyte, each with a tenth of a second to its first
    byte.
    """
    for _ in range(count):
        hedges.record_response(MIB, 0.1, seconds)
    return hedges


def test_no_request_is_hedged_before_enough_samples() -> None:
    """The first requests are never hedged, and none is with the setting 0."""
    assert None is hedges_after(HedgePolicy(4, MIB), MIN_SAMPLES - 1).delay_s(MIB)
    assert None is hedges_after(HedgePolicy(0, MIB), 10 * MIN_SAMPLES).delay_s(MIB)


def test_slowness_depends_on_the_size() -> None:
    """A request is slow after a multiple of the usual time to the first byte plus the usual time of its
    bytes.
    """
    hedges = hedges_after(HedgePolicy(4, MIB), MIN_SAMPLES)
    assert [MIN_DELAY_S, 0.8, 4 * 0.1 + 4 * 0.4] == [hedges.delay_s(size) for size in (1, MIB, 4 * MIB)]


def test_the_median_defines_the_usual_time() -> None:
    """A few slow responses change nothing; once the majority is slow, slow is usual."""
    hedges = hedges_after(HedgePolicy(4, MIB), 60)
    assert 0.8 == hedges_after(hedges, 20, 100.1).delay_s(MIB)
    assert 4 * 100.1 == hedges_after(hedges, 40, 100.1).delay_s(MIB)


def test_small_responses_have_little_weight() -> None:
    """The time per byte is weighted by bytes, not by requests."""
    hedges = hedges_after(HedgePolicy(4, MIB), 1)
    for _ in range(60):
        hedges.record_response(100, 0.1, 0.11)
    assert 0.8 == hedges.delay_s(MIB)


@pytest.mark.parametrize("response_count", [MIN_SAMPLES, 100, 1000])
def test_hedges_are_limited(response_count: int) -> None:
    """However many requests are slow, hedges stay a small share of all requests."""
    hedges = hedges_after(HedgePolicy(4, 1 << 40), response_count)
    started_requests = sum(hedges.reserve(1) for _ in range(response_count))
    assert max(1, round(MAX_HEDGED_FRACTION * response_count)) == started_requests
    assert started_requests == hedges.started


def test_hedges_share_their_memory() -> None:
    """A hedge whose bytes do not fit is not sent, and fits again once another hedge has ended."""
    hedges = hedges_after(HedgePolicy(4, 4 * MIB), 1000)
    assert hedges.reserve(3 * MIB)
    assert not hedges.reserve(2 * MIB)
    assert hedges.reserve(MIB)
    hedges.release(3 * MIB)
    assert hedges.reserve(3 * MIB)
    assert not hedges.reserve(1)


def test_a_hedge_that_cannot_start_releases_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started, the first request continues and the memory is released."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("rfork.storage.http.hedging.threading.Thread.start", start)
    hedges = hedges_after(HedgePolicy(4, MIB), 1000)
    cursor = ScatterCursor([memoryview(bytearray(100))])
    hedged_request = HedgedRequest(
        hedges, cursor, 0, 100, CancelScope(), CancelScope(), lambda cursor, begin, end: None
    )
    assert MIN_DELAY_S == hedged_request.on_slow()
    assert 0 == hedges.inflight_bytes
    hedged_request.wait_result()
    assert 0 == cursor.done


@pytest.mark.parametrize(("memory", "max_bytes"), [(16 * MIB, 16 * MIB), (1 << 30, 256 * MIB)])
def test_a_block_may_be_hedged_with_little_memory(memory: int, max_bytes: int) -> None:
    """Hedges may use a quarter of the memory, and in any case a block of the maximum size."""
    hedges = hedges_after(HttpSession(StorageSettings(staging_bytes=memory)).hedges, 1000)
    assert hedges.reserve(max_bytes)
    assert not hedges.reserve(1)
