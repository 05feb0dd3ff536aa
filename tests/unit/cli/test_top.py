"""`rfork top`: what it shows of a fleet, how that fits, and what it does when the planner is gone."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from rfork.cli.fleet_queries import FleetState
from rfork.cli.top.command import is_quit_key, line_of
from rfork.cli.top.overview import overview
from rfork.cli.top.poller import FleetSample, pause_after
from rfork.cli.top.render import Screen, rows_for
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
        instance("liar", host="node-3", quarantined="it sent wrong bytes"),
        instance("mute", host="node-4", age_s=15.0),
    ),
    forks=(
        running_fork(source_rate_limits={SEED: 30_000_000}),
        finished_fork(instance_id=RELAY, age_s=30.0),
        finished_fork(
            fork_id="f3", instance_id="mute", outcome="fallback", reasons=("SourceUnavailable: x", "NoSource: y")
        ),
    ),
)


def screen(width: int, height: int, sample: FleetSample | None = None, now: float = 100.0) -> list[str]:
    """The lines of the picture on a terminal of this size."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(Screen(sample or FleetSample(FLEET, at=100.0), URL, now, keys=True), height=height)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [3, 8, 12, 24, 60])
def test_it_fits_any_terminal(width: int, height: int) -> None:
    """No line is longer, and there are no more of them, than the terminal has room for."""
    lines = screen(width, height)
    assert (True, True) == (len(lines) <= height, all(len(line) <= width for line in lines))


def test_what_it_shows() -> None:
    """Forks under way with rate, time left, sources and phase; trouble, givers, ended forks and fallbacks."""
    text = "\n".join(screen(160, 60))
    expected = [
        "5 instances on 5 hosts, 1 fork under way at 1.00 GB/s", "forks under way (1)", " 50 %", "1.00 GB/s",
        "2.00 s", "transfer", "aaaaaaaa (http)", "30.00 MB/s", "in trouble (3)",
        "quarantined: it sent wrong bytes", "silent for 15 s", "draining, nobody reads from it",
        "models (2)", "8.00 s", "givers (3)", "1 of 4", "ended (2)", "NoSource: y", "fallbacks because of",
        "q quits", URL,
    ]  # fmt: skip
    assert [] == [word for word in expected if word not in text]


def test_a_rollout_shows_each_version() -> None:
    """Two versions of a model are two rows, and forks, givers and ended forks name theirs."""
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
    assert {"first of its version": 1} == overview(seen).fallbacks
    assert (new, old) == (overview(seen).running[0].version, overview(seen).models[0].version)


def test_what_each_source_gives() -> None:
    """Of several sources of a fork each with its rate, as told; a giver has those of its readers."""
    reported_rates = {SEED: 6e8, RELAY: 4e8}
    fork = running_fork(sources={SEED: GB, RELAY: GB}, rates=reported_rates)
    other = running_fork(fork_id="f9", instance_id="d" * 32, rates={SEED: 2e8})
    seen = FleetState(instances=(instance(SEED), instance(RELAY), instance(TARGET)), forks=(fork, other))
    assert ([reported_rates, {SEED: 2e8}], {SEED: 8e8, RELAY: 4e8, TARGET: 0}) == (
        [each.source_bytes_per_s for each in overview(seen).running],
        {source.instance_id: source.bytes_per_s for source in overview(seen).sources_serving},
    )
    text = "\n".join(screen(160, 60, FleetSample(seen, 100.0)))
    expected = ["aaaaaaaa (http) 600.0 MB/s, bbbbbbbb 400.0 MB/s", "aaaaaaaa (http)  ", "800.0 MB/s"]
    assert [] == [word for word in expected if word not in text]


def test_an_empty_fleet_says_what_to_do() -> None:
    """Where nobody is registered there is a next step."""
    assert "start one with `rfork seed MODEL_DIR`" in "\n".join(screen(80, 24, FleetSample(FleetState(), 1.0)))


def test_a_planner_that_is_gone_is_said() -> None:
    """What was seen last stays, below a line that says since when and why."""
    lines = screen(160, 24, FleetSample(FLEET, 100.0, error="it cannot be reached", away_since=100.0), now=112.0)
    assert (True, True) == (
        lines[1].startswith("gone since 12 s") and "it cannot be reached" in lines[1],
        any("forks under way (1)" in line for line in lines),
    )


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
def test_room_is_shared(requested_rows: list[int], height: int, rows: list[int]) -> None:
    """The first sections have a few rows each before another has more; none is cut where there is room."""
    assert rows == rows_for(requested_rows, height)


def test_json_of_a_look() -> None:
    """One line has these fields; the models are as `/v1/models` tells them."""
    line = json.loads(json.dumps(line_of(FleetSample(FLEET, 100.0), URL)))
    assert {
        "at", "planner", "error", "instances", "hosts", "bytes_per_s", "models", "going", "troubles",
        "givers", "ended", "fallbacks",
    } == set(line)  # fmt: skip
    assert (None, 5, {"NoSource": 1}, "llama") == (
        line["error"], line["instances"], line["fallbacks"], line["models"][0]["model"],
    )  # fmt: skip
    assert {
        "fork_id", "instance_id", "host", "model", "version", "rank", "phase", "share", "bytes_per_s",
        "eta_s", "seconds", "sources", "source_bytes_per_s", "transports", "held", "reason",
    } == set(line["going"][0])  # fmt: skip


def test_urgent_things_first() -> None:
    """Whoever has most readers stands first among those that give, and the last ended among the ended."""
    seen = overview(FLEET)
    assert ([SEED, "liar", "mute"], ["f3", "f1"]) == (
        [source.instance_id for source in seen.sources_serving],
        [fork.fork_id for fork in seen.finished],
    )


@pytest.mark.parametrize(
    ("typed", "ends"),
    [("", False), ("q", True), ("Q", True), ("\x1b", True), ("\x1b[A", False), ("x", False), ("xq", True)],
)
def test_keys_that_end_it(typed: str, ends: bool) -> None:
    """q and Escape do; an arrow, which begins as Escape does, does not."""
    assert ends == is_quit_key(typed)


@pytest.mark.parametrize(("elapsed_s", "pause_s"), [(0.01, 0.99), (0.5, 2.0)])
def test_a_busy_planner_is_asked_less_often(elapsed_s: float, pause_s: float) -> None:
    """A look is followed by a pause of four times what it took, if that is longer than the interval."""
    assert pause_s == pause_after(elapsed_s, 1.0)
