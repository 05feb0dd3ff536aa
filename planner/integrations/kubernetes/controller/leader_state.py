"""What a leader remembers of what it has done, so that it is not done twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from planner.integrations.kubernetes.cluster import ObjectRef
from planner.integrations.kubernetes.controller.events import EventToEmit
from planner.integrations.kubernetes.controller.pending_replicas import MissingReplicas
from planner.integrations.kubernetes.controller.readiness_gate import WrittenCondition
from planner.integrations.kubernetes.controller.scaleup_sync import ScaleUpMismatch

MAX_ENTRIES: Final = 20_000
"""Instances that were removed, and things that were told, which are remembered."""


@dataclass
class LeaderState:
    """What a leader has done since it leads."""

    missing_replicas: dict[str, MissingReplicas] = field(default_factory=dict)
    first_seen: frozenset[str] = frozenset()
    """UIDs of the Pods that the planner has known."""
    announced_sizes: dict[str, int] | None = None
    """Sizes that are no news, by the scale-up's id; see `announcing.announced_sizes`."""
    mismatches: dict[str, ScaleUpMismatch] = field(default_factory=dict)
    announced_at: dict[str, float] = field(default_factory=dict)
    """When each scale-up was announced last, by its id."""
    finished_before_lead: frozenset[str] = frozenset()
    """UIDs of the Pods that were gone or had ended when it came to lead."""
    removed: dict[str, None] = field(default_factory=dict)
    changed: dict[str, float] = field(default_factory=dict)
    """When each Pod's cost was changed last, by UID."""
    mixed: dict[str, float] = field(default_factory=dict)
    """Since when the Pods of each workload have several versions of a model, by UID."""
    written_conditions: dict[str, WrittenCondition] = field(default_factory=dict)
    emitted_events: dict[str, None] = field(default_factory=dict)
    """What Events are about that were told, the first first: some planner's list may have it once more."""
    affected: dict[str, ObjectRef] = field(default_factory=dict)
    """Workloads whose Pods started since the planner is away, by UID."""
    notified_down: dict[str, ObjectRef] = field(default_factory=dict)
    """Those of them that were told so."""
    announced: dict[str, EventToEmit] = field(default_factory=dict)
    """Scale-up updates that are still to be sent, by id."""


def trim(kept: dict[str, None], keys: Iterable[str]) -> None:
    """Keep these too, and forget the first of more than `MAX_ENTRIES`."""
    kept |= dict.fromkeys(keys)
    while len(kept) > MAX_ENTRIES:
        del kept[next(iter(kept))]
