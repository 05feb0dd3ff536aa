"""Cases of `benchmarks.fanout`, and the outcome of a run. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.fanout.messages import FanoutResponse
from benchmarks.netlab import Traffic

Mode = Literal["limit", "rfork", "star", "doubling"]
SLOW_RATE: Final = 0.25
"""Rate of a slow link, relative to the others."""


@dataclass(frozen=True)
class FanoutCase:
    """A case: `targets` hosts fork from `seeds` hosts.

    `late` of the targets start a quarter of S/B after the others; the links of `slow` targets have a quarter
    of the rate; `seed_rate` is the rate of each seed's link, relative to the targets'.
    """

    mode: Mode
    targets: int
    seeds: int = 1
    late: int = 0
    slow: int = 0
    seed_rate: float = 1.0

    @property
    def name(self) -> str:
        """Name of the case in tables."""
        if self.mode == "limit":
            return "limit: TCP"
        more = f", {self.seeds} seeds" if self.seeds > 1 else ""
        more += f" at {self.seed_rate:g}" if self.seed_rate != 1 else ""
        more += f", {self.late} late" if self.late else ""
        more += f", {self.slow} slow" if self.slow else ""
        return f"{self.mode} {self.targets}{more}"

    @property
    def baseline(self) -> bool:
        """True for a baseline."""
        return self.mode in ("star", "doubling")

    @property
    def undisturbed(self) -> bool:
        """True if all links are alike and all targets start together."""
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
        """Targets that start late."""
        return self.target_hosts[self.targets - self.late :]

    @property
    def slow_hosts(self) -> tuple[str, ...]:
        """Targets with slow links: those in the middle."""
        first = (self.targets - self.slow) // 2
        return self.target_hosts[first : first + self.slow]

    @property
    def min_time(self) -> float:
        """Minimum T that the links allow, in S/B."""
        return max(1.0, 1 / (self.seeds * self.seed_rate), 1 / SLOW_RATE if self.slow else 0.0)


@dataclass(frozen=True)
class FanoutOutcome:
    """Outcome of a run. `started` is the start time (`time.monotonic`); bytes are as the links count them.

    `cpu_busy` is the busy share of the machine's CPU time, `cpu_busy_processes` the share used by the case's
    own processes (without the kernel's work between processes).
    """

    started: float
    responses: Mapping[str, FanoutResponse]
    traffic: Mapping[str, Traffic]
    cpu_busy: float
    cpu_busy_processes: float

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first target to the end of the last."""
        return self.max_seconds(tuple(self.responses))

    def max_seconds(self, hosts: Sequence[str]) -> float:
        """Return the seconds from the start until the last of these was complete."""
        return max(self.responses[host].ended for host in hosts) - self.started

    def max_own_seconds(self, hosts: Sequence[str]) -> float:
        """Return the maximum seconds that one of these took from its own start."""
        return max(self.responses[host].ended - self.responses[host].began for host in hosts)


def doubling(targets: int) -> dict[int, list[int]]:
    """Return the readers of each instance, in order; 0 is the seed, the targets are 1 to N.

    In wave w each of the first 2^w instances serves the one 2^w further on: waves of 1, 2, 4, 8, ….
    """
    return {
        source: [
            source + (1 << wave)
            for wave in range(source.bit_length(), targets.bit_length())
            if source + (1 << wave) <= targets
        ]
        for source in range(targets + 1)
    }
