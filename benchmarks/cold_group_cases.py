"""The cases of `benchmarks.cold_group`: who starts, and from what. Values, nothing runs here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.fanout_messages import FanoutResponse
from benchmarks.netlab import Traffic

STORE: Final = "store"
"""The host of the object store."""
StoredForm = Literal["snapshot", "checkpoint"]


@dataclass(frozen=True)
class ColdGroupCase:
    """`count` processes start at once and read the weights as `stored_form`.

    `independent`: each by itself; else they share a planner. `kills_member`: the last of them dies in mid-read.
    `is_limit`: no product, but one plain TCP connection from the store's host.
    """

    count: int
    stored_form: StoredForm = "snapshot"
    independent: bool = False
    kills_member: bool = False
    is_limit: bool = False

    @property
    def name(self) -> str:
        """As tables call it."""
        if self.is_limit:
            return "limit: TCP"
        group_label = (
            f"{self.count} alone" if self.independent else f"group of {self.count}" if self.count > 1 else "one"
        )
        return f"{group_label}, {self.stored_form}{', one killed' if self.kills_member else ''}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts whose processes start."""
        return hosts_of(self.count)

    @property
    def killed_host(self) -> str | None:
        """The host whose process dies."""
        return self.hosts[-1] if self.kills_member else None

    @property
    def min_time(self) -> float:
        """The least time in S/B: the store's link carries what it has to give."""
        return float(self.count) if self.independent else 1.0


@dataclass(frozen=True)
class ColdGroupOutcome:
    """What came of one run: the go, what the processes that lived said, and what went over the links."""

    started: float
    responses: Mapping[str, FanoutResponse]
    traffic: Mapping[str, Traffic]
    cpu_busy: float

    @property
    def seconds(self) -> float:
        """From the go to the end of the last."""
        return max(response.ended for response in self.responses.values()) - self.started

    @property
    def sent(self) -> int:
        """Bytes that left the store's host, headers and repeated packets included."""
        return self.traffic[STORE].sent

    @property
    def reported(self) -> int:
        """Bytes that the forks say they read from the store."""
        return sum(response.storage_bytes for response in self.responses.values())


def hosts_of(count: int) -> tuple[str, ...]:
    """Names of so many hosts."""
    return tuple(f"h{number}" for number in range(1, count + 1))
