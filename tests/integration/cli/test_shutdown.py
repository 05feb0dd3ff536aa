"""Commands that run until a signal ends them."""

from __future__ import annotations

import contextlib
import importlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

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
def test_whoever_is_told_that_it_is_ready_may_end_it(
    rfork: Rfork, fleet: str, tiny_model: Path, command: tuple[str, ...], number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In order, with exit code 0: however soon the signal comes."""
    outcomes: list[object] = []

    def end(ready: object) -> None:
        outcomes.append(ready)
        signal.raise_signal(number)

    monkeypatch.setattr(importlib.import_module(f"rfork.cli.{command[0]}"), "print_json", end)
    words = [word.format(model=tiny_model) for word in command]
    done = rfork(*words, "--planner", fleet, "--json", RFORK_DRAIN_TIMEOUT_S="0", RFORK_TRANSPORTS="http")
    assert (0, 1) == (done.code, len(outcomes))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_another_thread_takes_ends_it(
    rfork_process: StartRfork, fleet: str, tiny_model: Path, number: signal.Signals, tmp_path: Path
) -> None:
    """In order, though the thread that waits for it is not woken."""
    thread = SignalThread(tmp_path / "patch")
    process = rfork_process(
        "seed", str(tiny_model), "--planner", fleet, "--json",
        until='"ready"', environment={**thread.environment, "RFORK_DRAIN_TIMEOUT_S": "0"},
    )  # fmt: skip
    thread.deliver(number)
    assert 0 == process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wait_that_fails_as_it_is_broken_off(
    rfork: Rfork, fleet: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own may, with an error of theirs: it was an interruption, and no bug."""

    def wait(*_: object, **more: object) -> NoReturn:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        raise RuntimeError("cannot release un-acquired lock")

    monkeypatch.setattr(PlannerClient, "forks", wait)
    done = rfork("status", "--forks", "--planner", fleet)
    assert (130, "interrupted\n") == (done.code, done.err)


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
"""Ctrl-C as something has been opened, and before the block that would close it is begun."""


def test_what_an_interruption_left_open_is_closed() -> None:
    """Before the process ends: a file that is half written would lie there for ever."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_SCRIPT], capture_output=True, text=True, check=False)
    assert (130, "closed\n", "") == (done.returncode, done.stdout, done.stderr)
