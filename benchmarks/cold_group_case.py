"""The cases of `benchmarks.cold_group`: who starts, and from what. Values, nothing runs here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.fanout_wire import Answer
from benchmarks.netlab import Traffic

STORE: Final = "store"
"""The host of the object store."""
Kind = Literal["snapshot", "checkpoint"]


@dataclass(frozen=True)
class Case:
    """`count` processes start at once and read the weights as `kind`.

    `alone`: each by itself; else they share a planner. `killed`: the last of them dies in mid-read.
    `limit`: no product, but one plain TCP connection from the store's host.
    """

    count: int
    kind: Kind = "snapshot"
    alone: bool = False
    killed: bool = False
    limit: bool = False

    @property
    def name(self) -> str:
        """As tables call it."""
        if self.limit:
            return "limit: TCP"
        who = f"{self.count} alone" if self.alone else f"group of {self.count}" if self.count > 1 else "one"
        return f"{who}, {self.kind}{', one killed' if self.killed else ''}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts whose processes start."""
        return hosts_of(self.count)

    @property
    def victim(self) -> str | None:
        """The host whose process dies."""
        return self.hosts[-1] if self.killed else None

    @property
    def bound(self) -> float:
        """The least time in S/B: the store's link carries what it has to give."""
        return float(self.count) if self.alone else 1.0


@dataclass(frozen=True)
class Outcome:
    """What came of one run: the go, what the processes that lived said, and what went over the links."""

    started: float
    answers: Mapping[str, Answer]
    traffic: Mapping[str, Traffic]
    busy: float

    @property
    def seconds(self) -> float:
        """From the go to the end of the last."""
        return max(answer.ended for answer in self.answers.values()) - self.started

    @property
    def sent(self) -> int:
        """Bytes that left the store's host, headers and repeated packets included."""
        return self.traffic[STORE].sent

    @property
    def reported(self) -> int:
        """Bytes that the forks say they read from the store."""
        return sum(answer.storage_bytes for answer in self.answers.values())


def hosts_of(count: int) -> tuple[str, ...]:
    """Names of so many hosts."""
    return tuple(f"h{number}" for number in range(1, count + 1))
