"""Memory of a leader: what it has done, so that nothing is done twice."""

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
"""Maximum number of remembered removals and Events."""


@dataclass
class LeaderState:
    """Actions of a leader since it became the leader."""

    missing_replicas: dict[str, MissingReplicas] = field(default_factory=dict)
    known_pods: frozenset[str] = frozenset()
    """UIDs of the Pods that the planner has known."""
    announced_sizes: dict[str, int] | None = None
    """Reported sizes of workloads, by UID; see `scaleup_sync.announced_sizes`."""
    mismatches: dict[str, ScaleUpMismatch] = field(default_factory=dict)
    announced_at: dict[str, float] = field(default_factory=dict)
    """When each scale-up was last announced, by its id."""
    finished_before_lead: frozenset[str] = frozenset()
    """UIDs of the Pods that were deleted or finished when it became the leader."""
    removed: dict[str, None] = field(default_factory=dict)
    cost_changed_at: dict[str, float] = field(default_factory=dict)
    """When the deletion cost of each Pod was last changed, by UID."""
    mixed_since: dict[str, float] = field(default_factory=dict)
    """Since when the Pods of each workload have several versions of a model, by UID."""
    written_conditions: dict[str, WrittenCondition] = field(default_factory=dict)
    emitted_events: dict[str, None] = field(default_factory=dict)
    """Keys of written Events, oldest first. The planner's lists may contain their causes again."""
    affected_workloads: dict[str, ObjectRef] = field(default_factory=dict)
    """Workloads whose Pods started since the planner stopped responding, by UID."""
    notified_workloads: dict[str, ObjectRef] = field(default_factory=dict)
    """Those of them that got an Event about it."""
    scaleup_events: dict[str, EventToEmit] = field(default_factory=dict)
    """Events of announced scale-ups that are not written yet, by the scale-up's id."""


def trim(kept: dict[str, None], keys: Iterable[str]) -> None:
    """Add keys, then drop the oldest ones over `MAX_ENTRIES`."""
    kept |= dict.fromkeys(keys)
    while len(kept) > MAX_ENTRIES:
        del kept[next(iter(kept))]
