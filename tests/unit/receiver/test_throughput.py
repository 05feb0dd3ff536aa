"""ThroughputMeter: current rates, peak rates and the efficiency of the transfer."""

from __future__ import annotations

import pytest

from rfork.receiver.throughput import ThroughputMeter, measurable_bytes, top_rates

RateSamples = list[tuple[float, int]]


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
def test_the_peak_rate(samples: RateSamples, expected: float | None) -> None:
    """It is the fastest of all windows of at least one second."""
    meter = ThroughputMeter(window_s=1.0)
    for now, total in samples:
        meter.add(now, total)
    assert expected == (None if meter.best is None else round(meter.best, 2))


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
def test_the_current_rate(samples: RateSamples, expected: float) -> None:
    """It covers the last second, so a silent source has rate 0; before that, it is the mean so far."""
    meter = ThroughputMeter(window_s=1.0)
    for now, total in samples:
        meter.add(now, total)
    assert expected == meter.last


@pytest.mark.parametrize(
    ("samples", "nbytes", "seconds", "expected"),
    [
        ([(0.0, 0), (1.0, 400), (2.0, 500)], 500, 2.0, 0.625),
        ([(0.0, 0), (0.5, 400)], 400, 0.5, None),
        ([(0.0, 0), (1.0, 400)], 400, 0.0, None),
    ],
    ids=["measured", "too short", "zero duration"],
)
def test_efficiency_compares_mean_and_peak_rate(
    samples: RateSamples, nbytes: int, seconds: float, expected: float | None
) -> None:
    """It is None unless both are known."""
    meter = ThroughputMeter(window_s=1.0)
    for now, total in samples:
        meter.add(now, total)
    assert expected == meter.efficiency(nbytes, seconds)


SourceSamples = list[tuple[float, dict[str, int]]]


@pytest.mark.parametrize(
    ("samples", "now", "best"),
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
def test_rates_by_source(samples: SourceSamples, now: dict[str, float], best: dict[str, float]) -> None:
    """They use the same windows as the total rate; a source without current traffic keeps only its peak rate."""
    meter = ThroughputMeter(window_s=1.0)
    for at, sources in samples:
        meter.add(at, sum(sources.values()), sources)
    assert (now, best) == (meter.last_sources, meter.best_sources)


def test_a_loader_has_no_rate() -> None:
    """Its bytes are all counted in one moment."""
    assert {"a": 1, "snapshot:file:///s": 2} == measurable_bytes({"a": 1, "snapshot:file:///s": 2, "loader:": 3})


def test_only_the_fastest_sources_are_reported() -> None:
    """Rates are integers in bytes per second, and their number is limited by the message format."""
    rates = top_rates({f"s{number}": number + 0.4 for number in range(100)})
    assert (64, ("s99", 99.0), "s36") == (len(rates), next(iter(rates.items())), list(rates)[-1])
