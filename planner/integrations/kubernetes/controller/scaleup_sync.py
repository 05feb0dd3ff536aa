"""Replicas that are about to come are announced to the planner, so that one plan covers all of them.

A scale-up is named by the UID of its workload and the version that its Pods state: another replica of the
controller, or a new start of this one, goes on with it. Only names that this controller could have given are
ever withdrawn, for others (a second cluster, an autoscaler) may announce to the same planner.

The planner counts by itself who comes. It is told again only where it and this controller differ in how many
are left: at once where a workload is to have more replicas, for those have no Pods yet; else after two looks,
for its lists are fetched one beside the other and are older than what the watches say.
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
"""Least time between two announcements of one workload whose own number of replicas does not rise: Pods that
replace others come one by one, and each is minutes in coming."""


@dataclass(frozen=True)
class ScaleUpMismatch:
    """The planner expects another number than is waited for."""

    is_too_low: bool
    """It expects too few."""
    snapshot_at: float
    """The look at which it was first so."""


def announced_sizes(
    before: Mapping[str, int] | None, pending: PendingState, reported: Mapping[str, ScaleUpInfo]
) -> dict[str, int]:
    """Of each size how much is no news: a scale-up is one where the size is greater than that.

    `before`: the same of last time; None: at the first time of a replica that comes to lead. What the planner
    knows then somebody has told of.
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
    """Where the planner, of the scale-ups that it knows, expects others than are waited for.

    `own_ids`: UIDs of whatever this controller may have announced replicas of. `before`: the same of last time;
    `snapshot_at`: when the announced scale-ups (`reported`) were fetched.
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
    """Those that the planner does not know, or of which it expects another number.

    `urgent`: what waits for no second look; `announced_age_s`: how long ago each was announced last, if it was.
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
    """Of the planner's scale-ups, those of this controller in which nobody is waited for any more."""
    obsolete = (uid for uid in mismatches if uid in reported and uid not in pending_scaleups)
    return tuple(uid for uid in obsolete if mismatches[uid].snapshot_at < snapshot_at)


def known_ids(observed: ObservedState) -> set[str]:
    """UIDs of all that this controller may announce replicas of, and of Pods that are gone."""
    found = set(observed.workloads)
    for pods in (observed.pods, observed.deleted):
        found.update(pod.owner.uid if pod.owner else uid for uid, pod in pods.items())
    return found


def _remaining(one: PendingScaleUp | None, view: ScaleUpInfo | None) -> int | None:
    """How many the planner still expects; None: it does not know the scale-up, or as another model's."""
    if view is None or (one is not None and one.scaleup.model != view.scaleup.model):
        return None
    return max(0, view.scaleup.replicas - view.arrived_count)
