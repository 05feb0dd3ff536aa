"""`make gpu-test` and `make gpu-bench`: for any machine with a GPU and a Python that has torch for CUDA.

`python -m benchmarks.gpu.run test|bench`, with the image's own Python. Missing packages are installed next to
it if an index (or `WHEELS=FOLDER`) has them, and named otherwise; see `benchmarks.gpu.packages`. The
benchmarks run first in their quick form and then in full, for `GPU_BENCH_S` seconds in total (370,
installation included), and leave JSON and text in `benchmarks/results/MACHINE`; the output of one that hit
the limit is in `….partial.txt`. Uses only the standard library of Python 3.11 or newer.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.packages import ROOT, TESTS, base, inspect_python, module_of, name_of, prepare_venv

BENCHMARKS = ("pull", "disturb")
TEST_S, BENCH_S = 170.0, 370.0
"""Seconds from the start, installation included; with twice `END_S` each, to end processes that do not stop,
ten minutes.
"""
INSTALL_S, MIN_REMAINING_S, END_S = 110.0, 60.0, 15.0
MIN_PYTHON = (3, 11)
COLUMNS = "180"
AS_WARNINGS = ("-W", "default")
"""Some images make torch warn at import (about pynvml), which would be an error here and end the run."""
BARE_OPTIONS = ("-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "--import-mode=importlib", "-q")
"""pytest without this repository's configuration, which requires plugins that may be missing."""
IMPORTED = "import importlib.util as u, sys; s = u.spec_from_file_location('it', sys.argv[1]); \
m = u.module_from_spec(s); s.loader.exec_module(m)"


def main(arguments: Sequence[str]) -> int:
    """Return the exit status. `DEVICE=cpu` runs everything without a GPU, which proves only that it runs."""
    if list(arguments) not in (["test"], ["bench"]):
        print("python -m benchmarks.gpu.run test|bench")
        return 2
    if sys.version_info[:2] < MIN_PYTHON:
        python_version = ".".join(map(str, sys.version_info[:2]))
        print(
            f"{sys.executable} is Python {python_version}; Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer is required"
        )
        return 1
    testing = arguments[0] == "test"
    until = time.monotonic() + (TEST_S if testing else float(os.environ.get("GPU_BENCH_S", BENCH_S)))
    device = os.environ.get("DEVICE", "cuda")
    if device == "cuda" and not inspect_python(sys.executable).gpus:
        gpu_names = inspect_python(sys.executable).torch
        reason = f"torch {gpu_names} finds no CUDA device" if gpu_names else "it has no torch"
        print(f"{sys.executable}: {reason}; choose another with make PYTHON=/path/to/python")
        return 1
    installed_by = min(time.monotonic() + INSTALL_S, until - MIN_REMAINING_S)
    python = prepare_venv(sys.executable, installed_by, loaders=not testing)
    return test(python, until) if testing else bench(python, device, until)


def test(python: str, until: float) -> int:
    """Run tests/gpu: all, or the files that can be imported here; ended at `until` (monotonic)."""
    missing = inspect_python(python, [module_of(name_of(line)) for line in [*TESTS, *base()]]).missing
    if not missing:
        command = [python, "-m", "pytest", *AS_WARNINGS, "-q", "-m", "gpu", "tests/gpu"]
        return call(command, until - time.monotonic())
    print(f"missing: {', '.join(missing)}")
    if "pytest" in missing:
        print("pytest is missing, so no test can run")
        return 1
    files = [path for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")) if importable(python, path)]
    if not files:
        return 1
    return call([python, "-m", "pytest", *BARE_OPTIONS, *map(str, files)], until - time.monotonic())


def importable(python: str, path: Path) -> bool:
    """Return True if a test file can be imported; prints what it lacks."""
    done = subprocess.run([python, "-c", IMPORTED, str(path)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(f"{path.relative_to(ROOT)} does not run: {done.stderr.strip().splitlines()[-1]}")
    return done.returncode == 0


def bench(python: str, device: str, until: float) -> int:
    """Run both benchmarks, quick and then in full as far as time allows, until `until` (monotonic)."""
    missing = inspect_python(python, [module_of(name_of(line)) for line in base()]).missing
    if missing:
        print(f"the benchmarks cannot run; missing: {', '.join(missing)}")
        return 1
    folder = Path(os.environ.get("RESULTS") or ROOT / "benchmarks" / "results" / machine_folder(python))
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for quick in (True, False):
        for name in BENCHMARKS:
            file = f"gpu_{name}{'_quick' if quick else ''}"
            left = until - time.monotonic()
            if left < MIN_REMAINING_S:
                print(f"{file}: not run, no time left (GPU_BENCH_S)")
                continue
            command = [python, "-m", f"benchmarks.gpu.{name}", "--device", device]
            command += ["--json", str(folder / f"{file}.json"), *(["--quick"] if quick else [])]
            failed += bool(call(command, left, folder / f"{file}.txt"))
    print(f"results: {folder}")
    return 1 if failed else 0


def call(command: Sequence[str], seconds: float, keep: Path | None = None) -> int:
    """Run a command and all its children for at most `seconds`; returns its status.

    `keep` receives its output; if it fails or is ended, ``….partial.txt`` next to it does.
    """
    environment = {**os.environ, "COLUMNS": COLUMNS, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE if keep else None,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command[1:4])}: ended after more than {seconds:.0f} s")
        _end(process)
        output, _ = process.communicate()  # all writers have ended
    finally:
        _end(process)
    if keep:
        partial = keep.with_suffix(".partial.txt")
        partial.unlink(missing_ok=True)
        (keep if process.returncode == 0 else partial).write_text(output)
        print(output, end="", flush=True)
    return process.returncode


def _end(process: subprocess.Popen[str]) -> None:
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
