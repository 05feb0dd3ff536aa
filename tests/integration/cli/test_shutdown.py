"""Commands that run until a signal stops them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from rfork.cli import console
from rfork.planner_client.client import PlannerClient
from tests.conftest import StartRfork
from tests.integration.cli.command_result import Rfork
from tests.processes import SignalThread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "command",
    [
        ("seed", "{model}"),
        ("pull", "{model}", "--checkpoint", "{model}", "--stay"),
        ("sidecar", "--client-of-model", "m", "--port", "0"),
    ],
    ids=lambda command: command[0],
)
def test_a_signal_right_after_ready_ends_the_command(
    rfork: Rfork, fleet: str, tiny_model: Path, command: tuple[str, ...], number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The command shuts down cleanly with exit code 0, however soon the signal arrives."""
    outcomes: list[object] = []

    def end(ready: object) -> None:
        outcomes.append(ready)
        signal.raise_signal(number)

    monkeypatch.setattr(console, "print_json", end)
    words = [word.format(model=tiny_model) for word in command]
    done = rfork(*words, "--planner", fleet, "--json", RFORK_DRAIN_TIMEOUT_S="0", RFORK_TRANSPORTS="http")
    assert 0 == done.code
    assert 1 == len(outcomes)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_delivered_to_another_thread_ends_the_command(
    rfork_process: StartRfork, fleet: str, tiny_model: Path, number: signal.Signals, tmp_path: Path
) -> None:
    """The command shuts down cleanly although the waiting thread is not woken."""
    thread = SignalThread(tmp_path / "patch")
    process = rfork_process(
        "seed", str(tiny_model), "--planner", fleet, "--json",
        until='"ready"', environment={**thread.environment, "RFORK_DRAIN_TIMEOUT_S": "0"},
    )  # fmt: skip
    thread.deliver(number)
    assert 0 == process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wait_that_fails_when_interrupted(
    rfork: Rfork, fleet: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own waits may raise an unrelated error when interrupted: this is reported as an interruption,
    not as a bug.
    """

    def wait(*_: object, **more: object) -> NoReturn:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        raise RuntimeError("cannot release un-acquired lock")

    monkeypatch.setattr(PlannerClient, "forks", wait)
    done = rfork("status", "--forks", "--planner", fleet)
    assert 130 == done.code
    assert "interrupted\n" == done.err


INTERRUPTED_SCRIPT = """
import contextlib, threading
from rfork.cli import app

@contextlib.contextmanager
def opened():
    try:
        yield
    finally:
        print("closed", flush=True)

def interrupted():
    opening = opened()
    opening.__enter__()
    raise SystemExit(130)

threading.Thread(target=threading.Event().wait, daemon=True).start()
app.app = interrupted
app.main()
"""
"""Ctrl-C after a resource was opened and before its `with` block starts."""


def test_an_interruption_closes_open_resources() -> None:
    """They are closed before the process exits: otherwise a half-written file would remain."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_SCRIPT], capture_output=True, text=True, check=False)
    assert 130 == done.returncode
    assert "closed\n" == done.stdout
    assert "" == done.stderr
