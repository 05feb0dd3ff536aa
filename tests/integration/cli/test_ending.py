"""Commands that run until a signal ends them."""

from __future__ import annotations

import importlib
import signal
from pathlib import Path

import pytest

from tests.integration.cli.ended import Rfork


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
