"""How often a request is sent again, and how long to wait before: without threads, clocks or sockets."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

FIRST_S: Final = 0.1
"""Longest wait after the first failure; it doubles with each further one."""
LONGEST_S: Final = 5.0
"""Longest wait after any failure."""
LONGEST_ASKED_S: Final = 30.0
"""Longest wait that a server's Retry-After is granted."""
PROGRESS: Final = 1 << 20
"""Bytes that an attempt must bring for the count to begin anew; a server that breaks off after every few
bytes would else be asked for ever."""

_SECONDS = re.compile(r"[0-9]{1,9}")


class Passing(Exception):
    """A failure that another attempt may not meet. `after_s`: what the server asks us to wait."""

    def __init__(self, cause: str, after_s: float = 0.0) -> None:
        super().__init__(cause)
        self.after_s = after_s


class Attempts:
    """The attempts at one range; exponential backoff with full jitter (`random` gives [0, 1))."""

    def __init__(self, most: int, random: Callable[[], float]) -> None:
        self._most = most
        self._random = random
        self._in_vain = 0
        self.made = 0

    def failed(self, brought: int, after_s: float = 0.0) -> float | None:
        """One more failed, having brought so many bytes: seconds to wait, or None when it was the last."""
        self.made += 1
        self._in_vain = 1 if brought >= PROGRESS else self._in_vain + 1
        if self._in_vain >= self._most:
            return None
        jitter = self._random() * min(LONGEST_S, FIRST_S * 2.0 ** (self._in_vain - 1))
        return max(jitter, min(after_s, LONGEST_ASKED_S))


def retry_after(value: str, now: datetime) -> float:
    """Seconds that a Retry-After field asks for (RFC 9110 10.2.3); 0 where it cannot be understood."""
    if _SECONDS.fullmatch(value.strip()):
        return float(value)
    try:
        until = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - now).total_seconds())
