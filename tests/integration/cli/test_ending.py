"""Commands that run until a signal ends them."""

from __future__ import annotations

import contextlib
import importlib
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from rfork.control.client import PlannerClient
from tests.conftest import StartRfork
from tests.integration.cli.ended import Rfork
from tests.processes import OtherThread


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
    told: list[object] = []

    def end(ready: object) -> None:
        told.append(ready)
        signal.raise_signal(number)

    monkeypatch.setattr(importlib.import_module(f"rfork.cli.{command[0]}"), "print_json", end)
    words = [word.format(model=tiny_model) for word in command]
    done = rfork(*words, "--planner", fleet, "--json", RFORK_DRAIN_S="0", RFORK_TRANSPORTS="http")
    assert (0, 1) == (done.code, len(told))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_another_thread_takes_ends_it(
    rfork_process: StartRfork, fleet: str, tiny_model: Path, number: signal.Signals, tmp_path: Path
) -> None:
    """In order, though the thread that waits for it is not woken."""
    thread = OtherThread(tmp_path / "patch")
    process = rfork_process(
        "seed", str(tiny_model), "--planner", fleet, "--json",
        until='"ready"', environment={**thread.environment, "RFORK_DRAIN_S": "0"},
    )  # fmt: skip
    thread.take(number)
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
    done = rfork("forks", "--planner", fleet)
    assert (130, "interrupted\n") == (done.code, done.err)
