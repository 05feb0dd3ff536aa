"""The cases of `benchmarks.fanout`: who stands where, and what comes of a run. Values, nothing runs here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.fanout_messages import FanoutResponse
from benchmarks.netlab import Traffic

Mode = Literal["limit", "rfork", "star", "doubling"]
SLOW_RATE: Final = 0.25
"""Rate of a slow link, in the others' rate."""


@dataclass(frozen=True)
class FanoutCase:
    """What is run: `targets` hosts fill themselves from `seeds` hosts.

    `late` of the targets come a quarter of S/B after the others; the links of `slow` have a quarter of
    the rate; `seed_rate` is the rate of each seed's link, in the targets' rate.
    """

    mode: Mode
    targets: int
    seeds: int = 1
    late: int = 0
    slow: int = 0
    seed_rate: float = 1.0

    @property
    def name(self) -> str:
        """As tables call it."""
        if self.mode == "limit":
            return "limit: TCP"
        more = f", {self.seeds} seeds" if self.seeds > 1 else ""
        more += f" at {self.seed_rate:g}" if self.seed_rate != 1 else ""
        more += f", {self.late} late" if self.late else ""
        more += f", {self.slow} slow" if self.slow else ""
        return f"{self.mode} {self.targets}{more}"

    @property
    def baseline(self) -> bool:
        """Whether it is there to be compared with."""
        return self.mode in ("star", "doubling")

    @property
    def undisturbed(self) -> bool:
        """Whether all links are alike, and all come at once."""
        return not self.late and not self.slow and self.seed_rate == 1

    @property
    def seed_hosts(self) -> tuple[str, ...]:
        """Names of the seeds' hosts."""
        return tuple(f"seed{number}" for number in range(self.seeds))

    @property
    def target_hosts(self) -> tuple[str, ...]:
        """Names of the targets' hosts; the late ones come last."""
        return tuple(f"t{number:02d}" for number in range(self.targets))

    @property
    def late_hosts(self) -> tuple[str, ...]:
        """The targets that come late."""
        return self.target_hosts[self.targets - self.late :]

    @property
    def slow_hosts(self) -> tuple[str, ...]:
        """The targets with slow links: those in the middle."""
        first = (self.targets - self.slow) // 2
        return self.target_hosts[first : first + self.slow]

    @property
    def min_time(self) -> float:
        """The least T that the links allow, in S/B."""
        return max(1.0, 1 / (self.seeds * self.seed_rate), 1 / SLOW_RATE if self.slow else 0.0)


@dataclass(frozen=True)
class FanoutOutcome:
    """What came of a run. `started` is the go (`time.monotonic`); bytes are as the links count them.

    `cpu_busy` is the part of the machine's processor time that was used, `cpu_busy_processes` what the case's own
    processes used of it (without what the kernel does for them between processes).
    """

    started: float
    responses: Mapping[str, FanoutResponse]
    traffic: Mapping[str, Traffic]
    cpu_busy: float
    cpu_busy_processes: float

    @property
    def seconds(self) -> float:
        """From the go of the first target to the end of the last."""
        return self.max_seconds(tuple(self.responses))

    def max_seconds(self, hosts: Sequence[str]) -> float:
        """Seconds from the go until the last of these was complete."""
        return max(self.responses[host].ended for host in hosts) - self.started

    def max_own_seconds(self, hosts: Sequence[str]) -> float:
        """The most seconds that one of these took from its own start."""
        return max(self.responses[host].ended - self.responses[host].began for host in hosts)


def doubling(targets: int) -> dict[int, list[int]]:
    """Whom each instance gives to, one after the other; 0 is the seed, the targets are 1 to N.

    In wave w each of the first 2^w instances gives to the one 2^w further on: waves of 1, 2, 4, 8, ….
    """
    return {
        source: [
            source + (1 << wave)
            for wave in range(source.bit_length(), targets.bit_length())
            if source + (1 << wave) <= targets
        ]
        for source in range(targets + 1)
    }
