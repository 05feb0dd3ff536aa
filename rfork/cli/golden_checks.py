"""Golden checks of an engine's quantisation methods on this machine, each in a process of its own.

The engine must be installed in the environment that runs the command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Literal

from rfork.diagnostics.result import CheckResult
from rfork.engines.golden_models import CONFIGURATIONS
from rfork.engines.layer_methods import ForkableMethods

Engine = Literal["vllm", "sglang"]
MODULES: Final[Mapping[Engine, str]] = {
    "vllm": "rfork.engines.vllm.methods",
    "sglang": "rfork.engines.sglang.methods",
}
"""Modules with `METHODS`, and a command that prints results; see `rfork.engines.vllm.methods`."""
MORE: Final[Mapping[Engine, tuple[str, ...]]] = {"vllm": ("none+mla", "fp8-block+mla")}
"""Configurations besides those with experts."""
TIMEOUT_S: Final = 600.0
"""Includes the compilation of kernels."""

RunCheck = Callable[[str, str], tuple[int, str, str]]
"""Runs a module with an argument; returns the exit status, the output and the error output."""


def run_checks(engine: Engine, model: str | None = None, run: RunCheck | None = None) -> list[CheckResult]:
    """Check the methods of all known configurations, or those of a model's folder."""
    if find_spec(engine) is None:
        fix = f"run `rfork doctor` in the environment or image of {engine}"
        return [CheckResult("golden check", "fail", f"{engine} is not installed here", fix)]
    found = import_module(MODULES[engine])
    methods: ForkableMethods = found.METHODS
    every = [*(f"{name}+experts" for name in CONFIGURATIONS), *MORE.get(engine, ())]
    configurations = [model] if model is not None else every
    results: list[CheckResult] = []
    checked: set[str] = set()
    for configuration in configurations:
        status, output, errors = (run or _run)(MODULES[engine], configuration)
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        results += check_methods(lines, methods, checked)
        if status != 0:
            results.append(check_end(configuration, status, errors))
    return results


def check_methods(lines: Iterable[Mapping[str, str]], methods: ForkableMethods, checked: set[str]) -> list[CheckResult]:
    """Return a result for each method that is not `checked` yet, and adds it there."""
    failures: dict[str, str | None] = {}
    for line in lines:
        failures[line["method"]] = failures.get(line["method"]) or line["failure"]
    results = []
    for method, failure in failures.items():
        if method not in checked:
            checked.add(method)
            results.append(_check_method(method, failure, methods))
    return results


def _check_method(method: str, failure: str | None, methods: ForkableMethods) -> CheckResult:
    if failure is not None:
        return CheckResult(method, "off", f"not forked: {failure}")
    known = {name for names in methods.proven.values() for name in names}
    if method in known or "/" not in method:
        return CheckResult(method, "ok", "passes the golden check")
    return CheckResult(method, "ok", "passes the golden check", f"to fork it, set RFORK_FORKABLE_METHODS={method}")


def check_end(configuration: str, status: int, errors: str) -> CheckResult:
    """Return the result of a configuration whose process failed."""
    reason = f"crashed (signal {-status})" if status < 0 else _last_line(errors)
    return CheckResult(configuration, "off", f"cannot be checked here: {reason}")


def _last_line(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"


def _run(module: str, configuration: str) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, configuration], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        return 1, _text(error.stdout), f"no result within {TIMEOUT_S:.0f} s"
    return done.returncode, done.stdout, done.stderr


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
