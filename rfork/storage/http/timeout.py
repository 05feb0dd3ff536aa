"""How long an answer is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from rfork.storage.http.retry import RetryableError

MIN_BYTES_PER_TIMEOUT: Final = 16 << 10
"""Bytes of a body that must come within each timeout, or what is left of it: else a server only trickles."""


class ReadTimeout:
    """How long to wait for an answer, and what to do once the whole takes long.

    Its head, or a refusal whole, must come within the timeout; `MIN_BYTES_PER_TIMEOUT` bytes of a body in each one after.
    `late` is called `delay_s` after the request was sent, and says after how many seconds to call it again.
    """

    def __init__(
        self, timeout_s: float, due_s: float | None = None, late: Callable[[], float | None] | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._late = late
        self.began = self._since = time.monotonic()
        self._received_bytes = 0
        self._due = self.began + due_s if due_s is not None and late is not None else None

    def remaining(self) -> float:
        """Seconds the next step may take. Raises Passing when there are none."""
        now = time.monotonic()
        if now - self._since >= self._timeout_s:
            some = f"no more than {self._received_bytes} bytes in" if self._received_bytes else "nothing for"
            raise RetryableError(f"sent {some} {self._timeout_s:g} s")
        # A receive that times out with some bytes does not tell when they came: so ask often enough.
        step = min(self._timeout_s / 4, self._since + self._timeout_s - now)
        if self._due is not None and self._late is not None:
            if now >= self._due:
                again_s = self._late()
                self._due = now + again_s if again_s is not None else None
            if self._due is not None:
                step = min(step, self._due - now)
        return max(step, 0.001)

    def record(self, count: int) -> None:
        """Say that so many bytes of a head or of a refusal's text came."""
        self._received_bytes += count

    def record_body(self, count: int) -> None:
        """Say that so many bytes of a body came: after enough of them the time begins anew."""
        self._received_bytes += count
        if self._received_bytes >= MIN_BYTES_PER_TIMEOUT:
            self.reset()

    def reset(self) -> None:
        """Have the time begin anew."""
        self._since, self._received_bytes = time.monotonic(), 0
