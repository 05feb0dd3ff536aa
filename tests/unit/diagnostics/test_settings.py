"""The doctor on the settings themselves, and the promise that each of its findings can be mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from rfork.diagnostics.configuration import check_reachability, check_resume, check_unknown_variables
from rfork.diagnostics.result import CheckResult, Status
from rfork.settings import InstanceSettings
from rfork.settings.unknown_variables import find_typos, variables


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("RFORK_PLANER", "RFORK_PLANNER"),
        ("RFORK_EGRES_RATE", "RFORK_MAX_EGRESS_BYTES_PER_S"),
        ("RFORK_STORAGE_STREAM", "RFORK_STORAGE_CONCURRENCY"),
        ("RFORK_TLS_CERT", "RFORK_TLS_CERTIFICATE"),
        ("RFORK_ZNOE", "RFORK_ZONE"),
        ("RFORK_PLANNNER_STROE", "RFORK_PLANNER_STORE"),
        ("RFORK_DRAIN", "RFORK_DRAIN_TIMEOUT_S"),
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
def test_misspelt_variables(name: str, suggestion: str | None) -> None:
    """A slip is told with what was meant; names of others, and those of Kubernetes, are left alone."""
    assert ({name: suggestion} if suggestion else {}) == find_typos({name: "x"})


def test_no_option_is_misspelt() -> None:
    """Each variable that is read is known."""
    assert {} == find_typos(dict.fromkeys(variables(), "x"))


def test_a_misspelt_variable_is_a_warning() -> None:
    """It would be ignored without a word; but it may be somebody else's."""
    expected = CheckResult(
        "variables",
        "warn",
        "RFORK_PLANER names no option",
        "if it is rfork's, correct it: RFORK_PLANNER may be meant",
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
def test_reach(bind: str, planner: str | None, status: Status) -> None:
    """Who listens on loopback, and has its planner elsewhere, cannot be read from by others."""
    assert status == check_reachability(InstanceSettings(bind=bind, planner=planner)).status


def test_the_folder_of_resumed_forks(tmp_path: Path) -> None:
    """It is there, or can be made; a file in its place is a failure."""
    file = tmp_path / "file"
    file.write_text("")
    assert ["skip", "ok", "ok", "fail"] == [
        check_resume(folder).status for folder in (None, tmp_path, tmp_path / "a" / "b", file)
    ]


@pytest.mark.parametrize("status", ["warn", "fail"])
def test_a_finding_says_what_to_do(status: Status) -> None:
    """One without a fix is no finding: it cannot be made."""
    with pytest.raises(ValueError, match="says nothing to do"):
        CheckResult("x", status, "it is bad")
