"""`make gpu-first`, `gpu-second` and `gpu-third`: for any machine with a GPU and a Python that has torch for CUDA.

`python -m benchmarks.gpu.run first|second|third [STEP…]`, with the image's own Python; STEPs select some. Missing
packages are installed next to it if an index (or `WHEELS=FOLDER`) has them: see `benchmarks.gpu.packages`. Each step
is a process with a time limit: see `benchmarks.gpu.steps`. It leaves its output and its JSON in
`benchmarks/results/MACHINE/STAGE` while it runs, and the summary there is written again after each step. Uses only
the standard library of Python 3.11 or newer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from benchmarks.gpu.packages import ROOT, inspect_python, prepare_venv
from benchmarks.gpu.result_file import write_json, write_text
from benchmarks.gpu.steps import (
    END_S,
    INSTALL_S,
    STAGES,
    Stage,
    Step,
    StepContext,
    StepResult,
    exit_status,
    judged,
    summary_document,
    summary_text,
    time_limit,
)

MIN_PYTHON = (3, 11)
COLUMNS = "180"
TAIL_LINES = 25
"""Lines of a failed step's output that are printed."""
FIND_PLUGIN_SCRIPT = """
import sys
from importlib.metadata import entry_points
sys.exit(not entry_points(group=sys.argv[1], name="rfork"))
"""


def main(arguments: Sequence[str]) -> int:
    """Return the exit status. `DEVICE=cpu` runs everything without a GPU, which proves only that it runs."""
    stage = STAGES.get(arguments[0]) if arguments else None
    unknown = set(arguments[1:]) - {step.name for step in stage.steps} if stage else set()
    if stage is None or unknown:
        print(f"unknown steps: {', '.join(sorted(unknown))}" if stage else __doc__)
        return 2
    if sys.version_info[:2] < MIN_PYTHON:
        python_version = ".".join(map(str, sys.version_info[:2]))
        print(
            f"{sys.executable} is Python {python_version}; Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer is required"
        )
        return 1
    until = time.monotonic() + stage.limit_s
    device = os.environ.get("DEVICE", "cuda")
    if device == "cuda" and not inspect_python(sys.executable).gpus:
        torch_version = inspect_python(sys.executable).torch
        reason = f"torch {torch_version} finds no CUDA device" if torch_version else "it has no torch"
        print(f"{sys.executable}: {reason}; choose another with make PYTHON=/path/to/python")
        return 1
    stage = replace(stage, steps=tuple(step for step in stage.steps if not arguments[1:] or step.name in arguments))
    python = prepare_venv(sys.executable, time.monotonic() + INSTALL_S, loaders=stage.installs_loaders)
    folder = Path(os.environ.get("RESULTS") or ROOT / "benchmarks" / "results" / machine_folder(python))
    return run_stage(stage, python, device, folder / stage.name, until)


