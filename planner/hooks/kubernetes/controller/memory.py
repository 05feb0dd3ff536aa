"""What a leader remembers of what it has done, so that it is not done twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from planner.hooks.kubernetes.cluster import ObjectRef
from planner.hooks.kubernetes.controller.announcing import Differs
from planner.hooks.kubernetes.controller.coming import Rise
from planner.hooks.kubernetes.controller.readiness import Said
from planner.hooks.kubernetes.controller.telling import Telling

MOST_KEPT: Final = 20_000
"""Instances that were removed, and things that were told, which are remembered."""


@dataclass
class Memory:
    """What a leader has done since it leads."""

    rises: dict[str, Rise] = field(default_factory=dict)
    came: frozenset[str] = frozenset()
    """UIDs of the Pods that the planner has known."""
    spoken: dict[str, int] | None = None
    """Sizes that are no news, by the scale-up's id; see `announcing.spoken_of`."""
    differs: dict[str, Differs] = field(default_factory=dict)
    announced_at: dict[str, float] = field(default_factory=dict)
    """When each scale-up was announced last, by its id."""
    over_before: frozenset[str] = frozenset()
    """UIDs of the Pods that were gone or had ended when it came to lead."""
    removed: dict[str, None] = field(default_factory=dict)
    changed: dict[str, float] = field(default_factory=dict)
    """When each Pod's cost was changed last, by UID."""
    mixed: dict[str, float] = field(default_factory=dict)
    """Since when the Pods of each workload have several versions of a model, by UID."""
    said: dict[str, Said] = field(default_factory=dict)
    told: dict[str, None] = field(default_factory=dict)
    """What Events are about that were told, the first first: some planner's list may have it once more."""
    affected: dict[str, ObjectRef] = field(default_factory=dict)
    """Workloads whose Pods started since the planner is away, by UID."""
    told_away: dict[str, ObjectRef] = field(default_factory=dict)
    """Those of them that were told so."""
    announced: dict[str, Telling] = field(default_factory=dict)
    """Scale-up updates that are still to be sent, by id."""


def remember(kept: dict[str, None], keys: Iterable[str]) -> None:
    """Keep these too, and forget the first of more than `MOST_KEPT`."""
    kept |= dict.fromkeys(keys)
    while len(kept) > MOST_KEPT:
        del kept[next(iter(kept))]
