"""Current and maximum rates of a fork, and its efficiency."""

from __future__ import annotations

import pytest

from rfork.receiver.report import ThroughputMeter, measurable_bytes, top_rates

RateSamples = list[tuple[float, int]]
"""Times, and the bytes that had arrived by then."""
SourceSamples = list[tuple[float, dict[str, int]]]
"""Times, and the bytes that had arrived from each source by then."""


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], None),
        ([(0.0, 0), (0.9, 900)], None),
        ([(0.0, 0), (1.0, 100)], 100.0),
        ([(0.0, 0), (1.0, 100), (2.0, 500), (3.0, 600)], 400.0),
        ([(0.0, 0), (0.5, 100), (1.0, 500), (1.5, 900), (2.0, 1000)], 800.0),
        ([(0.0, 0), (0.5, 0), (1.1, 0), (4.0, 800)], 275.86),
    ],
    ids=["no data", "too short", "one window", "a burst", "between windows", "late"],
)
def test_the_max_rate_is_that_of_the_fastest_window(samples: RateSamples, expected: float | None) -> None:
    """Only windows of at least one second count."""
    meter = ThroughputMeter(window_s=1.0)
    for now, total in samples:
        meter.add(now, total)
    assert expected == (None if meter.max_bytes_per_s is None else round(meter.max_bytes_per_s, 2))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], 0.0),
        ([(0.0, 0)], 0.0),
        ([(0.0, 0), (0.25, 100)], 400.0),
        ([(0.0, 0), (1.0, 100), (2.0, 500)], 400.0),
        ([(0.0, 0), (0.5, 400), (1.0, 400)], 400.0),
        ([(0.0, 0), (1.0, 2000), (2.0, 2000), (10.0, 2000)], 0.0),
        ([(0.0, 0), (1.0, 2000), (9.0, 2000), (9.5, 2100), (10.0, 2300)], 300.0),
    ],
    ids=["no data", "just started", "too short", "steady", "one window", "silent", "again"],
)
def test_the_current_rate_covers_the_last_second(samples: RateSamples, expected: float) -> None:
    """A silent source has rate 0. In the first second, the rate is the mean so far."""
    meter = ThroughputMeter(window_s=1.0)
    for now, total in samples:
        meter.add(now, total)
    assert expected == meter.bytes_per_s


@pytest.mark.parametrize(
    ("samples", "nbytes", "seconds", "expected"),
    [
        ([(0.0, 0), (1.0, 400), (2.0, 500)], 500, 2.0, 0.625),
        ([(0.0, 0), (0.5, 400)], 400, 0.5, None),
        ([(0.0, 0), (1.0, 400)], 400, 0.0, None),
    ],
    ids=["measured", "too short", "zero duration"],
)
def test_efficiency_compares_mean_and_maximum_rate(
    samples: RateSamples, nbytes: int, seconds: float, expected: float | None
) -> None:
    """It is None unless both are known."""
    meter = ThroughputMeter(window_s=1.0)
    for now, total in samples:
        meter.add(now, total)
    assert expected == meter.efficiency(nbytes, seconds)


@pytest.mark.parametrize(
    ("samples", "current", "maximum"),
    [
        ([(0.0, {})], {}, {}),
        ([(0.0, {}), (0.5, {"a": 100})], {"a": 200.0}, {}),
        (
            [(0.0, {}), (1.0, {"a": 100}), (2.0, {"a": 500, "b": 300})],
            {"a": 400.0, "b": 300.0},
            {"a": 400.0, "b": 300.0},
        ),
        ([(0.0, {}), (1.0, {"a": 900}), (2.0, {"a": 900, "b": 300})], {"b": 300.0}, {"a": 900.0, "b": 300.0}),
        ([(0.0, {"a": 7}), (1.0, {"a": 7})], {}, {}),
    ],
    ids=["no data", "too short", "two", "sequential", "silent"],
)
def test_rates_by_source_use_the_same_windows(
    samples: SourceSamples, current: dict[str, float], maximum: dict[str, float]
) -> None:
    """A source without current traffic keeps only its maximum rate."""
    meter = ThroughputMeter(window_s=1.0)
    for now, by_source in samples:
        meter.add(now, sum(by_source.values()), by_source)
    assert current == meter.source_bytes_per_s
    assert maximum == meter.max_source_bytes_per_s


def test_a_loader_has_no_rate() -> None:
    """Its bytes are all counted in one moment."""
    assert {"a": 1, "snapshot:file:///s": 2} == measurable_bytes({"a": 1, "snapshot:file:///s": 2, "loader:": 3})


def test_only_the_fastest_sources_are_reported() -> None:
    """Rates are integers in bytes per second, and their number is limited by the message format."""
    rates = top_rates({f"s{number}": number + 0.4 for number in range(100)})
    assert 64 == len(rates)
    assert ("s99", 99.0) == next(iter(rates.items()))
    assert "s36" == list(rates)[-1]
