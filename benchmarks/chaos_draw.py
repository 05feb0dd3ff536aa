"""The rounds of `benchmarks.chaos`: what stands where, and what is done to whom and when. Values only.

A round is drawn from its number alone, so that one that went wrong can be run again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["kill", "stop", "cut", "loss", "full", "torn"]
Role = Literal["seed", "relay", "target", "planner", "redis"]
Start = Literal["seeds", "checkpoint", "snapshot"]
Store = Literal["memory", "redis"]

STRIKES: Final[Sequence[tuple[Kind, Role]]] = (
    ("kill", "seed"), ("kill", "relay"), ("kill", "target"), ("kill", "planner"), ("kill", "redis"),
    ("stop", "seed"), ("stop", "relay"), ("stop", "target"), ("stop", "planner"), ("stop", "redis"),
    ("cut", "seed"), ("cut", "relay"), ("cut", "target"), ("cut", "planner"),
    ("loss", "seed"), ("loss", "relay"), ("loss", "target"), ("loss", "planner"),
    ("full", "seed"), ("full", "target"),
    ("torn", "target"),
)  # fmt: skip
"""What can be done to whom. full: no byte is left on the disk that a target keeps what it has on, or that
a seed writes a snapshot to; torn: the file that a target reads for all loses its second half."""
SHORT: Final = (1085, 1291, 288, 1216, 281, 158, 698)
"""Rounds that do each kind once, to each role, on links that carry their image in two seconds; the first
four do so by themselves."""
COLD: Final = 0.4
"""Share of the rounds, of those where it is left open, that start from storage."""
TWICE: Final = 0.4
"""Share of the rounds in which two things are done."""
SIZES_MIB: Final = (32, 40, 48, 64)
NEVER: Final = 0.3
"""Share of the links that stay cut to the end of the round."""


@dataclass(frozen=True)
class Fault:
    """What is done to whom, once target number `watched` has `at` of the image (0 to 1).

    `choice` (0 to 1) says which of those of that role it is. `lasts_s` seconds later it is undone: the
    stopped goes on, the cut link carries again, the planner and Redis are back, and so is a target that
    kept what it had, to fork again; None: not before the round's end.
    """

    kind: Kind
    role: Role
    watched: int
    at: float
    choice: float
    lasts_s: float | None


@dataclass(frozen=True)
class Round:
    """One round. Without seeds (`start`) the targets find a checkpoint, or a snapshot, and no peer.

    `fallback`: targets of a round with seeds have a checkpoint to fall back to; `keeps`: targets keep what
    they have on a disk.
    """

    number: int
    start: Start
    seeds: int
    targets: int
    size_mib: int
    store: Store
    fallback: bool
    keeps: bool
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        """As its model is called."""
        return f"round{self.number}"

    @property
    def seed_hosts(self) -> tuple[str, ...]:
        """Hosts of the seeds."""
        return tuple(f"seed{number}" for number in range(self.seeds))

    @property
    def target_hosts(self) -> tuple[str, ...]:
        """Hosts of the targets."""
        return tuple(f"t{number}" for number in range(self.targets))

    @property
    def line(self) -> str:
        """The round on one line."""
        start = f"{self.seeds} seeds" if self.start == "seeds" else f"cold from a {self.start}"
        more = (", fallback" if self.fallback else "") + (", keeps" if self.keeps else "")
        faults = "; ".join(
            f"{fault.kind} {fault.role} at {fault.at:.2f} of t{fault.watched}"
            + (f" for {fault.lasts_s:.1f} s" if fault.lasts_s is not None else "")
            for fault in self.faults
        )
        return f"{start}, {self.targets} targets, {self.size_mib} MiB, {self.store}{more}: {faults}"


def draw(number: int) -> Round:
    """The round of this number."""
    chance = random.Random(number)
    kind, role = chance.choice(STRIKES)
    start = _start(chance, kind, role)
    store: Store = "redis" if role == "redis" or chance.random() < 0.3 else "memory"
    keeps = (kind, role) == ("full", "target") or chance.random() < 0.3
    seeds = chance.choice((1, 2)) if start == "seeds" else 0
    targets = chance.choice((3, 4, 5))
    strikes = [(kind, role)]
    if chance.random() < TWICE:
        strikes.append(chance.choice([strike for strike in STRIKES if _fits(strike, start, store, keeps)]))
    return Round(
        number=number,
        start=start,
        seeds=seeds,
        targets=targets,
        size_mib=chance.choice(SIZES_MIB),
        store=store,
        fallback=start == "seeds" and chance.random() < 0.4,
        keeps=keeps,
        faults=tuple(_fault(chance, strike, targets, keeps) for strike in strikes),
    )


def _start(chance: random.Random, kind: Kind, role: Role) -> Start:
    if role == "seed" or (kind != "torn" and chance.random() >= COLD):
        return "seeds"
    return chance.choice(("checkpoint", "snapshot"))


def _fits(strike: tuple[Kind, Role], start: Start, store: Store, keeps: bool) -> bool:
    kind, role = strike
    possible = {
        "seed": start == "seeds",
        "redis": store == "redis",
        "target": (kind != "full" or keeps) and (kind != "torn" or start != "seeds"),
    }
    return possible.get(role, True)


def _fault(chance: random.Random, strike: tuple[Kind, Role], targets: int, keeps: bool) -> Fault:
    kind, role = strike
    lasts_s: float | None = None
    if kind == "stop":
        lasts_s = chance.uniform(1.0, 3.0) if role in ("planner", "redis") else chance.uniform(2.5, 6.0)
    elif kind == "cut":
        lasts_s = chance.uniform(1.0, 6.0) if role == "planner" or chance.random() >= NEVER else None
    elif role in ("planner", "redis"):
        lasts_s = chance.uniform(0.0, 3.0) if kind == "kill" else None
    elif kind == "kill" and role != "seed" and keeps:
        lasts_s = chance.uniform(0.1, 1.0)
    return Fault(
        kind, role,
        watched=chance.randrange(targets), at=chance.uniform(0.0, 0.95),
        choice=chance.random(), lasts_s=lasts_s,
    )  # fmt: skip
