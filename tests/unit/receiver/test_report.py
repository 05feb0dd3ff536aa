"""The fork report, and the rates in it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from rfork.receiver.report import (
    ForkReport,
    ForkTimer,
    SourceShare,
    ThroughputMeter,
    TransferStats,
    build_fork_result,
    measurable_bytes,
    top_rates,
    transports_by_source,
)

FORKED = ForkReport(
    fork_id="f",
    instance_id="i",
    model="m",
    outcome="forked",
    layout_id="l",
    weights_id="w",
    image_bytes=3_000_000_000,
    chunks=4,
    chunks_verified=4,
    seconds=2.5,
    phases={"transfer": 1.5},
    bytes_repeated=1_500_000,
    sources=(SourceShare("0123456789", "node-1", "http", 4, 3_000_000_000),),
)
FALLBACK = replace(
    FORKED, outcome="fallback", fallback="checkpoint /m", reasons=("SourceUnavailable: a", "NoSource: b")
)


def test_the_summary_of_a_fork_is_one_line() -> None:
    """It contains size, duration, speed, sources, verification and repeated bytes."""
    assert (
        "forked 3.000 GB in 2.50 s (2.00 GB/s) from 01234567@node-1 (http); "
        "4/4 chunks verified, 1.5 MB read again" == FORKED.line()
    )


def test_the_summary_of_a_fallback_names_the_reason() -> None:
    """It contains the fallback and the decisive reason."""
    assert "loaded 3.000 GB from checkpoint /m in 2.50 s; reason: NoSource: b" == FALLBACK.line()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"version": "v1", "version_from": "served"},
            "from 01234567@node-1 (http), adopted version v1; 4/4",
        ),
        ({"version": f"files:{'3' * 32}", "first": True}, "(http), first of version files:33333333; 4/4"),
        ({"version": "v1"}, "from 01234567@node-1 (http); 4/4"),
    ],
    ids=["adopted", "first", "own"],
)
def test_the_summary_names_an_unexpected_version(changes: dict[str, Any], words: str) -> None:
    """This is an adopted version, or the first one of its model."""
    assert words in replace(FORKED, **changes).line()


def test_the_summary_of_a_fallback_names_its_version_once() -> None:
    """The version is not repeated if the reason contains it."""
    reason = "NoSource: first of version v2 of model m; 1 instance serves v1"
    first = replace(FALLBACK, version="v2", first=True)
    assert 1 == replace(first, reasons=(reason,)).line().count("first of version v2")
    assert "in 2.50 s, first of version v2; reason: NoSource: b" in first.line()


def test_a_fallback_has_no_transfer_speed() -> None:
    """A speed is reported only for a fork."""
    assert 2.0 == FORKED.gb_per_s
    assert 0.0 == FALLBACK.gb_per_s


def test_the_report_can_be_serialized_as_json() -> None:
    """It contains every value except the live seed, plus the speed."""
    values = json.loads(json.dumps(FORKED.to_dict()))
    assert "seed" not in values
    assert 2.0 == values["gb_per_s"]
    assert "node-1" == values["sources"][0]["host"]


def test_phases_entered_twice_add_up() -> None:
    """The duration of a phase is the sum of all its runs, including failed ones."""
    timer = ForkTimer(60.0)
    with timer.phase("plan"):
        pass
    once = timer.phases["plan"]
    with timer.phase("plan"):
        pass
    assert once <= timer.phases["plan"] <= timer.seconds
    assert ["plan"] == list(timer.phases)


def test_each_second_counts_in_the_innermost_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nested phase comes before the enclosing one and is subtracted from it; the current phase is last."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    timer = ForkTimer(60.0)
    phase_snapshots: list[dict[str, float]] = []
    with timer.phase("capture"):
        now = 1.0
    with timer.phase("transfer"):
        with timer.phase("plan"):
            now = 3.0
            phase_snapshots.append(timer.phases)
        now = 7.0
        phase_snapshots.append(timer.phases)
    now = 8.0
    phase_snapshots.append(timer.phases)
    assert [
        {"capture": 1.0, "transfer": 0.0, "plan": 2.0},
        {"capture": 1.0, "plan": 2.0, "transfer": 4.0},
        {"capture": 1.0, "plan": 2.0, "transfer": 4.0},
    ] == phase_snapshots
    assert ["plan", "transfer", "transfer"] == [list(phases)[-1] for phases in phase_snapshots]


def test_transports_are_reported_for_peers_only() -> None:
    """Storage and resumed chunks have no transport.

    If there are too many peers, those that sent the most bytes are reported.
    """
    peers = [SourceShare(f"p{number}", "h", "http", 1, number) for number in range(70)]
    stored = SourceShare("snapshot:file:///s", "h", "snapshot", 9, 900)
    others = [stored, SourceShare("resume", "h", "resume", 9, 900)]
    transports = transports_by_source([*others, *peers])
    assert 64 == len(transports)
    assert "p69" == next(iter(transports))
    assert {"http"} == set(transports.values())


def test_a_failed_fork_reports_its_phases() -> None:
    """It also reports the rates of its link and its sources."""
    timer = ForkTimer(60.0)
    with timer.phase("capture"):
        pass
    share = SourceShare("peer-1", "node-1", "http", 1, 5)
    stats = TransferStats(9, 4, 2, (share,), resume_s=0.5)
    meter = ThroughputMeter(window_s=1.0)
    for at, total in ((0.0, 0), (1.0, 7)):
        meter.add(at, total, {"peer-1": min(5, total)})
    finish = build_fork_result("failed", timer, stats, meter, [ValueError("no")], None)
    assert ["resume", "capture"] == list(finish.phases)
    assert {"peer-1": 5.0} == finish.source_bytes_per_s
    assert {"peer-1": "http"} == finish.transports
    assert 4 == finish.bytes_repeated
    assert 2 == finish.replans
    assert 7.0 == finish.link_bytes_per_s
    assert ("ValueError: no",) == finish.reasons


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
