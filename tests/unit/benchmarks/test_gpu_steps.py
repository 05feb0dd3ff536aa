"""`make gpu-first`, `gpu-second` and `gpu-third`: time limits, states of steps, and the summary that remains."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import run, steps
from benchmarks.gpu.packages import ROOT
from benchmarks.gpu.steps import (
    END_S,
    FIRST,
    INSTALL_S,
    MIN_STEP_S,
    SECOND,
    STAGES,
    Stage,
    State,
    Step,
    StepContext,
    StepResult,
    judged,
    time_limit,
)  # fmt: skip


def program(text: str, *, name: str = "step", limit_s: float = 60.0, needs_gpu: bool = False) -> Step:
    """Return a step that runs this program."""
    return Step(name, "a step", limit_s, lambda _: [sys.executable, "-c", text], needs_gpu=needs_gpu)


HANGS = "import signal; print('half', flush=True); signal.pause()"


@pytest.mark.parametrize("stage", [FIRST, SECOND], ids=lambda stage: stage.name)
def test_the_first_stages_end_within_ten_minutes(stage: Stage) -> None:
    """The time limit includes the installation, and the time that the last process has to end twice."""
    assert stage.limit_s + 2 * END_S <= 600
    assert INSTALL_S + max(step.limit_s for step in stage.steps) < stage.limit_s


def test_nccl_is_the_last_of_the_first_steps() -> None:
    """NCCL is the step that hangs most likely."""
    assert "nccl" == FIRST.steps[-1].name
    assert 45 == FIRST.steps[-1].limit_s


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_every_file_of_a_step_exists(stage: Stage) -> None:
    """Commands name test files and modules of this repository."""
    for step in stage.steps:
        command = step.command(StepContext("python", "cuda", Path("result.json")))
        for argument in command:
            if argument.startswith("tests/"):
                assert (ROOT / argument).exists()
        if command[1:2] == ["-m"] and command[2].startswith("benchmarks."):
            module = ROOT / command[2].replace(".", "/")
            assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()


@pytest.mark.parametrize(
    ("limit_s", "remaining_s", "expected"),
    [(60, 600, 60), (60, 50, 50 - END_S), (60, MIN_STEP_S, None), (10, 10 + END_S, 10), (10, 9 + END_S, None)],
)
def test_a_step_has_the_time_that_is_left(limit_s: float, remaining_s: float, expected: float | None) -> None:
    """A step starts only if it has enough time."""
    assert expected == time_limit(program("", limit_s=limit_s), remaining_s)


PASSED, FAILED = (
    {"test": "a::one", "outcome": "passed", "reason": ""},
    {"test": "a::two", "outcome": "failed", "reason": "E"},
)
SKIPPED, RUNNING = (
    {"test": "a::b", "outcome": "skipped", "reason": "no GPU"},
    {"test": "a::c", "outcome": "running", "reason": ""},
)


@pytest.mark.parametrize(
    ("returncode", "rows", "expected", "note"),
    [
        (0, [], "passed", ""),
        (0, [PASSED, SKIPPED], "passed", "1 passed, 1 skipped"),
        (0, [SKIPPED], "skipped", "1 skipped: no GPU"),
        (1, [PASSED, FAILED], "failed", "1 passed, 1 failed; two: E"),
        (1, [], "failed", "last line"),
        (None, [PASSED, RUNNING], "timed out", "1 passed, 1 running; c: running"),
        (-11, [RUNNING], "failed", "1 running; c: running"),
    ],
)
def test_a_step_is_judged(
    returncode: int | None, rows: Sequence[Mapping[str, str]], expected: State, note: str
) -> None:
    """A step passes only if no test failed and at least one ran."""
    assert (expected, note) == judged(returncode, rows, "first line\nlast line\n")


def test_a_failing_or_hanging_step_does_not_stop_the_next(tmp_path: Path) -> None:
    """Every step has its own result; the exit status reports that one failed."""
    stage = Stage(
        "test",
        600.0,
        (
            program("print('broken'); raise SystemExit(3)", name="fails"),
            program(HANGS, name="hangs", limit_s=0.2),
            program("", name="gpu", needs_gpu=True),
            program("print('done')", name="works"),
        ),
    )
    assert 1 == run.run_stage(stage, sys.executable, "cpu", tmp_path, time.monotonic() + 600)
    summary = json.loads((tmp_path / "summary.json").read_text())
    states = {row["step"]: row["state"] for row in summary["rows"]}
    assert {"fails": "failed", "hangs": "timed out", "gpu": "unavailable", "works": "passed"} == states
    assert "broken\n" == (tmp_path / "fails.txt").read_text()
    assert "timed out" in (tmp_path / "summary.txt").read_text()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_servers_of_each_engine_are_tested(engine: str) -> None:
    """The third stage runs the tests of both engines, each with the Python of the machine."""
    (step,) = (step for step in steps.THIRD.steps if step.name == engine)
    command = step.command(StepContext("/image/python", "cuda", Path("result.json")))
    assert f"RFORK_TEST_{engine.upper()}_PYTHON=/image/python" in command
    assert f"tests/engines/test_{engine}.py" == command[-1]


@pytest.mark.parametrize(("group", "expected"), [("sglang.srt.plugins", True), ("no.such.group", False)])
def test_a_plugin_that_is_not_installed_is_found(group: str, expected: bool) -> None:
    """An engine step needs rfork's entry point, not only its modules."""
    assert expected == run.has_plugin(sys.executable, group)


