"""Servers warn at start about environment variables that are probably misspelt settings."""

from __future__ import annotations

import pytest

from tests.integration.cli.command_result import Rfork

WARNING = "unknown variable ignored variable=RFORK_PLANNER_TOKENS hint='did you mean RFORK_PLANNER_TOKENS_FILE?'"
ENDS_IMMEDIATELY = [
    ("planner", "--bind", "192.0.2.1"),
    ("seed", "/no/such/model"),
    ("sidecar",),
    ("k8s", "scaler"),
]
"""Commands of servers that fail right after their start."""


@pytest.mark.parametrize("command", ENDS_IMMEDIATELY, ids=lambda command: command[0])
def test_a_server_warns_of_a_misspelt_variable(rfork: Rfork, command: tuple[str, ...]) -> None:
    """The warning names the variable and the probable setting, but not the value, which may be a secret."""
    done = rfork(*command, RFORK_PLANNER_TOKENS="secret-value")
    assert WARNING in done.err
    assert "secret-value" not in done.err
