"""Deadline of a fork. Runs on the target."""

from __future__ import annotations

import time
from typing import Final

FINAL_REPORT_S: Final = 0.3
"""Time to report the end of a fork whose deadline has passed."""


class Deadline:
    """`monotonic_time` is a `time.monotonic()` value, read by every thread of one fork.

    It is extended while this instance reads its own storage for waiting instances and makes progress:
    starting over elsewhere would take longer.
    """

    def __init__(self, monotonic_time: float) -> None:
        self.monotonic_time = monotonic_time

    def extend(self, until: float) -> None:
        """Move the deadline to `until`, if that is later."""
        self.monotonic_time = max(self.monotonic_time, until)


def final_report_deadline(deadline: float) -> float:
    """Return the deadline of the calls that end a fork: its own, but at least `FINAL_REPORT_S` from now."""
    return max(deadline, time.monotonic() + FINAL_REPORT_S)
