"""pytest plugin that writes the outcome of each test at once: `-p benchmarks.gpu.pytest_results --results FILE`.

While a test runs, its row is in the file as `running`: a test that hangs is named after the process was ended.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.result_file import Value, write_json

_rows: dict[str, dict[str, Value]] = {}
_path: list[Path] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--results`."""
    parser.addoption("--results", type=Path, help="JSON file of the outcomes")


def pytest_configure(config: pytest.Config) -> None:
    """Read the option."""
    _path[:] = [config.getoption("--results")] if config.getoption("--results") else []
    _write()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Add a row for the test that starts."""
    _rows[nodeid] = {"test": nodeid, "outcome": "running", "seconds": 0.0, "reason": ""}
    _write()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Update the test's row after its set-up, its call and its clean-up; the first failure is kept."""
    row = _rows[report.nodeid]
    row["seconds"] = float(row["seconds"] or 0.0) + report.duration
    if row["outcome"] == "running" or report.failed:
        row["outcome"] = report.outcome if report.outcome != "passed" or report.when == "call" else row["outcome"]
        row["reason"] = row["reason"] or _reason(report)
    _write()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Add a row for a file that cannot be imported."""
    if report.failed:
        _rows[report.nodeid] = {
            "test": report.nodeid, "outcome": "failed", "seconds": 0.0, "reason": _last_line(str(report.longrepr)),
        }  # fmt: skip
        _write()


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message).partition("\n")[0] if crash is not None else _last_line(str(report.longrepr or ""))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _write() -> None:
    for path in _path:
        write_json(path, {"rows": list(_rows.values())})
