"""The search for the egress rate as a table: steps in, windows and rates out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.image.chunks import MIB
from rfork.source.rate_search import (
    CAUTIOUS_GROWTH,
    FIRST_RATE,
    MAX_FACTOR,
    MAX_RATE,
    MAX_SENDING_RATIO,
    MAX_WINDOW_S,
    MIN_SENDING_RATIO,
    MIN_STEPS,
    MIN_WINDOW_S,
    SETTLE_S,
    RateSearch,
    StepStatistics,
)

FLOOR = 8 * MIB
ALLOWED = 0.05
STEP_S = 0.01
SHORT_S = SETTLE_S + MIN_WINDOW_S


class SearchDriver:
    """Runs steps one after the other; records each window as its rate and its seconds.

    `duration(rate)`: seconds of a step while `rate` bytes per second are sent.
    """

    def __init__(self, duration: Callable[[float], float], undisturbed: int = 20) -> None:
        self.search = RateSearch(ALLOWED)
        self.now = 0.0
        self.duration = duration
        self.windows: list[tuple[float, float]] = []
        before = [duration(0.0) for _ in range(undisturbed)]
        for seconds in before:
            self.search.record(seconds)
        self.search.start(self.now, before)

    def run(self, seconds: float) -> SearchDriver:
        """Run steps for `seconds`, and return self."""
        end, began, rate = self.now + seconds, self.now, self.rate
        while self.now < end:
            step_s = self.duration(self.rate)
            self.now += step_s
            self.search.record(step_s)
            self.search.add(self.now - step_s, self.now)
            self.search.advance(self.now, None, FLOOR)
            if self.rate != rate:
                self.windows.append((rate, self.now - began))
                began, rate = self.now, self.rate
        return self

    def run_until_sending(self) -> None:
        """Run steps until a rest has ended."""
        while self.rate != FLOOR:
            self.run(STEP_S)
        while self.rate == FLOOR:
            self.run(STEP_S)

    @property
    def rate(self) -> float:
        """Bytes per second at this moment; infinite: no limit."""
        limit = self.search.limit(FLOOR)
        return math.inf if limit is None else limit


def harmless(rate: float) -> float:
    """Egress has no effect on the step's seconds."""
    return STEP_S


def slowed_by(seconds_per_gb: float, link: float = 1.5e9) -> Callable[[float], float]:
    """Return the step's duration if each GB that is sent delays it; readers read at most `link` bytes per second."""
    return lambda rate: STEP_S * (1 + seconds_per_gb * min(rate, link) / 1e9)


def test_the_rate_rises_without_a_rest_while_it_is_certainly_harmless() -> None:
    """Steps that do not vary prove it after a short window: the rate rises by more than the cautious factor."""
    rates = [rate for rate, _ in SearchDriver(harmless).run(0.7).windows]
    assert [FIRST_RATE, FLOOR] == [rates[0], rates[3]]
    assert all(CAUTIOUS_GROWTH < after / before <= MAX_FACTOR for before, after in itertools.pairwise(rates[:3]))


def test_harmless_egress_is_not_limited_and_rests_seldom() -> None:
    """The share of rests is the minimum."""
    driver = SearchDriver(harmless).run(2.0)
    driver.windows.clear()
    driver.run(30.0)
    rest_s = sum(seconds for rate, seconds in driver.windows if rate == FLOOR)
    sent_s = sum(seconds for rate, seconds in driver.windows if rate == math.inf)
    assert pytest.approx(MAX_SENDING_RATIO, rel=0.1) == sent_s / rest_s


@pytest.mark.parametrize("seconds_per_gb", [0.1, 0.4, 1.0])
def test_the_rate_converges_to_the_allowed_slowdown(seconds_per_gb: float) -> None:
    """It ends where steps take 5 % longer than in rests."""
    driver = SearchDriver(slowed_by(seconds_per_gb)).run(20.0)
    assert pytest.approx(ALLOWED / seconds_per_gb * 1e9, rel=0.1) == driver.search.rate


