"""The fork report: its summary line and its JSON."""

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
