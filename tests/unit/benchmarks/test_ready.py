"""`benchmarks.ready`: phases of a start, and the figures of its table."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ready.cases import COLD, FORK, OPEN, PREFETCH, RESTART, SHAPED, START_UP, WARM, ReadyCase, cases_of
from benchmarks.ready.lab import LOADS
from benchmarks.ready.phases import PHASES, Mark, Phase, Start, marks_of, start_of
from benchmarks.ready.table import figures, floor_s, limit_row, row
from benchmarks.ready.timeline import draw
from rfork.errors import RforkError

WORKER, HOLDER = 7, 8
LOADED = (
    Mark("imported", 1, 100.0, 103.0),
    Mark("imported", WORKER, 104.0, 108.0),
    Mark("build", WORKER, 110.5, 111.0),
    Mark("load", WORKER, 110.0, 114.0),
)
FORKED = (
    Mark("imported", WORKER, 104.0, 108.0),
    Mark("build", WORKER, 110.5, 111.0),
    Mark(
        "fork",
        WORKER,
        111.5,
        113.5,
        phases={"resume": 0.3, "capture": 0.25, "plan": 0.25, "transfer": 1.0, "offer": 0.25},
        sources=[["seed", "http", 100]],
        bytes=100,
    ),
    Mark("load", WORKER, 110.0, 114.0),
)
PREFETCHED = (Mark("fork", HOLDER, 102.0, 109.0, bytes=100), *FORKED)


def start(marks: tuple[Mark, ...]) -> Start:
    return start_of(marks, 100.0, 115.0, 115.5, " Paris")


def test_marks_are_found_in_a_log() -> None:
    """Engines put a prefix in front of the lines of their workers."""
    values = {"name": "load", "pid": WORKER, "began": 1.0, "ended": 2.0}
    log = f"INFO starting\n(Worker pid=7) MARK {json.dumps(values)}\nMARKED\n"
    assert [Mark("load", WORKER, 1.0, 2.0)] == marks_of(log)


def test_phases_of_the_engines_own_loader() -> None:
    """Everything in the load but the build counts as weights."""
    expected = [
        Phase("imports", 0, 8),
        Phase("init", 8, 10),
        Phase("load", 10, 10.5),
        Phase("build", 10.5, 11),
        Phase("load", 11, 14),
        Phase("warm-up", 14, 15),
        Phase("token", 15, 15.5),
    ]
    assert expected == start(LOADED).phases


def test_phases_of_a_fork() -> None:
    """Those of its report follow each other from its start; `resume` is concurrent with the transfer."""
    expected = [
        Phase("imports", 0, 8),
        Phase("init", 8, 10),
        Phase("checks", 10, 10.5),
        Phase("build", 10.5, 11),
        Phase("checks", 11, 11.5),
        Phase("capture", 11.5, 11.75),
        Phase("plan", 11.75, 12),
        Phase("transfer", 12, 13),
        Phase("load", 13, 13.25),
        Phase("finish", 13.25, 14),
        Phase("warm-up", 14, 15),
        Phase("token", 15, 15.5),
    ]
    assert expected == start(FORKED).phases


@pytest.mark.parametrize("marks", [LOADED, FORKED], ids=["own loader", "fork"])
def test_the_seconds_of_weights_leave_out_the_build(marks: tuple[Mark, ...]) -> None:
    """The engine builds the model without weights too."""
    assert start(marks).weights_s == 3.5


def test_the_phases_add_up_to_the_first_token() -> None:
    """No second is counted twice or left out."""
    assert math.isclose(15.5, sum(phase.seconds for phase in start(FORKED).phases))


def test_a_fetch_by_a_holder_is_no_phase_of_the_engine() -> None:
    """It is concurrent with the start."""
    assert Phase("fetch", 2, 9) == start(PREFETCHED).fetched
    assert start(FORKED).phases == start(PREFETCHED).phases


def test_the_sources_of_the_engines_fork_are_named() -> None:
    """Host and transport show whether the weights were mapped."""
    assert start(PREFETCHED).sources == "seed (http)"


def test_a_log_without_a_load_is_an_error() -> None:
    """The marks have to match the engine's version."""
    with pytest.raises(RforkError, match="no mark of a load"):
        start(LOADED[:3])