def test_it_begins_with_a_rest_if_no_undisturbed_steps_are_known() -> None:
    """The rest ends once enough steps are known, and the rate is the first one then."""
    windows = SearchDriver(harmless, undisturbed=MIN_STEPS - 1).run(1.0).windows
    assert [FLOOR, FIRST_RATE] == [rate for rate, _ in windows[:2]]
    assert pytest.approx(SHORT_S, abs=2 * STEP_S) == windows[0][1]


@pytest.mark.parametrize(("began", "counts"), [(SETTLE_S - 0.001, False), (SETTLE_S, True)])
def test_steps_at_the_start_of_a_window_do_not_count(began: float, counts: bool) -> None:
    """Bytes of the window before are still being sent; the window lasts until enough later steps have ended."""
    search = RateSearch(ALLOWED)
    search.start(0.0, [])
    for _ in range(MIN_STEPS):
        search.record(STEP_S)
        search.add(began, began + STEP_S)
    search.advance(SHORT_S, None, FLOOR)
    assert (FIRST_RATE if counts else FLOOR) == search.limit(FLOOR)


def test_a_short_window_is_bounded() -> None:
    """A step that does not end keeps neither a rest nor sending windows open."""
    search = RateSearch(ALLOWED)
    search.start(0.0, [])
    rates = []
    for tick in range(round(20 / 0.1)):
        search.advance(tick * 0.1, 0.0, FLOOR)
        rates.append(search.limit(FLOOR))
    assert FLOOR == rates[round(MAX_WINDOW_S / 0.1) - 1]
    assert FIRST_RATE == rates[round(MAX_WINDOW_S / 0.1) + 1]


def test_steps_that_are_too_long_to_compare_cost_no_long_rests() -> None:
    """Of a request of a minute nothing can be measured: the rate stays, and rests seldom."""
    search = RateSearch(ALLOWED)
    search.start(0.0, [])
    limits = []
    for tick in range(6000):
        search.advance(tick * 0.1, tick * 0.1 - 30.0, FLOOR)
        limits.append(search.limit(FLOOR))
    assert {FLOOR, FIRST_RATE} == set(limits)
    assert limits.count(FLOOR) < 0.1 * len(limits)


def test_a_running_step_counts_with_its_time_so_far() -> None:
    """Steps that begin with egress and do not end until the next rest lower the rate."""
    driver = SearchDriver(lambda rate: STEP_S if rate <= FLOOR else 10 * MAX_WINDOW_S)
    now = 0.0
    while driver.rate != FLOOR:
        now += 0.1
        driver.search.advance(now, 0.0, FLOOR)
    driver.now = now
    while driver.rate == FLOOR:
        driver.run(STEP_S)
    assert driver.search.rate == 2 * FLOOR


def test_a_sending_window_ends_early_if_it_is_clearly_harmful() -> None:
    """A load that egress slows down begins within a long sending window: it ends after a few steps."""
    driver = SearchDriver(harmless).run(5.0)
    driver.run_until_sending()
    driver.duration = slowed_by(0.4)
    began = driver.now
    while driver.rate != FLOOR:
        driver.run(STEP_S)
    assert driver.now - began < SHORT_S + MIN_STEPS * STEP_S


@pytest.mark.parametrize("drift", [0.97, 1.03])
def test_a_drift_is_not_an_effect(drift: float) -> None:
    """If the host becomes faster or slower by 3 % each second, egress is as little limited as before."""
    began = STEP_S
    driver = SearchDriver(harmless).run(2.0)
    driver.duration = lambda rate: began * drift ** (driver.now - 2.0)
    driver.run(20.0)
    driver.windows.clear()
    driver.run(10.0)
    sent = [(rate, seconds) for rate, seconds in driver.windows if rate > 1.5e9]
    assert sum(seconds for _, seconds in sent) > 0.7 * sum(seconds for _, seconds in driver.windows)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_different_load_is_not_an_effect(factor: float) -> None:
    """Steps of another duration have the same rate soon."""
    driver = SearchDriver(slowed_by(0.4)).run(10.0)
    driver.duration = lambda rate: factor * slowed_by(0.4)(rate)
    driver.run(20.0)
    assert pytest.approx(ALLOWED / 0.4 * 1e9, rel=0.1) == driver.search.rate


