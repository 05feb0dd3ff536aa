"""Gate that stops forks before their plan request, since processes reach it at different times."""

from __future__ import annotations

import os
from pathlib import Path

from tests.processes import RforkProcess, startup_patch

GATE_PATCH = """
from rfork.planner_client.client import PlannerClient
request_plan, gates = PlannerClient.request_plan, [{gate!r}]

def gated(client, request, **options):
    if gates:
        print("gate reached", flush=True)
        open(gates.pop()).read()
    return request_plan(client, request, **options)

PlannerClient.request_plan = gated
"""
"""Startup patch of such a fork: opening a FIFO waits for a writer."""


class PlanGate:
    """Gate before one process's first plan request."""

    def __init__(self, folder: Path) -> None:
        """Create `folder` for the gate."""
        self._fifo = folder.with_name(f"{folder.name}-gate")
        os.mkfifo(self._fifo)
        self.environment = startup_patch(folder, GATE_PATCH.format(gate=str(self._fifo)))
        """Environment for the process."""

    def wait_reached(self, process: RforkProcess) -> None:
        """Wait until the process, which has printed nothing else, reaches the gate."""
        process.wait_for("^gate reached$")

    def open(self) -> None:
        """Let the process continue."""
        self._fifo.write_text("")