def test_an_engine_step_without_the_engine_names_it() -> None:
    """The reason is in the summary."""
    step = Step("sglang", "", 60, lambda _: [], modules=("no_such_engine",), plugin="sglang.srt.plugins")
    context = StepContext(sys.executable, "cuda", Path("result.json"))
    assert "not installed: no_such_engine" == run.unavailable_reason(step, context)


def test_an_engine_step_without_the_plugin_names_the_command() -> None:
    """The reason is the command that installs it."""
    step = Step("sglang", "", 60, lambda _: [], plugin="no.such.group")
    context = StepContext(sys.executable, "cuda", Path("result.json"))
    assert "pip install --no-deps --editable" in run.unavailable_reason(step, context)


def test_without_time_the_remaining_steps_are_not_run(tmp_path: Path) -> None:
    """They are in the summary, and the exit status reports them."""
    assert 1 == run.run_stage(Stage("test", 1.0, (program(""),)), sys.executable, "cpu", tmp_path, time.monotonic())
    assert "not run" == json.loads((tmp_path / "summary.json").read_text())["rows"][0]["state"]


def test_an_interrupt_leaves_the_results(tmp_path: Path) -> None:
    """SIGTERM ends the step that runs; its output and the summary remain."""
    text = (
        "import sys, time; from pathlib import Path; from benchmarks.gpu import run; "
        "from tests.unit.benchmarks.test_gpu_steps import HANGS, program; from benchmarks.gpu.steps import Stage; "
        "stage = Stage('test', 600.0, (program(HANGS, name='hangs'), program('', name='next'))); "
        "sys.exit(run.run_stage(stage, sys.executable, 'cpu', Path(sys.argv[1]), time.monotonic() + 600))"
    )
    process = subprocess.Popen([sys.executable, "-c", text, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline().startswith("hangs:")
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert 1 == process.wait()
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert ["interrupted", "not run"] == [row["state"] for row in rows]


def test_an_interrupt_while_a_process_starts_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal at the moment in which the process exists, but is not known yet, leaves none behind."""
    started: list[subprocess.Popen[bytes]] = []

    class InterruptedStart(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", InterruptedStart)
    stage = Stage("test", 600.0, (program(HANGS, name="hangs"),))
    assert 1 == run.run_stage(stage, sys.executable, "cpu", tmp_path, time.monotonic() + 600)
    assert -signal.SIGTERM == started[0].returncode


def test_the_summary_has_one_line_for_each_step() -> None:
    """It names what failed."""
    results = [StepResult(program("", name="a"), "passed", 1.23, "2 passed"), StepResult(program("", name="b"))]
    lines = steps.summary_text("first", results).splitlines()
    assert ["gpu-first", "step"] == [lines[0], lines[1].split()[0]]
    assert ["a", "passed", "1.2", "60", "2", "passed"] == lines[2].split()
    assert "b" == lines[3].split()[0]
