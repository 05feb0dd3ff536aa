"""How often a request is sent again, and how long to wait before: without threads or sockets."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

FIRST_S: Final = 0.1
"""Longest wait after the first failure; it doubles with each further one."""
MAX_DELAY_S: Final = 5.0
"""Longest wait after any failure."""
MAX_RETRY_AFTER_S: Final = 30.0
"""Longest wait that a server's Retry-After is granted."""
PROGRESS: Final = 1 << 20
"""Bytes that an attempt must bring for the count to begin anew; a server that breaks off after every few
bytes would else be asked for ever."""

_SECONDS = re.compile(r"[0-9]{1,9}")


class RetryableError(Exception):
    """A failure that another attempt may not meet. `after_s`: what the server asks us to wait."""

    def __init__(self, cause: str, after_s: float = 0.0) -> None:
        super().__init__(cause)
        self.after_s = after_s


class RetryBudget:
    """The attempts at one range: given up after so many in vain, and not before so many seconds of that.

    A server that starts again, or that puts its clients off, does so for longer than a few quick attempts
    take. The waits grow exponentially, each with jitter over its upper half (`random` gives [0, 1)).
    """

    def __init__(
        self, min_attempts: int, min_retry_s: float, random: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._min_attempts = min_attempts
        self._min_retry_s = min_retry_s
        self._random = random
        self._clock = clock
        self._fruitless_attempts = 0
        self._progress = clock()
        self.made = 0

    def failed(self, brought: int, after_s: float = 0.0) -> float | None:
        """One more failed, having brought so many bytes: seconds to wait, or None when it was the last."""
        self.made += 1
        self._fruitless_attempts += 1
        now = self._clock()
        if brought >= PROGRESS:
            self._fruitless_attempts, self._progress = 1, now
        wait_s = (0.5 + self._random() / 2) * min(MAX_DELAY_S, FIRST_S * 2.0 ** min(self._fruitless_attempts - 1, 30))
        if self._fruitless_attempts >= self._min_attempts:
            left_s = self._progress + self._min_retry_s - now
            if left_s <= 0:
                return None
            wait_s = min(wait_s, left_s)
        return max(wait_s, min(after_s, MAX_RETRY_AFTER_S))


def retry_after(value: str, now: datetime) -> float:
    """Seconds that a Retry-After field asks for (RFC 9110 10.2.3); 0 where it cannot be understood."""
    if _SECONDS.fullmatch(value.strip()):
        return float(value)
    try:
        until = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return 0.0
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - now).total_seconds())
