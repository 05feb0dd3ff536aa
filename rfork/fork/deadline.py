"""When a fork has to end. Runs on the target."""

from __future__ import annotations

import time
from typing import Final

FAREWELL_S: Final = 0.3
"""Time to report the end of a fork whose deadline has passed."""


class Deadline:
    """`at` is a `time.monotonic()` value, read by every thread of one fork.

    As long as this instance reads its own storage, for all that wait behind it, and that advances, it
    is put off: whoever would have to read everything again later is no better off.
    """

    def __init__(self, at: float) -> None:
        self.at = at

    def put_off(self, until: float) -> None:
        """Not before `until`."""
        self.at = max(self.at, until)


def farewell(deadline: float) -> float:
    """Return the deadline of the calls that end a fork: its own, at least `FAREWELL_S` from now."""
    return max(deadline, time.monotonic() + FAREWELL_S)
