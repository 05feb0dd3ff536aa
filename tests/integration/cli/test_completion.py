"""Shell completion of commands and options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


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


def test_commands_and_options_are_completed() -> None:
    """The shell is offered the options of a command."""
    variables = {"_RFORK_COMPLETE": "complete_bash", "COMP_WORDS": "rfork status --f", "COMP_CWORD": "2"}
    done = subprocess.run(
        [_script()], env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=60
    )
    assert {"--forks", "--follow"} == set(done.stdout.split())


def _script() -> str:
    """Return the `rfork` script next to this Python: completion matches the program's name."""
    return str(Path(sys.executable).parent / "rfork")
