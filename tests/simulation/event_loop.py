"""Event loop with a virtual clock: nothing waits, and the same program runs the same way each time."""

from __future__ import annotations

import asyncio
from typing import Any

START_S = 1_000.0
UNIX_OFFSET_S = 1_700_000_000.0
"""Seconds that the simulated wall clock is ahead of the monotonic one."""


class Deadlock(Exception):
    """Nothing is scheduled any more."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks and tasks; its time jumps to the next scheduled callback."""

    def __init__(self) -> None:
        super().__init__()
        self._now = START_S
        self._selector = self  # `BaseEventLoop` waits in `select`
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def unix_s(self) -> float:
        """Return the virtual wall-clock time, in seconds since the epoch."""
        return self._now + UNIX_OFFSET_S

    def select(self, timeout: float | None) -> list[Any]:
        """Advance the time instead of waiting for it."""
        if timeout is None:
            raise Deadlock
        self._now += max(0.0, timeout)
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return
