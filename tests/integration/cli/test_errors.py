"""Unreachable planners, wrong tokens and URLs, closed pipes, and bugs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from planner.server import run_in_thread
from rfork.cli.app import app
from rfork.planner_client.client import PlannerClient
from rfork.settings import PlannerSettings
from tests.integration.cli.command_result import Rfork

DEBUG = {"RFORK_LOG_LEVEL": "debug"}


COMMANDS = (
    ("status",),
    ("status", "--forks"),
    ("status", "--forks", "--follow"),
    ("explain", "x"),
    ("top",),
    ("drain", "x", "--wait", "0"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_unreachable_planner(rfork: Rfork, free_port: int, command: tuple[str, ...]) -> None:
    """One line and a hint, as text and as JSON; exit code 5."""
    url = f"http://127.0.0.1:{free_port}"
    done = rfork(*command, "--planner", url)
    assert 5 == done.code
    assert done.err.startswith(f"error: planner {url} is unreachable: ")
    result = rfork(*command, "--planner", url, "--json")
    assert 5 == result.code
    assert "PlannerUnreachable" == result.json["error"]
    assert result.json["hint"]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_wrong_token(rfork: Rfork, command: tuple[str, ...]) -> None:
    """The hint names the variable to set."""
    with run_in_thread(PlannerSettings(port=0, token=SecretStr("right"))) as url:
        done = rfork(*command, "--planner", url, RFORK_TOKEN="wrong")
    assert 5 == done.code
    assert "set RFORK_TOKEN" in done.err


@pytest.mark.parametrize(("url", "code"), [("127.0.0.1:8700", 2), ("", 2), ("http://no.such.host.invalid", 5)])
def test_an_invalid_url(rfork: Rfork, url: str, code: int) -> None:
    """An invalid planner URL is reported as such, with an example."""
    done = rfork("status", "--planner", url)
    assert code == done.code
    assert 2 == len(done.err.splitlines())


@pytest.mark.parametrize("words", [("status", "--forks"), ("--version",)], ids=" ".join)
def test_a_closed_stdout_pipe_is_no_failure(fleet: str, words: tuple[str, ...]) -> None:
    """`rfork status --forks | head -1` succeeds without a broken-pipe message."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rfork", *words]
    environment = {**os.environ, "RFORK_PLANNER": fleet}
    done = subprocess.run(command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert "" == done.stderr
    assert 0 == done.returncode


def test_a_closed_stderr_pipe_keeps_the_exit_code() -> None:
    """A command whose stderr pipe is closed ends with its usual exit code."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rfork", "status", "--planner", "none"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, check=False)
    os.close(writing)
    assert 2 == done.returncode


def test_a_bug_is_one_line(rfork: Rfork, monkeypatch: pytest.MonkeyPatch, fleet: str) -> None:
    """An unexpected error is reported without a traceback, with a hint how to see one."""

    def broken(*_: object) -> None:
        raise KeyError("what")

    monkeypatch.setattr(PlannerClient, "models", broken)
    assert "Traceback" in CliRunner().invoke(app, ["status", "--planner", fleet], env=DEBUG).stderr
    done = rfork("status", "--planner", fleet)
    assert 1 == done.code
    assert "error: unexpected error: KeyError: 'what'" == done.err.splitlines()[0]


INTERRUPTED_IN_TORCH = """
import atexit, sys, threading
import torch
from rfork.cli import app

source, working = torch.zeros(1 << 26, dtype=torch.uint8), threading.Barrier(3)

def work():
    destination = source.clone()
    working.wait()
    while True:
        destination.copy_(source)

def command():
    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    working.wait()
    print("unflushed", end="")
    raise SystemExit(130)

atexit.register(lambda: print(", at exit", end=""))
app.app = command
app.main()
"""


def test_an_interrupted_command_exits_with_its_code() -> None:
    """This also holds while threads are inside torch; exit handlers run."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IN_TORCH], capture_output=True, text=True, check=False)
    assert 130 == done.returncode
    assert "unflushed, at exit" == done.stdout
    assert "" == done.stderr
