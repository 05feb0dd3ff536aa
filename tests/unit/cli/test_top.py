"""`rfork top`: its sections, their layout, and a planner that is unreachable."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from rfork.cli.fleet_queries import FleetState
from rfork.cli.top import is_quit_key, pause_after, sample_to_dict
from rfork.cli.top_screen import FleetSample, Overview, Screen, rows_for
from tests.unit.cli.fleet_builders import (
    GB,
    RELAY,
    SEED,
    TARGET,
    finished_fork,
    instance,
    model,
    running_fork,
)

URL = "http://planner:8700"
FLEET = FleetState(
    models=(model(fork_s=2.0, storage_s=8.0, running=1), model("idle")),
    instances=(
        instance(SEED, readers=("f2",), egress_rate=30_000_000),
        instance(RELAY, state="draining", host="node-1"),
        instance(TARGET, state="loading", host="node-2"),
        instance("corrupt", host="node-3", quarantined="it sent wrong bytes"),
        instance("silent", host="node-4", age_s=15.0),
    ),
    forks=(
        running_fork(source_rate_limits={SEED: 30_000_000}),
        finished_fork(instance_id=RELAY, age_s=30.0),
        finished_fork(
            fork_id="f3", instance_id="silent", outcome="fallback", reasons=("SourceUnavailable: x", "NoSource: y")
        ),
    ),
)


def screen(width: int, height: int, sample: FleetSample | None = None, now: float = 100.0) -> list[str]:
    """Return the lines of the screen on a terminal of this size."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(Screen(sample or FleetSample(FLEET, at=100.0), URL, now, keys=True), height=height)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [3, 8, 12, 24, 60])