def run_stage(stage: Stage, python: str, device: str, folder: Path, until: float) -> int:
    """Run the steps of a stage, which has ended at `until` (monotonic); returns the exit status.

    An interrupt or SIGTERM ends the step that runs; the summary then reports it, and the steps that did not run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = [StepResult(step) for step in stage.steps]
    before = signal.signal(signal.SIGTERM, _interrupt)
    write_summary = partial(_write_summary, stage, results, folder)
    try:
        for result in results:
            context = StepContext(python, device, folder / f"{result.step.name}.json")
            _run_step(result, context, until, write_summary)
    except KeyboardInterrupt:
        for result in results:
            if result.state in ("waiting", "running"):
                result.state = "interrupted" if result.state == "running" else "not run"
    finally:
        write_summary()
        signal.signal(signal.SIGTERM, before)
    print(f"\n{summary_text(stage.name, results)}results: {folder}", flush=True)
    return exit_status(results)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _write_summary(stage: Stage, results: Sequence[StepResult], folder: Path) -> None:
    write_json(folder / "summary.json", summary_document(stage.name, results))
    write_text(folder / "summary.txt", summary_text(stage.name, results))


def _run_step(result: StepResult, context: StepContext, until: float, write_summary: Callable[[], None]) -> None:
    """Run a step and set its result; the summary is written before and after."""
    step, output = result.step, context.json.with_suffix(".txt")
    for path in (context.json, output):  # those of an earlier run
        path.unlink(missing_ok=True)
    limit_s = time_limit(step, until - time.monotonic())
    if reason := unavailable_reason(step, context):
        result.state, result.note = "unavailable", reason
    elif limit_s is None:
        result.state, result.note = "not run", "no time left"
    else:
        result.state = "running"
        write_summary()
        print(f"{step.name}: {step.title} (at most {limit_s:.0f} s)", flush=True)
        began = time.monotonic()
        try:
            returncode = run_process(step.command(context), output, limit_s)
        finally:
            result.seconds = time.monotonic() - began
        text = output.read_text(errors="replace")
        result.state, result.note = judged(returncode, rows_of(context.json), text)
        if result.state not in ("passed", "skipped"):
            print("\n".join(f"    {line}" for line in text.splitlines()[-TAIL_LINES:]))
    write_summary()
    print(f"{step.name}: {result.state}, {result.seconds:.1f} s  {result.note}", flush=True)


def unavailable_reason(step: Step, context: StepContext) -> str:
    """Return why a step cannot run on this machine; "" if it can."""
    if step.needs_gpu and context.device == "cpu":
        return "needs a GPU"
    if step.program and shutil.which(step.program) is None:
        return f"{step.program} is not installed"
    missing = inspect_python(context.python, step.modules).missing if step.modules else ()
    if missing:
        return f"not installed: {', '.join(missing)}"
    if step.plugin and not has_plugin(context.python, step.plugin):
        return f"rfork is not installed: {context.python} -m pip install --no-deps --editable {ROOT}"
    return ""


def has_plugin(python: str, group: str) -> bool:
    """Return True if rfork is installed in this Python with an entry point in this group."""
    command = [python, "-c", FIND_PLUGIN_SCRIPT, group]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0


def rows_of(path: Path) -> list[Mapping[str, object]]:
    """Return the rows of a step's result file; none if it wrote no such file."""
    try:
        return list(json.loads(path.read_text())["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def run_process(command: Sequence[str], output: Path, limit_s: float) -> int | None:
    """Run a command with its output in a file; returns its status, None if it was ended at its time limit.

    It is the leader of a process group, of which no process is left afterwards.
    """
    environment = {**os.environ, "COLUMNS": COLUMNS, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    process: subprocess.Popen[bytes] | None = None
    with output.open("wb") as file:
        try:
            with _interrupts_deferred():  # otherwise the process may have begun, but not be known here
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            return process.wait(limit_s)
        except OSError as error:
            file.write(f"{error}\n".encode())
            return 127
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process is not None:
                _end(process)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT and SIGTERM at the end of the block, not within it."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: received.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def machine_folder(python: str) -> str:
    """Return the folder name of this machine's results."""
    cpu = ""
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            cpu = text.partition(":")[2].strip()
            break
    return folder_name(inspect_python(python).gpus, cpu, len(os.sched_getaffinity(0)))


def folder_name(gpus: Sequence[str], cpu: str, cores: int) -> str:
    """Return GPU, CPU and cores as ``h100-epyc-16core``, ``8xa100-xeon-96core`` or ``epyc-2core``."""
    parts: list[str] = []
    if gpus:
        model = next(re.finditer(r"(?:[RG]TX )?[A-Z]*\d+\w*", gpus[0].upper()), None)
        name = model[0].replace(" ", "").lower() if model else re.sub(r"\W+", "", gpus[0]).lower()
        parts.append(f"{len(gpus)}x{name}" if len(gpus) > 1 else name)
    for word in ("epyc", "xeon", "grace", "neoverse"):
        if word in cpu.lower():
            parts.append(word)
            break
    else:
        parts.append(re.sub(r"\W+", "", cpu.split()[0]).lower() if cpu else "cpu")
    return "-".join([*parts, f"{cores}core"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
