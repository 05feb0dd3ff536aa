"""The planner's clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """The planner's two clocks, in seconds: monotonic for ages, unix for times that other machines compare."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
