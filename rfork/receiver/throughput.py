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
NO_SOURCES: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Sample:
    """Byte counts at one time."""

    at: float
    total: int
    by_source: Mapping[str, int]


class ThroughputMeter:
    """Current and maximum rates over windows of about `window_s`, in total and by source."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.bytes_per_s = 0.0
        """Over the last window; before its end, the mean so far."""
        self.max_bytes_per_s: float | None = None
        """None before the end of the first window."""
        self.source_bytes_per_s: Mapping[str, float] = {}
        """Same as `bytes_per_s`, by source, for sources that served bytes in the window."""
        self.max_source_bytes_per_s: Mapping[str, float] = {}
        """By source, each over its own fastest window; empty before the end of the first."""
        self._window_s = window_s
        self._samples: deque[_Sample] = deque()

    def add(self, now: float, total: int, by_source: Mapping[str, int] = NO_SOURCES) -> None:
        """Record that `total` bytes had arrived at `now`, and the bytes from each source.

        They need not add up: bytes of a source may count only once they are verified.
        """
        self._samples.append(_Sample(now, total, by_source))
        while len(self._samples) > 2 and now - self._samples[1].at >= self._window_s:
            self._samples.popleft()
        before = self._samples[0]
        elapsed_s = now - before.at
        if elapsed_s > 0:
            self.bytes_per_s = max(0.0, (total - before.total) / elapsed_s)
            added = {name: count - before.by_source.get(name, 0) for name, count in by_source.items()}
            self.source_bytes_per_s = {name: count / elapsed_s for name, count in added.items() if count > 0}
        if elapsed_s >= self._window_s:
            self.max_bytes_per_s = max(self.max_bytes_per_s or 0.0, self.bytes_per_s)
            self.max_source_bytes_per_s = {
                **self.max_source_bytes_per_s,
                **{
                    name: max(rate, self.max_source_bytes_per_s.get(name, 0.0))
                    for name, rate in self.source_bytes_per_s.items()
                },
            }

    def efficiency(self, nbytes: int, seconds: float) -> float | None:
        """Return the rate of `nbytes` in `seconds` relative to the maximum; None if that is unknown."""
        return nbytes / seconds / self.max_bytes_per_s if self.max_bytes_per_s and seconds else None


def measurable_bytes(bytes_by_source: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of sources that have a rate: a loader's bytes are known only at its end."""
    return {name: count for name, count in bytes_by_source.items() if source_type(name) != "loader"}


def top_rates(rates: Mapping[str, float]) -> dict[str, float]:
    """Return rates by source for reports: whole bytes per second, fastest first, at most `MAX_RATES`."""
    ranked = sorted(rates.items(), key=lambda item: -item[1])[:MAX_RATES]
    return {name: float(round(rate)) for name, rate in ranked}
