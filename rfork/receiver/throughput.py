"""Throughput of a fork: current and maximum, in total and by source. Runs on the target."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rfork.schema import source_type
from rfork.schema.types import MAX_RATES

WINDOW_S: Final = 1.0
"""Approximate length of the windows for rates: shorter ones would measure single chunks, not the link."""
ZERO_SAMPLE: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Sample:
    """Byte counts at one time."""

    at: float
    total: int
    sources: Mapping[str, int]


class ThroughputMeter:
    """The current and the maximum rate in bytes per second, over windows of about `window_s`."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.best: float | None = None
        """None before the end of the first window."""
        self.last = 0.0
        """Over the last window; before its end, the mean so far."""
        self.best_sources: Mapping[str, float] = {}
        """By source, each over its own best window; empty before the end of the first."""
        self.last_sources: Mapping[str, float] = {}
        """Same as `last`, by source, for sources that served bytes."""
        self._window_s = window_s
        self._points: deque[_Sample] = deque()

    def add(self, now: float, total: int, sources: Mapping[str, int] = ZERO_SAMPLE) -> None:
        """Record that `total` bytes had arrived at `now`, and the bytes from each source.

        They need not add up: bytes of a source may count only once they are verified.
        """
        self._points.append(_Sample(now, total, sources))
        while len(self._points) > 2 and now - self._points[1].at >= self._window_s:
            self._points.popleft()
        before = self._points[0]
        passed_s = now - before.at
        if passed_s > 0:
            self.last = max(0.0, (total - before.total) / passed_s)
            grown = {name: count - before.sources.get(name, 0) for name, count in sources.items()}
            self.last_sources = {name: count / passed_s for name, count in grown.items() if count > 0}
        if passed_s >= self._window_s:
            self.best = max(self.best or 0.0, self.last)
            better = {name: max(rate, self.best_sources.get(name, 0.0)) for name, rate in self.last_sources.items()}
            self.best_sources = {**self.best_sources, **better}

    def efficiency(self, nbytes: int, seconds: float) -> float | None:
        """Return the rate of `nbytes` in `seconds` relative to the maximum; None if that is unknown."""
        return nbytes / seconds / self.best if self.best and seconds else None


def measurable_bytes(bytes_by_source: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of sources that have a rate: a loader's bytes are known only at its end."""
    return {name: count for name, count in bytes_by_source.items() if source_type(name) != "loader"}


def top_rates(rates: Mapping[str, float]) -> dict[str, float]:
    """Return rates by source for reports: whole bytes per second, fastest first, at most `MAX_RATES`."""
    ranked = sorted(rates.items(), key=lambda item: -item[1])[:MAX_RATES]
    return {name: float(round(rate)) for name, rate in ranked}
