"""Checks of the settings, and the rule that every finding has a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from rfork.diagnostics.configuration import (
    check_planner_extra,
    check_reachability,
    check_resume,
    check_unknown_variables,
    missing_planner_modules,
)
from rfork.diagnostics.result import CheckResult, Status
from rfork.settings import InstanceSettings, find_typos, variables


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("RFORK_PLANER", "RFORK_PLANNER"),
        ("RFORK_MAX_EGRES_BYTES_PER_S", "RFORK_MAX_EGRESS_BYTES_PER_S"),
        ("RFORK_STORAGE_CONCURENCY", "RFORK_STORAGE_CONCURRENCY"),
        ("RFORK_TLS_CERT", "RFORK_TLS_CERTIFICATE"),
        ("RFORK_ZNOE", "RFORK_ZONE"),
        ("RFORK_PLANNNER_STROE", "RFORK_PLANNER_STORE"),
        ("RFORK_DRAIN_TIMEOUT", "RFORK_DRAIN_TIMEOUT_S"),
        ("RFORK_HOME", None),
        ("RFORK_RANK", None),
        ("RFORK_ROOT", None),
        ("RFORK_POD_IP", None),
        ("RFORK_VERSION", None),
        ("RFORK_LOG", None),
        ("RFORK_PORT", None),
        ("RFORK_PORT_8700_TCP", None),
        ("RFORK_PORT_8700_TCP_PROTO", None),
        ("RFORK_SERVICE_HOST", None),
        ("RFORK_SERVICE_PORT_HTTP", None),
        ("RFORK_PLANNER", None),
        ("RFORK_POD_NAMESPACE", None),
        ("RFORK_PLANNER_SERVICE_HOST", None),
        ("RFORK_PLANNER_PORT_8700_TCP_ADDR", None),
        ("RFORK_SOMETHING_OF_MY_OWN", None),
        ("PLANNER", None),
    ],
)
def test_a_misspelt_variable_is_found_with_the_intended_setting(name: str, suggestion: str | None) -> None:
    """A typo is reported with the intended setting; unrelated names and those of Kubernetes are ignored."""
    assert ({name: suggestion} if suggestion else {}) == find_typos({name: "x"})


def test_settings_are_not_typos() -> None:
    """No existing setting is reported as a typo of another one."""
    assert {} == find_typos(dict.fromkeys(variables(), "x"))


def test_a_misspelt_variable_is_a_warning() -> None:
    """The variable is ignored, but another program may use it."""
    expected = CheckResult(
        "variables",
        "warn",
        "not a setting, so ignored: RFORK_PLANER",
        "did you mean RFORK_PLANNER?",
    )
    assert expected == check_unknown_variables({"RFORK_PLANER": "RFORK_PLANNER"})


@pytest.mark.parametrize(
    ("bind", "planner", "status"),
    [
        ("127.0.0.1", None, "skip"),
        ("127.0.0.1", "http://localhost:8700", "skip"),
        ("127.0.0.1", "http://planner:8700", "warn"),
        ("127.0.0.1", "http://[::1", "warn"),
        ("10.0.0.7", "http://planner:8700", "ok"),
    ],
)
def test_a_loopback_address_with_a_remote_planner_is_a_warning(bind: str, planner: str | None, status: Status) -> None:
    """A loopback address with a remote planner is a warning: other hosts cannot read from it."""
    assert status == check_reachability(InstanceSettings(bind=bind, planner=planner)).status


def test_a_resume_folder_must_be_writable(tmp_path: Path) -> None:
    """The folder exists or can be created; a file in its place is a failure."""
    file = tmp_path / "file"
    file.write_text("")
    assert ["off", "ok", "ok", "fail"] == [
        check_resume(folder).status for folder in (None, tmp_path, tmp_path / "a" / "b", file)
    ]


@pytest.mark.parametrize("status", ["warn", "fail"])
def test_a_finding_requires_a_fix(status: Status) -> None:
    """A warning or failure without a fix cannot be created."""
    with pytest.raises(ValueError, match="requires a fix"):
        CheckResult("x", status, "it is bad")


def test_a_planner_can_run_here() -> None:
    """All packages of the extra are installed."""
    assert [] == missing_planner_modules()
    assert "ok" == check_planner_extra([]).status


def test_a_missing_planner_extra_is_off() -> None:
    """The hint names the extra."""
    check = check_planner_extra(["fastapi", "uvicorn"])
    assert "off" == check.status
    assert check.detail.endswith("no fastapi, uvicorn")
    assert "pip install 'rfork[planner]'" == check.fix
