"""Results of golden checks: from lines of JSON, and from processes that fail."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from rfork.cli import golden_checks
from rfork.diagnostics.result import CheckResult
from rfork.engines.layer_methods import ForkableMethods

METHODS = ForkableMethods(base=(), proven={"cpu": ("Known/Kernel",)})


def line(method: str, failure: str | None = None) -> dict[str, str]:
    """Return a line of a check's output."""
    return {"method": method, "layer": "Linear", "failure": failure}  # type: ignore[dict-item]


def test_each_method_has_one_result() -> None:
    """It fails if it fails for one type of layer; methods that were checked before are not repeated."""
    lines = [line("Known/Kernel"), line("Plain"), line("New/Kernel"), line("Bad/Kernel"), line("Bad/Kernel", "no GPU")]
    found = golden_checks.check_methods(lines, METHODS, checked := {"Plain"})
    assert [
        CheckResult("Known/Kernel", "ok", "passes the golden check"),
        CheckResult("New/Kernel", "ok", "passes the golden check", "to fork it, set RFORK_FORKABLE_METHODS=New/Kernel"),
        CheckResult("Bad/Kernel", "off", "not forked: no GPU"),
    ] == found
    assert {"Plain", "Known/Kernel", "New/Kernel", "Bad/Kernel"} == checked


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an installed engine with two configurations."""
    module = ModuleType("engine_methods")
    vars(module).update(METHODS=METHODS)
    monkeypatch.setattr(golden_checks, "CONFIGURATIONS", {"plain": None, "crashing": {}})
    monkeypatch.setitem(sys.modules, "engine_methods", module)
    monkeypatch.setattr(golden_checks, "MODULES", {"json": "engine_methods"})
    return "json"


def test_a_crash_is_a_result_of_its_own(engine: str) -> None:
    """The other configurations are checked, and results before the crash count."""

    def run(module: str, configuration: str) -> tuple[int, str, str]:
        output = "noise\n" + json.dumps(line(f"{configuration}/Kernel"))
        return (-11 if configuration == "crashing+experts" else 0), output, ""

    found = golden_checks.run_checks(engine, run=run)  # type: ignore[arg-type]
    assert ["plain+experts/Kernel", "crashing+experts/Kernel", "crashing+experts"] == [result.name for result in found]
    assert "cannot be checked here: crashed (signal 11)" == found[-1].detail


def test_a_models_own_configuration_is_checked_alone(engine: str) -> None:
    """The folder is passed to the check."""
    requested: list[str] = []

    def run(module: str, configuration: str) -> tuple[int, str, str]:
        requested.append(configuration)
        return 1, "", "Traceback\nValueError: no such method\n"

    found = golden_checks.run_checks(engine, "/models/x", run)  # type: ignore[arg-type]
    assert ["/models/x"] == requested
    assert ["cannot be checked here: ValueError: no such method"] == [result.detail for result in found]


def test_a_missing_engine_is_a_failure() -> None:
    """Nothing is checked, and the fix names the environment to run the command in."""
    found = golden_checks.run_checks("vllm")
    assert ["fail"] == [result.status for result in found]


def test_processes_report_their_end() -> None:
    """A module that does not exist ends with an error."""
    status, output, errors = golden_checks._run("no_such_module", "none")
    assert 1 == status
    assert "" == output
    assert "no_such_module" in errors
