"""The fork report: its line and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

from rfork.fork.report import ForkReport, SourceShare, Stopwatch

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
    FORKED, outcome="fallback", fallback="checkpoint /m", reasons=("SourceGone: a", "NoSource: b")
)


def test_the_line_of_a_fork() -> None:
    """Size, time, speed, sources, verification, and what was read again."""
    assert (
        "forked 3.000 GB in 2.50 s (2.00 GB/s) from 01234567@node-1 (http); "
        "4/4 chunks verified, 1.5 MB read again" == FORKED.line()
    )


def test_the_line_of_a_fallback() -> None:
    """What was loaded instead, and the reason that decided it."""
    assert "loaded 3.000 GB from checkpoint /m in 2.50 s, because: NoSource: b" == FALLBACK.line()


def test_a_fallback_has_no_transfer_speed() -> None:
    """The speed is that of a fork."""
    assert (2.0, 0.0) == (FORKED.gb_per_s, FALLBACK.gb_per_s)


def test_the_report_is_ready_for_json() -> None:
    """Every value but the live seed, and the speed."""
    values = json.loads(json.dumps(FORKED.to_dict()))
    assert (True, 2.0, "node-1") == ("seed" not in values, values["gb_per_s"], values["sources"][0]["host"])


def test_phases_entered_twice_add_up() -> None:
    """A phase's seconds are all its seconds, also those of one that failed."""
    watch = Stopwatch()
    with watch.phase("plan"):
        pass
    once = watch.phases["plan"]
    with watch.phase("plan"):
        pass
    assert (True, ["plan"]) == (once <= watch.phases["plan"] <= watch.seconds, list(watch.phases))
