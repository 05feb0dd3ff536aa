"""Reads in flight, and the rate while there are any. Runs on the target.

A target that waits for its sources reads slowly, and so does one with a slow link. They differ in the rate while chunks
were being read: time without a read in flight does not count.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

CHUNK_TIME_ALPHA: Final = 0.3
"""Weight of the newest read in the mean duration of reads."""
ACTIVE_WINDOW_S: Final = 1.0
"""Seconds with a read in flight after which older ones have little weight in the rate."""
MIN_ACTIVE_S: Final = 0.001
"""Shorter reading shows no rate."""

KeyT = TypeVar("KeyT", bound=Hashable)


class ActiveRates(NamedTuple):
    """Rates while chunks were being read over the network, in bytes per second."""

    total: float | None
    """From any peer; None before the first read."""
    by_source: Mapping[str, float]


class ReadInFlight(NamedTuple):
    """A chunk that was requested and has not arrived."""

    began_at: float
    chunk_bytes: int


@dataclass(slots=True)
class SourceReads(Generic[KeyT]):
    """Reads from one source, or from several together. Pure: times are those of one monotonic clock, in seconds."""

    in_flight: dict[KeyT, ReadInFlight] = field(default_factory=dict)
    chunk_s: float | None = None
    """Mean duration of the reads that ended."""
    _bytes: float = 0.0
    """Bytes received, with less weight the older they are."""
    _active_s: float = 0.0
    """Seconds with a read in flight, weighted alike."""
    _counted_at: float = 0.0

    def start(self, key: KeyT, chunk_bytes: int, now: float) -> None:
        """Record that a chunk is requested."""
        self._count(now)
        self.in_flight[key] = ReadInFlight(now, chunk_bytes)

    def received(self, key: KeyT, seconds: float, now: float) -> None:
        """Record that a chunk has arrived, `seconds` after its source began to send it."""
        self._count(now)
        read = self.in_flight.pop(key, None)
        self._bytes += read.chunk_bytes if read is not None else 0
        mean = self.chunk_s
        self.chunk_s = seconds if mean is None else mean + CHUNK_TIME_ALPHA * (seconds - mean)

    def failed(self, key: KeyT, now: float) -> None:
        """Record that a read ended without its chunk."""
        self._count(now)
        self.in_flight.pop(key, None)

    def expected_bytes(self, now: float) -> float:
        """Return how many bytes in flight have arrived, if their reads take as long as others did; at first all."""
        reads, mean_s = self.in_flight.values(), self.chunk_s
        if mean_s is None:
            return sum(read.chunk_bytes for read in reads)
        mean_s = max(mean_s, 1e-9)
        return sum(read.chunk_bytes * min(1.0, (now - read.began_at) / mean_s) for read in reads)

    def bytes_per_s(self, now: float) -> float | None:
        """Return the rate over about the last `ACTIVE_WINDOW_S` with a read in flight; None before there were any.

        Until the first chunk has arrived it is an upper bound.
        """
        received, active_s = self._weighted(now)
        return (received + self.expected_bytes(now)) / active_s if active_s >= MIN_ACTIVE_S else None

    def _count(self, now: float) -> None:
        self._bytes, self._active_s = self._weighted(now)
        self._counted_at = now

    def _weighted(self, now: float) -> tuple[float, float]:
        elapsed_s = now - self._counted_at
        if not self.in_flight or elapsed_s <= 0:
            return self._bytes, self._active_s
        weight = math.exp(-elapsed_s / ACTIVE_WINDOW_S)
        return self._bytes * weight, self._active_s * weight + elapsed_s
