"""Clock that advances only when a test sets it."""

from __future__ import annotations


class FakeClock:
    """Callable clock; `now` is in seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
