"""Steps of `make gpu-first`, `gpu-second` and `gpu-third`: their commands, time limits, states and summary.

Pure, except that a step's result is read from its files. Uses only the standard library.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from benchmarks.gpu.packages import ROOT

State = Literal[
    "waiting", "running", "passed", "skipped", "failed", "timed out", "interrupted", "unavailable", "not run"
]
FAILURES: Final[frozenset[State]] = frozenset({"failed", "timed out", "interrupted", "not run"})
END_S: Final = 5.0
"""Seconds in which a process ends after a signal."""
MIN_STEP_S: Final = 15.0
"""A step starts only if it has at least this time, or its limit if that is shorter."""
INSTALL_S: Final = 60.0
PYTEST_OPTIONS: Final = (
    "-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "--import-mode=importlib",
    "-W", "default", "-p", "no:cacheprovider", "-v", "--durations=5",
)  # fmt: skip
"""Without this repository's configuration, which needs packages that an image lacks; torch may warn at import there."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """Python and device of a step, and its result file, `json`."""

    python: str
    device: str
    json: Path


@dataclass(frozen=True, slots=True)
class Step:
    """A process with a time limit. Without one of the `modules`, the `program` or the entry point of rfork in the group
    `plugin` that it needs, it is not run.
    """

    name: str
    title: str
    limit_s: float
    command: Callable[[StepContext], list[str]]
    modules: tuple[str, ...] = ()
    program: str = ""
    plugin: str = ""
    needs_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps in the order in which they run, most instructive first, and the time limit for all of them."""

    name: str
    limit_s: float
    steps: tuple[Step, ...]
    installs_loaders: bool = False
    """True if the loaders that benchmarks compare are installed too."""


def run_module(name: str, *arguments: str) -> Callable[[StepContext], list[str]]:
    """Return the command of a module of this package."""

    def command(context: StepContext) -> list[str]:
        options = ["--device", context.device, "--json", str(context.json)]
        return [context.python, "-m", f"benchmarks.gpu.{name}", *arguments, *options]

    return command


def run_tests(*files: str) -> Callable[[StepContext], list[str]]:
    """Return the command of test files."""

    def command(context: StepContext) -> list[str]:
        results = ["-p", "benchmarks.gpu.pytest_results", "--results", str(context.json)]
        return [context.python, "-m", "pytest", *PYTEST_OPTIONS, *results, *files]

    return command


def doctor(context: StepContext) -> list[str]:
    """Return the command of `rfork doctor`."""
    return [context.python, "-m", "rfork", "doctor"]


def sanitize(context: StepContext) -> list[str]:
    """Return the command that checks the memory accesses of the digest and gather kernels."""
    return ["compute-sanitizer", "--error-exitcode", "9", *run_tests("tests/gpu/test_digest_gpu.py")(context)]


def engine_tests(engine: str, *variables: str) -> Callable[[StepContext], list[str]]:
    """Return the command of the tests of an engine's servers, with the engine of this Python."""

    def command(context: StepContext) -> list[str]:
        results = ["-p", "benchmarks.gpu.pytest_results", "--results", str(context.json)]
        python = f"RFORK_TEST_{engine.upper()}_PYTHON={context.python}"
        pytest = [context.python, "-m", "pytest", "-m", "engines", *results]
        return ["env", python, *variables, *pytest, f"tests/engines/test_{engine}.py"]

    return command


