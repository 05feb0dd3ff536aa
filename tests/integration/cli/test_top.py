"""The live view, in a pipe and on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from planner.server import run_in_thread
from rfork.planner_client.client import PlannerClient
from rfork.settings import PlannerSettings
from tests.integration.cli.command_result import Rfork
from tests.integration.cli.terminal import PseudoTerminal
from tests.processes import startup_patch
from tests.unit.planner.builders import seed_report


def test_top_without_a_terminal_prints_once(rfork: Rfork, fleet: str) -> None:
    """Into a pipe it prints one view and exits; with --json and --once one line."""
    output = rfork("top", "--planner", fleet).out
    assert "running forks (1)" in output
    assert "fallback reasons" in output
    assert "\x1b" not in output
    line = rfork("top", "--planner", fleet, "--json", "--once").json
    assert 4 == line["instances"]
    assert {"NoSource": 1} == line["fallbacks"]


def test_top_on_a_terminal(terminal: PseudoTerminal, free_port: int) -> None:
    """It reports that the planner is unreachable, continues when it is back, and restores the terminal."""
    with run_in_thread(PlannerSettings(port=free_port)) as url:
        terminal.start("top", "--planner", url, "--interval", "0.1")
        terminal.wait_for("no instance is registered")
    terminal.wait_for("planner unreachable for")
    with run_in_thread(PlannerSettings(port=free_port)) as url, PlannerClient(url) as client:
        client.report(seed_report("s"))
        terminal.wait_for("sources (1)")
        terminal.type("q")
        assert 0 == terminal.end()
    assert terminal.before == terminal.modes()
    assert terminal.text.rstrip().endswith("\x1b[?1049l")


def test_top_is_interrupted(terminal: PseudoTerminal, fleet: str) -> None:
    """Ctrl-C ends it like q."""
    terminal.start("top", "--planner", fleet)
    terminal.wait_for("running forks")
    terminal.type("\x03")
    assert 0 == terminal.end()
    assert terminal.before == terminal.modes()


def test_top_is_interrupted_while_drawing_the_first_view(terminal: PseudoTerminal, fleet: str, tmp_path: Path) -> None:
    """It leaves the alternate screen then too."""
    first = "import rich.live\ndef refresh(self): raise KeyboardInterrupt\nrich.live.Live.refresh = refresh\n"
    terminal.start("top", "--planner", fleet, **startup_patch(tmp_path / "patch", first))
    assert 0 == terminal.end()
    assert terminal.before == terminal.modes()
    assert terminal.text.count("\x1b[?1049h") == terminal.text.count("\x1b[?1049l") == 1


def test_top_is_suspended(terminal: PseudoTerminal, fleet: str) -> None:
    """Ctrl-Z leaves the alternate screen, and continuing restores it.

    Here the command continues immediately: no shell could continue it, so the system does not stop it.
    """
    terminal.start("top", "--planner", fleet)
    terminal.wait_for("running forks")
    terminal.type("\x1a")
    terminal.wait_for("\x1b[?1049l")
    terminal.wait_for("running forks")
    terminal.type("q")
    assert 0 == terminal.end()
    assert terminal.before == terminal.modes()
    assert 2 == terminal.text.count("\x1b[?1049h")


def test_ascii_only_output(fleet: str) -> None:
    """If stdout only supports ASCII, bars become question marks and nothing fails."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "rfork", "top", "--planner", fleet]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "" == done.stderr
    assert 0 == done.returncode
    assert "??????" in done.stdout
