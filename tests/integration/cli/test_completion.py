"""Shell completion of names."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import startup_patch
from tests.unit.planner.builders import VERSION

LONG_TIMEOUT_PATCH = "import rfork.cli.completion as completion\ncompletion.TIMEOUT_S = 60.0\n"
"""Longer planner timeout for a busy machine."""


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("bash", "complete -o default -F _rfork_completion rfork"),
        ("zsh", "#compdef rfork"),
        ("fish", "--command rfork"),
    ],
)
def test_completion_is_installed(shell: str, words: str, tmp_path: Path) -> None:
    """`rfork --install-completion SHELL` writes the script to the shell's completion folder."""
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [_script(), "--install-completion", shell],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert 0 == done.returncode, done.stdout + done.stderr
    assert words in written, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("shell", "variables", "expected"),
    [
        ("bash", {"COMP_WORDS": "rfork explain fork-", "COMP_CWORD": "2"}, {"fork-a", "fork-b", "fork-c"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "rfork drain s"}, {'"s":"m on host-s"'}),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "rfork status --model ", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
            {"m\t2 seeds"},
        ),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "rfork plan m --version "}, {f'"{VERSION}":"2 seeds of m"'}),
    ],
)
def test_names_are_completed(
    shell: str, variables: dict[str, str], expected: set[str], fleet: str, tmp_path: Path
) -> None:
    """Each shell offers the names that the planner knows."""
    completions = run_completion(shell, {**variables, **startup_patch(tmp_path / "patch", LONG_TIMEOUT_PATCH)}, fleet)
    assert [] == [word for word in expected if word not in completions], completions


def test_completion_is_silent_without_a_planner() -> None:
    """If the planner does not respond, completion returns soon and prints nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        completions = run_completion("bash", {"COMP_WORDS": "rfork explain x", "COMP_CWORD": "2"}, url)
    assert "" == completions.strip()


def run_completion(shell: str, variables: dict[str, str], planner: str) -> str:
    """Return the completions offered by the shell, and stderr."""
    environment = {
        **os.environ,
        **variables,
        "RFORK_PLANNER": planner,
        "_RFORK_COMPLETE": f"complete_{shell}",
    }
    done = subprocess.run([_script()], env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def _script() -> str:
    """Return the `rfork` script next to this Python: completion matches the program's name."""
    return str(Path(sys.executable).parent / "rfork")
