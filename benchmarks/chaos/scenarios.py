"""Rounds of `benchmarks.chaos`: hosts, and the time and role of each fault. Values only.

A round is generated from its number alone, so that a failed one can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

FaultType = Literal["kill", "stop", "cut", "loss", "full", "torn"]
Role = Literal["seed", "relay", "target", "planner", "redis"]
Start = Literal["seeds", "checkpoint", "snapshot"]
StoreType = Literal["memory", "redis"]

FAULT_ROLES: Final[Sequence[tuple[FaultType, Role]]] = (
    ("kill", "seed"), ("kill", "relay"), ("kill", "target"), ("kill", "planner"), ("kill", "redis"),
    ("stop", "seed"), ("stop", "relay"), ("stop", "target"), ("stop", "planner"), ("stop", "redis"),
    ("cut", "seed"), ("cut", "relay"), ("cut", "target"), ("cut", "planner"),
    ("loss", "seed"), ("loss", "relay"), ("loss", "target"), ("loss", "planner"),
    ("full", "seed"), ("full", "target"),
    ("torn", "target"),
)  # fmt: skip
"""Faults and the roles they apply to. full: the disk that a target keeps its chunks on, or that a seed writes
a snapshot to, has no byte left; torn: the file that one target reads for all loses its second half.
"""
SHORT_ROUNDS: Final = (1085, 1291, 288, 1216, 281, 158, 698)
"""Rounds that cover each fault and each role on links that carry their image in two seconds; the first four
cover each fault.
"""
COLD_PROBABILITY: Final = 0.4
"""Share of rounds that start from storage, where the fault allows both."""
SECOND_FAULT_PROBABILITY: Final = 0.4
"""Share of rounds with two faults."""
SIZES_MIB: Final = (32, 40, 48, 64)
PERMANENT_CUT_PROBABILITY: Final = 0.3
"""Share of cut links that stay cut to the end of the round."""


@dataclass(frozen=True)
class ChaosFault:
    """A fault, injected once target number `trigger_target` has `trigger_fraction` of the image (0 to 1).

    `choice` (0 to 1) selects one of the hosts with that role. The fault is undone `duration_s` seconds later:
    the stopped process continues, the cut link carries again, the planner and Redis restart, and so does a
    target that kept its chunks, to fork again. None means not before the end of the round.
    """

    fault_type: FaultType
    role: Role
    trigger_target: int
    trigger_fraction: float
    choice: float
    duration_s: float | None


@dataclass(frozen=True)
class ChaosRound:
    """One round. Without seeds (`start`) the targets find a checkpoint or a snapshot, and no peer.

    `fallback`: targets of a round with seeds have a checkpoint to fall back to; `resumes`: targets keep their
    chunks on disk.
    """

    number: int
    start: Start
    seeds: int
    targets: int
    size_mib: int
    store: StoreType
    fallback: bool
    resumes: bool
    faults: tuple[ChaosFault, ...]

    @property
    def name(self) -> str:
        """Name of the round, which is also the name of its model."""
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
    def description(self) -> str:
        """The round in one line."""
        start = f"{self.seeds} seeds" if self.start == "seeds" else f"cold from a {self.start}"
        more = (", fallback" if self.fallback else "") + (", keeps" if self.resumes else "")
        faults = "; ".join(
            f"{fault.fault_type} {fault.role} at {fault.trigger_fraction:.2f} of t{fault.trigger_target}"
            + (f" for {fault.duration_s:.1f} s" if fault.duration_s is not None else "")
            for fault in self.faults
        )
        return f"{start}, {self.targets} targets, {self.size_mib} MiB, {self.store}{more}: {faults}"


def generate_round(number: int) -> ChaosRound:
    """Generate the round with this number."""
    rng = random.Random(number)
    fault_type, role = rng.choice(FAULT_ROLES)
    start = _start(rng, fault_type, role)
    store: StoreType = "redis" if role == "redis" or rng.random() < 0.3 else "memory"
    resumes = (fault_type, role) == ("full", "target") or rng.random() < 0.3
    seeds = rng.choice((1, 2)) if start == "seeds" else 0
    targets = rng.choice((3, 4, 5))
    fault_roles = [(fault_type, role)]
    if rng.random() < SECOND_FAULT_PROBABILITY:
        fault_roles.append(
            rng.choice([fault_role for fault_role in FAULT_ROLES if _is_applicable(fault_role, start, store, resumes)])
        )
    return ChaosRound(
        number=number,
        start=start,
        seeds=seeds,
        targets=targets,
        size_mib=rng.choice(SIZES_MIB),
        store=store,
        fallback=start == "seeds" and rng.random() < 0.4,
        resumes=resumes,
        faults=tuple(_fault(rng, fault_role, targets, resumes) for fault_role in fault_roles),
    )


def _start(rng: random.Random, fault_type: FaultType, role: Role) -> Start:
    if role == "seed" or (fault_type != "torn" and rng.random() >= COLD_PROBABILITY):
        return "seeds"
    return rng.choice(("checkpoint", "snapshot"))


def _is_applicable(fault_role: tuple[FaultType, Role], start: Start, store: StoreType, resumes: bool) -> bool:
    fault_type, role = fault_role
    possible = {
        "seed": start == "seeds",
        "redis": store == "redis",
        "target": (fault_type != "full" or resumes) and (fault_type != "torn" or start != "seeds"),
    }
    return possible.get(role, True)


def _fault(rng: random.Random, fault_role: tuple[FaultType, Role], targets: int, resumes: bool) -> ChaosFault:
    fault_type, role = fault_role
    duration_s: float | None = None
    if fault_type == "stop":
        duration_s = rng.uniform(1.0, 3.0) if role in ("planner", "redis") else rng.uniform(2.5, 6.0)
    elif fault_type == "cut":
        duration_s = rng.uniform(1.0, 6.0) if role == "planner" or rng.random() >= PERMANENT_CUT_PROBABILITY else None
    elif role in ("planner", "redis"):
        duration_s = rng.uniform(0.0, 3.0) if fault_type == "kill" else None
    elif fault_type == "kill" and role != "seed" and resumes:
        duration_s = rng.uniform(0.1, 1.0)
    return ChaosFault(
        fault_type, role,
        trigger_target=rng.randrange(targets), trigger_fraction=rng.uniform(0.0, 0.95),
        choice=rng.random(), duration_s=duration_s,
    )  # fmt: skip
