"""Cases of `benchmarks.cold_group`: which processes start, and from which storage. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.fanout.messages import FanoutResponse
from benchmarks.netlab import Traffic

STORE: Final = "store"
"""Host of the object store."""
StoredForm = Literal["snapshot", "checkpoint"]


@dataclass(frozen=True)
class ColdGroupCase:
    """`count` processes start together and read the weights as `stored_form`.

    `independent`: they load without a planner; otherwise they share one. `kills_member`: the last of them is
    killed during its read. `is_limit`: one plain TCP connection from the store's host instead of rfork.
    """

    count: int
    stored_form: StoredForm = "snapshot"
    independent: bool = False
    kills_member: bool = False
    is_limit: bool = False

    @property
    def name(self) -> str:
        """Name of the case in tables."""
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
        """Host whose process is killed."""
        return self.hosts[-1] if self.kills_member else None

    @property
    def min_time(self) -> float:
        """Minimum time in S/B that the store's link allows."""
        return float(self.count) if self.independent else 1.0


@dataclass(frozen=True)
class ColdGroupOutcome:
    """Outcome of one run: the start time, the responses of the surviving processes, and the traffic."""

    started: float
    responses: Mapping[str, FanoutResponse]
    traffic: Mapping[str, Traffic]
    cpu_busy: float

    @property
    def seconds(self) -> float:
        """Seconds from the start signal to the end of the last process."""
        return max(response.ended for response in self.responses.values()) - self.started

    @property
    def sent(self) -> int:
        """Bytes that left the store's host, headers and retransmissions included."""
        return self.traffic[STORE].sent

    @property
    def reported(self) -> int:
        """Bytes that the forks report as read from the store."""
        return sum(response.storage_bytes for response in self.responses.values())


def hosts_of(count: int) -> tuple[str, ...]:
    """Return the names of `count` hosts."""
    return tuple(f"h{number}" for number in range(1, count + 1))
