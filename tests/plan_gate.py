"""Forks that stand still before they ask the planner: processes take unlike times to come that far."""

from __future__ import annotations

import os
from pathlib import Path

from tests.processes import RforkProcess, startup_patch

GATE_PATCH = """
from rfork.planner_client.client import PlannerClient
ask, gates = PlannerClient.ask, [{gate!r}]

def gated(client, request, **options):
    if gates:
        print("asks", flush=True)
        open(gates.pop()).read()
    return ask(client, request, **options)

PlannerClient.ask = gated
"""
"""What such a fork runs at its start: opening a FIFO waits for a writer."""


class PlanGate:
    """Before one process's first request for a plan."""

    def __init__(self, folder: Path) -> None:
        """Makes `folder` for it."""
        self._fifo = folder.with_name(f"{folder.name}-gate")
        os.mkfifo(self._fifo)
        self.environment = startup_patch(folder, GATE_PATCH.format(gate=str(self._fifo)))
        """What the process is to be started with."""

    def wait_reached(self, process: RforkProcess) -> None:
        """Wait until the process, which has said nothing else to standard output, stands before it."""
        process.wait_for("^asks$")

    def open(self) -> None:
        """Let it ask."""
        self._fifo.write_text("")
