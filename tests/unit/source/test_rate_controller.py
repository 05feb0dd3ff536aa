"""The search for the egress rate as a table: step durations in, rates out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.source.rate_controller import (
    FIRST_RATE,
    MAX_CORRECTION,
    MAX_EVIDENCE_STEPS,
    MAX_FACTOR,
    MAX_RATE,
    MAX_SLOW_RATIO,
    MIN_EVIDENCE_STEPS,
    MIN_FACTOR,
    RAMP_FACTOR,
    RAMP_STEPS,
    RECENT_STEPS,
    RESUME_RATE,
    LatencyBaseline,
    RateSearch,
)

FLOOR = 1 << 20
ALLOWED = 0.08
STEADY = (0.01,) * 64
NOISY = (0.006, 0.008, 0.01, 0.012, 0.014) * 12


def baseline_of(durations: tuple[float, ...]) -> LatencyBaseline:
    """Return the baseline of these durations."""
    baseline = LatencyBaseline()
    for index, seconds in enumerate(durations):
        baseline.add(index * 0.01, seconds, resting=False)
    baseline.measure(len(durations) * 0.01)
    return baseline


def search_after_harm() -> RateSearch:
    """Return a search that has found a slowdown and checked it."""
    search, baseline = RateSearch(ALLOWED), baseline_of(STEADY)
    add_steps(search, baseline, 0.02, MIN_EVIDENCE_STEPS)
    search.check(baseline)
    search.rate = FIRST_RATE
    return search


def add_steps(search: RateSearch, baseline: LatencyBaseline, seconds: float, count: int) -> int:
    """Add equal steps until the rate changes, at most `count`; return how many were added."""
    for added in range(1, count + 1):
        search.add(seconds, 1.0)
        if search.decide(baseline, FLOOR):
            return added
    return count


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.01, MAX_FACTOR),
        (0.005, MAX_FACTOR),
        (0.0102, MAX_FACTOR),
        (0.012, 0.4),
        (0.0116, 0.5),
        (0.02, MIN_FACTOR),
        (1.0, MIN_FACTOR),
    ],
)
def test_clear_evidence_changes_the_rate_in_proportion(seconds: float, expected: float) -> None:
    """If durations hardly vary, a few steps are evidence, and the rate changes to what the slowdown allows."""
    search, baseline = RateSearch(ALLOWED), baseline_of(STEADY)
    added = add_steps(search, baseline, seconds, MAX_EVIDENCE_STEPS)
    assert MIN_EVIDENCE_STEPS == added
    assert pytest.approx(expected * FIRST_RATE) == search.rate


def test_the_first_search_doubles_the_rate_without_evidence() -> None:
    """If durations vary too much for evidence, the rate rises while steps are no slower than allowed."""
    search, baseline = RateSearch(ALLOWED), baseline_of(NOISY)
    assert RAMP_STEPS == add_steps(search, baseline, 0.0105, MAX_EVIDENCE_STEPS)
    assert RAMP_FACTOR * FIRST_RATE == search.rate


@pytest.mark.parametrize(("seconds", "expected"), [(0.0101, MAX_CORRECTION), (0.0105, MAX_CORRECTION), (0.0113, 0.94)])
def test_later_the_rate_changes_slowly_without_evidence(seconds: float, expected: float) -> None:
    """After a slowdown was found, the rate approaches the likely best one in small changes."""
    search, baseline = search_after_harm(), baseline_of(NOISY)
    assert MAX_EVIDENCE_STEPS == add_steps(search, baseline, seconds, MAX_EVIDENCE_STEPS)
    assert pytest.approx(expected, rel=0.1) == search.rate / FIRST_RATE


def test_a_slowdown_that_the_next_pause_shows_too_is_undone() -> None:
    """Steps that are as slow without egress were not slowed down by it: throttling did not help."""
    search = RateSearch(ALLOWED)
    search.rate = 16 * FIRST_RATE
    for _ in range(3):
        add_steps(search, baseline_of(STEADY), 0.02, MIN_EVIDENCE_STEPS)
    assert FIRST_RATE / 4 == search.rate
    search.check(baseline_of((0.02,) * 64))
    assert 16 * FIRST_RATE == search.rate


def test_a_slowdown_that_the_next_pause_does_not_show_stays() -> None:
    """Steps that are faster without egress were slowed down by it."""
    search = RateSearch(ALLOWED)
    add_steps(search, baseline_of(STEADY), 0.02, MIN_EVIDENCE_STEPS)
    search.check(baseline_of(STEADY))
    assert FIRST_RATE / 4 == search.rate


def test_an_outdated_rate_is_bounded() -> None:
    """Readers that arrive later start no faster than the rate of resumption."""
    search = RateSearch(ALLOWED)
    search.rate = MAX_RATE
    search.resume()
    assert RESUME_RATE == search.rate


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 1)), min_size=1, max_size=300),
    st.sampled_from([STEADY, NOISY]),
    st.floats(-1, 99),
)
def test_the_rate_stays_within_its_bounds(
    steps: list[tuple[float, float]], durations: tuple[float, ...], allowed: float
) -> None:
    """Whatever the steps, each decision changes the rate by a bounded factor, between the floor and the maximum."""
    search, baseline = RateSearch(allowed), baseline_of(durations)
    for seconds, weight in steps:
        before = search.rate
        search.add(baseline.cap(seconds), weight)
        search.decide(baseline, FLOOR)
        assert FLOOR <= search.rate <= MAX_RATE
        assert MIN_FACTOR * 0.999 <= search.rate / before <= MAX_FACTOR * 1.001


@given(st.floats(0.001, 1), st.floats(0, 0.5), st.integers(MIN_EVIDENCE_STEPS, MAX_EVIDENCE_STEPS))
def test_slower_steps_never_lead_to_a_higher_rate(seconds: float, more: float, count: int) -> None:
    """With as many steps, a longer duration leads to the same rate or a lower one."""
    rates = []
    for duration in (seconds, seconds + more):
        search, baseline = RateSearch(ALLOWED), baseline_of(STEADY)
        for _ in range(count):
            search.add(duration, 1.0)
        search.decide(baseline, FLOOR)
        rates.append(search.rate)
    assert rates[1] <= rates[0]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(STEADY, 1.0), ((0.01,) * 56 + (0.012,) * 8, 0.012 / 0.01025), ((0.01,) * 50 + (0.1,) * 14, MAX_SLOW_RATIO)],
)
def test_slow_steps_are_those_of_the_ninetieth_percentile(steps: tuple[float, ...], expected: float) -> None:
    """They are measured in means, within a bound."""
    assert pytest.approx(expected) == baseline_of(steps).slow_ratio


@pytest.mark.parametrize(("pause_steps", "expected"), [(RECENT_STEPS - 1, 0.02), (RECENT_STEPS, 0.01)])
def test_steps_during_pauses_are_preferred_as_baseline(pause_steps: int, expected: float) -> None:
    """With enough of them, steps from before the first reader no longer count."""
    baseline = LatencyBaseline()
    other_count = 2 * RECENT_STEPS
    for _ in range(other_count):
        baseline.add(0.0, 0.02 + 0.01 * pause_steps / other_count * (pause_steps < RECENT_STEPS), resting=False)
    for _ in range(pause_steps):
        baseline.add(0.0, 0.01, resting=True)
    baseline.measure(0.0)
    assert pytest.approx(expected) == baseline.mean


@pytest.mark.parametrize(
    ("steps", "expected"),
    [((0.01,) * 20, 0.0), ((0.008, 0.012) * 10, 0.2), ((0.005, 0.015) * 10, 0.5)],
)
def test_the_spread_is_relative_to_the_mean(steps: tuple[float, ...], expected: float) -> None:
    """It is the standard deviation in means."""
    assert math.isclose(expected, baseline_of(steps).spread, abs_tol=1e-9)
