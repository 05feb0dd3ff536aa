"""Timeout of HTTP responses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from rfork.storage.http.retry import RetryableError

MIN_BYTES_PER_TIMEOUT: Final = 16 << 10
"""Body bytes that must arrive within each timeout (or the remaining ones), to detect servers that only
trickle.
"""


class ReadTimeout:
    """Timeout of one response, with a callback if the response takes long.

    The head, or an error response with its body, must arrive within the timeout; after that,
    `MIN_BYTES_PER_TIMEOUT` bytes of the body in each timeout. `on_slow` is called `due_s` seconds after the
    request was sent, and returns the seconds until it should be called again.
    """

    def __init__(
        self, timeout_s: float, due_s: float | None = None, on_slow: Callable[[], float | None] | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._on_slow = on_slow
        self.began = self._since = time.monotonic()
        self._received_bytes = 0
        self._due = self.began + due_s if due_s is not None and on_slow is not None else None

    def remaining(self) -> float:
        """Return the seconds that the next step may take. Raises RetryableError after the timeout."""
        now = time.monotonic()
        if now - self._since >= self._timeout_s:
            received = f"only {self._received_bytes} bytes in" if self._received_bytes else "nothing for"
            raise RetryableError(f"the server sent {received} {self._timeout_s:g} s")
        # A receive that times out with partial data does not report when it arrived, so poll often enough.
        step = min(self._timeout_s / 4, self._since + self._timeout_s - now)
        if self._due is not None and self._on_slow is not None:
            if now >= self._due:
                again_s = self._on_slow()
                self._due = now + again_s if again_s is not None else None
            if self._due is not None:
                step = min(step, self._due - now)
        return max(step, 0.001)

    def record(self, count: int) -> None:
        """Record received bytes of a head or of an error response's body."""
        self._received_bytes += count

    def record_body(self, count: int) -> None:
        """Record received bytes of a body; restarts the timeout after enough of them."""
        self._received_bytes += count
        if self._received_bytes >= MIN_BYTES_PER_TIMEOUT:
            self.reset()

    def reset(self) -> None:
        """Restart the timeout."""
        self._since, self._received_bytes = time.monotonic(), 0