FIRST: Final = Stage(
    "first",
    570.0,
    (
        Step("versions", "versions, driver, devices", 30, run_module("versions")),
        Step("doctor", "rfork doctor", 20, doctor),
        Step("compile", "digest kernel: time to compile", 45, run_module("micro", "compile")),
        Step("digest", "digest kernel: correct hashes", 45, run_tests("tests/gpu/test_digest_gpu.py")),
        Step("cuda_ipc", "CUDA IPC between processes", 90, run_tests("tests/gpu/test_cuda_ipc.py")),
        Step("staging", "pinned staging, http", 40, run_tests("tests/gpu/test_staging_gpu.py")),
        Step("storage", "reading storage", 40, run_tests("tests/gpu/test_storage_io_gpu.py")),
        Step("capture", "graph capture in global mode", 50, run_tests("tests/gpu/test_capture_gpu.py")),
        Step(
            "micro", "memory, digest and copies against limits", 70, run_module("micro", "memory", "digest", "copies")
        ),
        Step("contexts", "contexts of one process", 15, run_module("micro", "contexts")),
        Step("completeness", "complete images", 15, run_tests("tests/gpu/test_completeness_gpu.py")),
        Step("nccl", "NCCL groups", 45, run_tests("tests/gpu/test_nccl.py")),
    ),
)
SECOND: Final = Stage(
    "second",
    570.0,
    (
        Step("probes", "driver compared with the tests' fake", 75, run_module("probes")),
        Step("pull", "pull, quick form", 170, run_module("pull", "--quick")),
        Step("disturb", "disturb, quick form", 160, run_module("disturb", "--quick")),
        Step("sanitizer", "compute-sanitizer, kernels", 100, sanitize, program="compute-sanitizer", needs_gpu=True),
    ),
    installs_loaders=True,
)
THIRD: Final = Stage(
    "third",
    3600.0,
    (
        Step("pull", "pull, full form", 900, run_module("pull")),
        Step("disturb", "disturb, full form", 900, run_module("disturb")),
        # Both together exceed the time limit of the stage, but one Python hardly ever has both engines.
        Step(
            "vllm",
            "vLLM's servers",
            1500,
            engine_tests("vllm"),
            modules=("vllm", "hypothesis"),
            plugin="vllm.general_plugins",
            needs_gpu=True,
        ),
        Step(
            "sglang",
            "SGLang's servers",
            1500,
            engine_tests("sglang", "RFORK_TEST_SGLANG_DEVICE=cuda"),
            modules=("sglang", "hypothesis"),
            plugin="sglang.srt.plugins",
            needs_gpu=True,
        ),
    ),
    installs_loaders=True,
)
STAGES: Final[Mapping[str, Stage]] = {stage.name: stage for stage in (FIRST, SECOND, THIRD)}


def time_limit(step: Step, remaining_s: float) -> float | None:
    """Return the seconds that a step may take so that it has ended after `remaining_s`; None: too few to start it."""
    seconds = min(step.limit_s, remaining_s - END_S)
    return seconds if seconds >= min(step.limit_s, MIN_STEP_S) else None


@dataclass(slots=True)
class StepResult:
    """State of a step, its seconds so far, and a note: its tests, or why it failed or did not run."""

    step: Step
    state: State = "waiting"
    seconds: float = 0.0
    note: str = ""


def judged(returncode: int | None, rows: Sequence[Mapping[str, object]], output: str) -> tuple[State, str]:
    """Return state and note of a step that ended, or was ended (None), with these rows of its result file.

    A step of tests passes only if a test ran: all tests are skipped where the hardware is missing.
    """
    outcomes = Counter(str(row["outcome"]) for row in rows if "outcome" in row)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    failed = next((row for row in rows if row.get("outcome") in ("running", "failed")), None)
    if failed is not None:
        counts += f"; {str(failed['test']).rpartition('::')[2]}: {failed['reason'] or failed['outcome']}"
    last_line = (output.strip().splitlines() or ["no output"])[-1]
    if returncode is None:
        return "timed out", counts or last_line
    if returncode:
        return "failed", counts or last_line
    if outcomes and not outcomes["passed"]:
        return "skipped", f"{counts}: {rows[0].get('reason', '')}"
    return "passed", counts


def summary_text(stage: str, results: Sequence[StepResult]) -> str:
    """Return the summary as a table."""
    lines = [f"{'step':<13}{'state':<13}{'seconds':>8}{'limit':>7}  note"]
    for result in results:
        seconds = f"{result.seconds:.1f}" if result.seconds else ""
        text = result.note or result.step.title
        lines.append(f"{result.step.name:<13}{result.state:<13}{seconds:>8}{result.step.limit_s:>7.0f}  {text}")
    return "\n".join([f"gpu-{stage}", *(line.rstrip()[:200] for line in lines)]) + "\n"


def summary_document(stage: str, results: Sequence[StepResult]) -> dict[str, object]:
    """Return the summary as a JSON document."""
    rows = [
        {
            "step": result.step.name,
            "title": result.step.title,
            "state": result.state,
            "seconds": round(result.seconds, 2),
            "limit_s": result.step.limit_s,
            "note": result.note,
        }
        for result in results
    ]
    return {"stage": stage, "rows": rows}


def exit_status(results: Sequence[StepResult]) -> int:
    """Return 1 if any step failed, was ended, or did not run for lack of time."""
    return int(any(result.state in FAILURES for result in results))
