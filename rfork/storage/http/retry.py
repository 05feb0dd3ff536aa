"""Retry policy of storage requests: number of attempts and delays. Uses no threads or sockets."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Final

FIRST_DELAY_S: Final = 0.1
"""Maximum delay after the first failure; doubles with each further one."""
MAX_DELAY_S: Final = 5.0
"""Maximum delay after any failure."""
MAX_RETRY_AFTER_S: Final = 30.0
"""Maximum delay that a server can request with Retry-After."""
MIN_PROGRESS_BYTES: Final = 1 << 20
"""Bytes that an attempt must transfer to reset the attempt count. Without a minimum, a server that breaks off
after every few bytes would be retried forever.
"""

_SECONDS = re.compile(r"[0-9]{1,9}")


class RetryableError(Exception):
    """A failure after which a retry may succeed. `after_s`: delay that the server requested."""

    def __init__(self, cause: str, after_s: float = 0.0) -> None:
        super().__init__(cause)
        self.after_s = after_s


class RetryBudget:
    """Retry budget for one range: gives up after a number of fruitless attempts, but not before a minimum
    time.

    A server that restarts or throttles its clients needs longer than a few quick attempts. Delays grow
    exponentially, each with jitter over its upper half (`random` returns values in [0, 1)).
    """

    def __init__(
        self, min_attempts: int, min_retry_s: float, random: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._min_attempts = min_attempts
        self._min_retry_s = min_retry_s
        self._random = random
        self._clock = clock
        self._fruitless_attempts = 0
        self._progressed_at = clock()
        self.failed_attempts = 0

    def failed(self, transferred_bytes: int, after_s: float = 0.0) -> float | None:
        """Record a failed attempt that transferred `transferred_bytes` bytes; return the delay in seconds, or None to
        give up.
        """
        self.failed_attempts += 1
        self._fruitless_attempts += 1
        now = self._clock()
        if transferred_bytes >= MIN_PROGRESS_BYTES:
            self._fruitless_attempts, self._progressed_at = 1, now
        wait_s = (0.5 + self._random() / 2) * min(
            MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._fruitless_attempts - 1, 30)
        )
        if self._fruitless_attempts >= self._min_attempts:
            remaining_s = self._progressed_at + self._min_retry_s - now
            if remaining_s <= 0:
                return None
            wait_s = min(wait_s, remaining_s)
        return max(wait_s, min(after_s, MAX_RETRY_AFTER_S))


def retry_after(value: str, now: datetime) -> float:
    """Return the seconds that a Retry-After field requests (RFC 9110 10.2.3); 0 if it is invalid."""
    if _SECONDS.fullmatch(value.strip()):
        return float(value)
    try:
        until = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return 0.0
    if until.tzinfo is None:
        until = until.replace(tzinfo=timezone.utc)
    return max(0.0, (until - now).total_seconds())
