"""What `benchmarks.disturb` measures: its cases, what a slot of one gave, and how slots are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

ReaderTransport = Literal["idle", "http", "transfer_engine", "gloo"]


@dataclass(frozen=True, slots=True)
class DisturbCase:
    """`readers` take the weights over `transport` again and again; the governor is the product's, or off.

    `serves`: the seed answers requests meanwhile; else it idles, and only the speed is of interest.
    """

    transport: ReaderTransport
    readers: int = 0
    governed: bool = True
    serves: bool = True
    slot: int = 0

    @property
    def name(self) -> str:
        """The contender's name."""
        if self.transport == "idle":
            return f"idle, slot {self.slot}"
        governor_label = "" if self.transport == "gloo" else f", governor {'on' if self.governed else 'off'}"
        idles = "" if self.serves else ", the seed idles"
        return f"{self.transport}, {self.readers} reader{'s' if self.readers > 1 else ''}{governor_label}{idles}"


@dataclass
class SlotResult:
    """What the slots of one case gave: seconds of each request and each token, and what readers got."""

    requests: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: float = 0.0
    bytes_read: int = 0

    def add(self, other: SlotResult) -> None:
        """Pool another slot of the same case."""
        self.requests += other.requests
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.bytes_read += other.bytes_read

    @property
    def tokens_per_s(self) -> float:
        """Tokens the seed made in a second."""
        return len(self.tokens) / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """What all readers together got in a second."""
        return self.bytes_read / self.seconds


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]