def timed(first_token_s: float, weights_s: float = 1.0) -> Start:
    return Start(first_token_s, [Phase("load", 0, weights_s), Phase("imports", weights_s, first_token_s)], "")


def case(name: str, link: object = None) -> ReadyCase:
    return next(each for each in cases_of("vllm", [SHAPED, OPEN]) if (each.name, each.link) == (name, link))


@pytest.mark.parametrize(("link_s", "expected"), [(12.0, 30.0), (40.0, 40.0)], ids=["start-up", "transfer"])
def test_the_floor_is_the_larger_of_start_up_and_transfer(link_s: float, expected: float) -> None:
    """Neither can be faster than it is alone."""
    starts = {case(START_UP): [timed(30.0)]}
    assert expected == floor_s(case(FORK, SHAPED), starts, {SHAPED: [link_s]})


def test_rows_without_a_link_are_compared_with_the_start_up() -> None:
    """Their weights come from the same host."""
    assert floor_s(case(COLD), {case(START_UP): [timed(30.0)]}, {SHAPED: [40.0]}) == 30.0


def test_figures_of_one_engine() -> None:
    """The start with prefetch relative to the floor of its link, and the weights of a restart to a warm load."""
    starts = {
        case(START_UP): [timed(30.0)],
        case(WARM): [timed(34.0, 4.0)],
        case(PREFETCH, SHAPED): [timed(33.0)],
        case(PREFETCH, OPEN): [timed(31.5)],
        case(RESTART): [timed(30.5, 0.5)],
    }
    expected = {
        "ready_vs_floor": 1.1,
        "ready_vs_floor_vllm": 1.1,
        "ready_restart_weights": 0.125,
        "ready_restart_weights_vllm": 0.125,
    }
    assert expected == figures(starts, {SHAPED: [12.0], OPEN: [1.0]})


def test_there_are_no_figures_without_their_rows() -> None:
    """Holders may be missing."""
    assert {} == figures({case(START_UP): [timed(30.0)], case(WARM): [timed(34.0)]}, {SHAPED: [12.0]})


def test_a_row_has_the_phases_of_the_median_start() -> None:
    """Medians of each phase alone would not add up."""
    shown = row(case(WARM), [timed(30.0, 5.0), timed(20.0, 1.0), timed(25.0, 2.0)], 20.0)
    assert shown["first token s"] == 25.0
    assert shown["/ floor"] == 1.25
    assert shown["imports"] == 23.0


def test_a_transfer_alone_has_no_phases() -> None:
    """It is a limit, not a start."""
    assert limit_row(SHAPED, [12.0])["first token s"] == 12.0


def test_every_case_has_its_own_name() -> None:
    """Results are stored by name."""
    cases = [each.key for engine in ("vllm", "sglang") for each in cases_of(engine, [SHAPED, OPEN])]
    assert len(set(cases)) == len(cases)


def test_the_timeline_is_drawn(tmp_path: Path) -> None:
    """All phases have a colour."""
    pytest.importorskip("matplotlib")
    every = Start(12.0, [Phase(name, at, at + 1.0) for at, name in enumerate(PHASES)], "", Phase("fetch", 1.0, 9.0))
    draw(tmp_path / "ready.svg", "title", {"all": every}, {"transfer alone": 11.0})
    assert "<svg" in (tmp_path / "ready.svg").read_text()


MODULE = "def get_model(folder):\n    return folder\n"


def test_marks_are_printed_for_the_calls_of_an_engine(tmp_path: Path) -> None:
    """The engine's functions return what they returned before; the first mark is printed when the load begins."""
    package = tmp_path / "vllm" / "v1" / "worker"
    package.mkdir(parents=True)
    (package / "cpu_model_runner.py").write_text(MODULE)
    marks = Path(__file__).parents[3] / "benchmarks" / "ready" / "start_marks"
    code = "from vllm.v1.worker.cpu_model_runner import get_model; print(get_model('folder'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{marks}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ["loads", "load"] == [mark.name for mark in marks_of(done.stderr)]
    assert LOADS in done.stderr.splitlines()[0]
    assert "folder" in done.stdout.splitlines()