def test_an_outdated_rate_is_not_used() -> None:
    """The search starts with the first rate again; a lower one remains."""
    fast, slow = SearchDriver(harmless).run(5.0).search, SearchDriver(slowed_by(2.0)).run(10.0).search
    before = slow.rate
    fast.forget()
    slow.forget()
    assert [FIRST_RATE, before] == [fast.rate, slow.rate]
    assert before < FIRST_RATE


def noisy_steps() -> Callable[[float], float]:
    """Return durations that vary by half, without an effect of egress."""
    factors = itertools.cycle((0.5, 1.5))
    return lambda rate: STEP_S * next(factors)


def test_an_uncertain_estimate_lets_the_rate_rise_by_a_small_factor_only() -> None:
    """Steps that vary by half prove nothing after one window: a rate is at most twice the previous one."""
    rates = [rate for rate, _ in SearchDriver(noisy_steps()).run(5.0).windows if rate not in (FLOOR, math.inf)]
    assert len(rates) >= 5
    assert all(after <= CAUTIOUS_GROWTH * before * 1.001 for before, after in itertools.pairwise(rates))


@pytest.mark.parametrize(("steps_per_level", "second_window_rests"), [(1, False), (8, True)])
def test_a_drift_before_the_first_reader_makes_the_estimate_uncertain(
    steps_per_level: int, second_window_rests: bool
) -> None:
    """If the means of consecutive steps differ, as little is certain as they differ; single steps may vary as much."""
    driver = SearchDriver(harmless)
    levels = [STEP_S * (0.97 if index // steps_per_level % 2 else 1.03) for index in range(64)]
    driver.search.start(driver.now, levels)
    windows = driver.run(0.5).windows
    assert second_window_rests == (windows[1][0] == FLOOR)


def test_uncertain_windows_are_short() -> None:
    """While the estimate is uncertain, at least a quarter of the time is rest, so that more windows are compared."""
    windows = SearchDriver(noisy_steps()).run(2.0).windows
    rest_s = sum(seconds for rate, seconds in windows if rate == FLOOR)
    assert rest_s > sum(seconds for _, seconds in windows) / (MIN_SENDING_RATIO + 2)


@given(
    st.lists(st.tuples(st.floats(1e-6, 5.0), st.floats(0.0, 5.0), st.booleans()), max_size=200),
    st.integers(1, 1 << 30),
)
def test_any_steps_keep_the_rate_within_bounds(steps: list[tuple[float, float, bool]], floor: int) -> None:
    """Whatever the durations, pauses and running steps: the rate is at least the floor, and finite or unlimited."""
    search, now = RateSearch(ALLOWED), 0.0
    search.start(now, [seconds for seconds, _, _ in steps[:10]])
    for seconds, pause, is_running in steps:
        now += pause + seconds
        search.record(seconds)
        search.add(now - seconds, now)
        search.advance(now, now - seconds / 2 if is_running else None, floor)
        limit = search.limit(floor)
        assert limit is None or floor <= limit < max(MAX_RATE, 2 * floor + 1)


@pytest.mark.parametrize(
    ("durations", "mean", "variance"),
    [([], 0.0, 0.0), ([2.0], 2.0, 0.0), ([1.0, 3.0], 2.0, 0.25), ([0.0, 0.0], 0.0, 0.0)],
)
def test_statistics_of_a_window(durations: list[float], mean: float, variance: float) -> None:
    """The variance is relative to the squared mean."""
    window = StepStatistics(durations)
    assert (len(durations), mean, variance) == (window.count, window.mean, window.relative_variance)


def test_one_late_step_has_a_bounded_weight() -> None:
    """A pause of an hour during egress counts as one step of a few times the usual duration."""
    driver = SearchDriver(harmless).run(5.0)
    driver.run_until_sending()
    driver.run(2 * SETTLE_S)
    driver.now += 3600.0
    driver.search.record(3600.0)
    driver.search.add(driver.now - 3600.0, driver.now)
    driver.run(60.0)
    assert driver.search.rate == MAX_RATE