def test_the_screen_fits_any_terminal(width: int, height: int) -> None:
    """Lines are at most as long and as many as the terminal allows."""
    lines = screen(width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_the_screen_shows_forks_problems_models_and_sources() -> None:
    """The screen shows running forks, problems, models, sources, finished forks and fallbacks."""
    text = "\n".join(screen(160, 60))
    expected = [
        "5 instances on 5 hosts, 1 running fork at 1.00 GB/s", "running forks (1)", " 50 %", "1.00 GB/s",
        "2.00 s", "transfer", "aaaaaaaa (http)", "30.00 MB/s", "problems (3)",
        "quarantined: it sent wrong bytes", "no report for 15 s", "draining, no readers",
        "models (2)", "8.00 s", "sources (3)", "1 of 4", "finished forks (2)", "NoSource: y", "fallback reasons",
        "q quits", URL,
    ]  # fmt: skip
    assert [] == [each for each in expected if each not in text]


def test_a_rollout_shows_each_version() -> None:
    """Two versions of a model are two rows, and forks and sources show their version."""
    old, new = f"files:91bc01f2{'0' * 24}", "2026-11-23"
    first = finished_fork(
        instance_id=SEED, version=new, outcome="fallback",
        reasons=(f"NoSource: first of version {new} of model llama; 2 instances serve files:91bc01f2",),
    )  # fmt: skip
    seen = FleetState(
        models=(model(version=old, seeds=2), model(version=new, running=1)),
        instances=(instance(SEED, version=new), instance(RELAY, version=old), instance(TARGET, version=new)),
        forks=(running_fork(version=new), first),
    )
    text = "\n".join(screen(200, 60, FleetSample(seen, 100.0)))
    assert 5 == text.count(f" {new}  ")
    assert 2 == text.count("files:91bc01f2  ")
    assert {"first of its version": 1} == Overview(seen).fallbacks
    assert new == Overview(seen).running[0].version
    assert old == Overview(seen).fleet.models[0].version


def test_a_source_has_the_total_rate_of_its_readers() -> None:
    """Each of several sources of a fork has its reported rate; a source has the total of its readers."""
    reported_rates = {SEED: 6e8, RELAY: 4e8}
    fork = running_fork(sources={SEED: GB, RELAY: GB}, rates=reported_rates)
    other = running_fork(fork_id="f9", instance_id="d" * 32, rates={SEED: 2e8})
    seen = FleetState(instances=(instance(SEED), instance(RELAY), instance(TARGET)), forks=(fork, other))
    rows: Any = Overview(seen).to_dict()
    assert [reported_rates, {SEED: 2e8}] == [each["source_bytes_per_s"] for each in rows["running"]]
    rates = {source["instance_id"]: source["bytes_per_s"] for source in rows["sources"]}
    assert {SEED: 8e8, RELAY: 4e8, TARGET: 0} == rates
    text = "\n".join(screen(160, 60, FleetSample(seen, 100.0)))
    expected = ["aaaaaaaa (http) 600.0 MB/s, bbbbbbbb 400.0 MB/s", "aaaaaaaa (http)  ", "800.0 MB/s"]
    assert [] == [each for each in expected if each not in text]


def test_an_empty_fleet_shows_the_next_step() -> None:
    """Without instances the screen names the command that starts one."""
    assert "start one with `rfork seed MODEL_DIR`" in "\n".join(screen(80, 24, FleetSample(FleetState(), 1.0)))


def test_an_unreachable_planner_is_shown_above_the_last_state() -> None:
    """A line has the duration of the outage and the error."""
    lines = screen(160, 24, FleetSample(FLEET, 100.0, error="it cannot be reached", away_since=100.0), now=112.0)
    assert lines[1].startswith("planner unreachable for 12 s")
    assert "it cannot be reached" in lines[1]
    assert any("running forks (1)" in line for line in lines)


@pytest.mark.parametrize(
    ("requested_rows", "height", "rows"),
    [
        ([1, 1], 6, [1, 1]),
        ([9, 9], 3, [0, 0]),
        ([9, 9], 4, [2, 0]),
        ([9, 9], 7, [5, 0]),
        ([9, 9], 8, [2, 2]),
        ([9, 9], 11, [4, 3]),
        ([3, 100], 100, [3, 93]),
        ([], 10, []),
    ],
)
def test_rows_are_distributed_over_sections(requested_rows: list[int], height: int, rows: list[int]) -> None:
    """Each section first gets a few rows, in order; remaining rows are distributed evenly."""
    assert rows == rows_for(requested_rows, height)


def test_a_sample_is_one_json_line() -> None:
    """The JSON line has these fields; models are rows of `/v1/models`."""
    line = json.loads(json.dumps(sample_to_dict(FleetSample(FLEET, 100.0), URL)))
    assert {
        "at", "planner", "error", "instances", "hosts", "bytes_per_s", "models", "running", "problems",
        "sources", "finished", "fallbacks",
    } == set(line)  # fmt: skip
    assert line["error"] is None
    assert 5 == line["instances"]
    assert {"NoSource": 1} == line["fallbacks"]
    assert "llama" == line["models"][0]["model"]
    assert {
        "fork_id", "instance_id", "host", "model", "version", "rank", "phase", "share", "bytes_per_s",
        "eta_s", "seconds", "sources", "source_bytes_per_s", "transports", "rate_limit", "reason",
    } == set(line["running"][0])  # fmt: skip


def test_rows_are_sorted_by_readers_and_time() -> None:
    """Sources with most readers come first, and the forks that finished last."""
    seen = Overview(FLEET)
    assert [SEED, "corrupt", "silent"] == [source.report.instance_id for source in seen.sources]
    assert ["f3", "f1"] == [fork.fork_id for fork in seen.finished]


@pytest.mark.parametrize(
    ("keys_read", "quits"),
    [("", False), ("q", True), ("Q", True), ("\x1b", True), ("\x1b[A", False), ("x", False), ("xq", True)],
)
def test_q_and_escape_quit(keys_read: str, quits: bool) -> None:
    """q and Escape quit; arrow keys, which begin with Escape, do not."""
    assert quits == is_quit_key(keys_read)


@pytest.mark.parametrize(("elapsed_s", "pause_s"), [(0.01, 0.99), (0.5, 2.0)])
def test_a_slow_planner_is_polled_less_often(elapsed_s: float, pause_s: float) -> None:
    """The pause after a poll is at least four times its duration."""
    assert pause_s == pause_after(elapsed_s, 1.0)
