"""Cases of `benchmarks.disturb`, the results of their slots, and how slots are pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

ReaderTransport = Literal["idle", "http", "transfer_engine", "gloo"]


@dataclass(frozen=True, slots=True)
class DisturbCase:
    """`readers` fork the weights over `transport` in a loop; the governor is the product's default, or off.

    `serves`: the seed processes requests meanwhile; otherwise it idles and only the transfer speed counts.
    `is_other_core`: its steps run on a core, and without the interpreter, that its exporters do not use.
    """

    transport: ReaderTransport
    readers: int = 0
    governed: bool = True
    serves: bool = True
    slot: int = 0
    is_other_core: bool = False

    @property
    def name(self) -> str:
        """Name of the contender."""
        suffix = ", steps on another core" if self.is_other_core else ""
        if self.transport == "idle":
            return f"idle, slot {self.slot}{suffix}"
        governor_label = "" if self.transport == "gloo" else f", governor {'on' if self.governed else 'off'}"
        idles = "" if self.serves else ", the seed idles"
        return (
            f"{self.transport}, {self.readers} reader{'s' if self.readers > 1 else ''}{governor_label}{idles}{suffix}"
        )


@dataclass
class SlotResult:
    """Pooled results of the slots of one case: seconds of each request and each token, and bytes read.

    `cpu_s`: CPU time of the seed's process, measured only while it idles.
    """

    requests: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: float = 0.0
    bytes_read: int = 0
    cpu_s: float = 0.0

    def add(self, other: SlotResult) -> None:
        """Pool another slot of the same case."""
        self.requests += other.requests
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.bytes_read += other.bytes_read
        self.cpu_s += other.cpu_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second that the seed generated."""
        return len(self.tokens) / self.seconds

    @property
    def core_s_per_byte(self) -> float:
        """Seconds of a core that the seed needed for each byte while it idled."""
        return self.cpu_s / self.bytes_read

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that all readers together received."""
        return self.bytes_read / self.seconds


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile `share` of `values` (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]
