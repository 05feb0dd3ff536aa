"""Synchronizes expected replicas with the planner's scale-ups, so that one plan covers all of them.

The id of a scale-up is the UID of its workload plus the version that its Pods state, so that another replica
or a restarted controller can continue with it. Only ids that this controller can have created are withdrawn,
because others (a second cluster, an autoscaler) may announce to the same planner.

The planner counts arrivals itself. A scale-up is announced again only if its remaining number differs from
the controller's: immediately if the workload grew, because the new replicas have no Pods yet; otherwise after
two polls, because the planner's lists are older than the watches and not fetched atomically.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from planner.integrations.kubernetes.controller.observed_state import ObservedState
from planner.integrations.kubernetes.controller.pending_replicas import (
    PendingScaleUp,
    PendingState,
    workload_uid,
)
from rfork.schema import ScaleUpInfo

REANNOUNCE_INTERVAL_S: Final = 10.0
"""Minimum time between two announcements of a workload whose own number of replicas does not grow:
replacement Pods appear one by one, each over minutes.
"""


@dataclass(frozen=True)
class ScaleUpMismatch:
    """The planner expects another number of replicas than this controller."""

    is_too_low: bool
    """True if the planner expects too few."""
    snapshot_at: float
    """Time of the snapshot that first showed it."""


def announced_sizes(
    before: Mapping[str, int] | None, pending: PendingState, reported: Mapping[str, ScaleUpInfo]
) -> dict[str, int]:
    """Return for each workload the size that was already reported. A larger size is a new scale-up.

    `before`: the previous result; None on the first call of a new leader, when everything that the planner
    knows counts as reported.
    """
    expected: dict[str, int] = {}
    known: dict[str, int] = {}
    for name, one in pending.pending_replicas.items():
        uid, replicas = workload_uid(name), one.scaleup.replicas
        expected[uid] = expected.get(uid, 0) + replicas
        known[uid] = known.get(uid, 0) + min(replicas, _remaining(one, reported.get(name)) or 0)
    found: dict[str, int] = {}
    for uid, size in pending.sizes.items():
        unknown = expected.get(uid, 0) - known.get(uid, 0)
        if not unknown:
            found[uid] = size
        elif before is None:
            found[uid] = size - unknown
        else:
            found[uid] = min(size, before.get(uid, 0))
    return found


def find_mismatches(
    pending_scaleups: Mapping[str, PendingScaleUp],
    reported: Mapping[str, ScaleUpInfo],
    own_ids: Iterable[str],
    before: Mapping[str, ScaleUpMismatch],
    snapshot_at: float,
) -> dict[str, ScaleUpMismatch]:
    """Return the planner's scale-ups whose remaining number differs from the expected one.

    `own_ids`: UIDs of everything that this controller may have announced. `before`: the previous result.
    `snapshot_at`: when `reported` was fetched.
    """
    found: dict[str, ScaleUpMismatch] = {}
    own_ids = set(own_ids)
    for uid in reported:
        if uid not in pending_scaleups and workload_uid(uid) not in own_ids:
            continue
        one = pending_scaleups.get(uid)
        left = _remaining(one, reported[uid]) or 0
        if one is not None and one.scaleup.replicas == left:
            continue
        is_too_low = one is not None and one.scaleup.replicas > left
        previous = before.get(uid)
        found[uid] = (
            previous
            if previous is not None and previous.is_too_low == is_too_low
            else ScaleUpMismatch(is_too_low, snapshot_at)
        )
    return found


def to_announce(
    pending_scaleups: Mapping[str, PendingScaleUp],
    reported: Mapping[str, ScaleUpInfo],
    mismatches: Mapping[str, ScaleUpMismatch],
    urgent: AbstractSet[str],
    announced_age_s: Mapping[str, float],
    snapshot_at: float,
) -> tuple[PendingScaleUp, ...]:
    """Return the scale-ups that the planner does not know, or with another number.

    `urgent`: ids that need no second poll. `announced_age_s`: seconds since the last announcement, by id.
    """
    found: list[PendingScaleUp] = []
    for uid, one in pending_scaleups.items():
        left = _remaining(one, reported.get(uid))
        if left == one.scaleup.replicas:
            continue
        is_too_low = left is None or one.scaleup.replicas > left
        is_confirmed = left is None or (uid in mismatches and mismatches[uid].snapshot_at < snapshot_at)
        rested = not is_too_low or announced_age_s.get(uid, REANNOUNCE_INTERVAL_S) >= REANNOUNCE_INTERVAL_S
        if (is_too_low and uid in urgent) or (is_confirmed and rested):
            found.append(one)
    return tuple(found)


def to_withdraw(
    pending_scaleups: Mapping[str, PendingScaleUp],
    reported: Mapping[str, ScaleUpInfo],
    mismatches: Mapping[str, ScaleUpMismatch],
    snapshot_at: float,
) -> tuple[str, ...]:
    """Return the ids of this controller's scale-ups from which no replica is expected any more."""
    obsolete = (uid for uid in mismatches if uid in reported and uid not in pending_scaleups)
    return tuple(uid for uid in obsolete if mismatches[uid].snapshot_at < snapshot_at)


def known_ids(observed: ObservedState) -> set[str]:
    """Return the UIDs of everything that this controller may announce, deleted Pods included."""
    found = set(observed.workloads)
    for pods in (observed.pods, observed.deleted):
        found.update(pod.owner.uid if pod.owner else uid for uid, pod in pods.items())
    return found


def _remaining(one: PendingScaleUp | None, view: ScaleUpInfo | None) -> int | None:
    """Return how many replicas the planner still expects. None: unknown to it, or of another model."""
    if view is None or (one is not None and one.scaleup.model != view.scaleup.model):
        return None
    return max(0, view.scaleup.replicas - view.arrived_count)
