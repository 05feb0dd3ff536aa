"""Forecast for the replicas of a scale-up: available seeds, and bytes to transfer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from planner.state import PlannerState
from rfork.weights_version import short


@dataclass
class _ReplicaShape:
    """The ranks of one role, for replicas of one version and size."""

    min_ranks: int
    """Minimum number of ranks; expert parallelism may add more."""
    seeds: dict[str, int] = field(default_factory=dict)
    """Number of seeds by rank key, for the known ranks."""
    image_bytes: int = 0
    members: int = 0

    @property
    def min_seeds(self) -> int:
        """Number of seeds of the rank that has the fewest."""
        return min(self.seeds.values()) if len(self.seeds) >= self.min_ranks else 0

    @property
    def score(self) -> tuple[int, int]:
        """A sort key: the shape with the greatest one is forked from."""
        return self.min_seeds, self.members


@dataclass(frozen=True)
class ScaleUpForecast:
    """Expected sources and size for the replicas of a scale-up."""

    seeds: int
    image_bytes: int
    reason: str

    @classmethod
    def of(cls, state: PlannerState, model: str, version: str | None = None) -> Self:
        """Return the forecast for replicas of a version; without one, of the version with the most seeds.

        If replicas of different sizes serve it, the size with the most seeds counts.
        """
        shapes: dict[str, dict[tuple[str, int, int, int], _ReplicaShape]] = {}
        for group in state.groups_of(model):
            if version is not None and group.version != version:
                continue
            member = state.instance(next(iter(group.sources)))
            if member is None:
                continue
            rank = member.report.rank
            shape_key = group.version, rank.tp_size, rank.pp_size, rank.ep_size
            of_role = shapes.setdefault(rank.role, {})
            shape = of_role.setdefault(shape_key, _ReplicaShape(rank.tp_size * rank.pp_size))
            shape.seeds[group.rank_key] = sum(
                source.complete and source.state != "draining" and not source.quarantine
                for source in group.sources.values()
            )
            shape.image_bytes += member.report.image_bytes
            shape.members += len(group.sources)
        best = [max(of_role.values(), key=lambda shape: shape.score) for of_role in shapes.values()]
        image_bytes = sum(shape.image_bytes for shape in best)
        return cls(min((shape.min_seeds for shape in best), default=0), image_bytes, _reason(model, version, best))


def _reason(model: str, version: str | None, best: Iterable[_ReplicaShape]) -> str:
    is_single_rank = "one replica reads storage for all, or each loads by its engine's loader"
    seed_counts = [count for shape in best for count in shape.seeds.values() if count]
    if not seed_counts:
        subject = f"version {short(version)} of {model}" if version else model
        return f"no instance has {subject}: {is_single_rank}"
    lacking = sorted(key for shape in best for key, count in shape.seeds.items() if not count)
    unknown = sum(max(0, shape.min_ranks - len(shape.seeds)) for shape in best)
    seeds = f"{min(seed_counts)} seed{'s' if min(seed_counts) > 1 else ''}"
    if not (lacking or unknown):
        return f"they fork from {seeds}"
    more = f" (and {len(lacking) + unknown - 1} more)" if len(lacking) + unknown > 1 else ""
    shape_name = f"rank {lacking[0]}{more}" if lacking else f"{unknown} of the ranks"
    return f"no instance has {shape_name}: {is_single_rank}; other ranks fork from {seeds}"
