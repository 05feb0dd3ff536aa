"""Scale-ups that the controller announces to the planner, so that one plan covers all new replicas.

Counted are the replicas that will request a fork soon: those without Pods, and Pods that have not requested
one. During a rollout, the Pods of one workload may state different weights versions. Each version is a
separate scale-up, because instances share weights only within a version.

The id of a scale-up is the UID of its workload plus the version that its Pods state, so that another replica
or a restarted controller can continue with it. Only ids that this controller can have created are withdrawn,
because others (a second cluster, an autoscaler) may announce to the same planner.

The planner counts arrivals itself. A scale-up is announced again only if its remaining number differs from
the controller's: immediately if the workload grew, because the new replicas have no Pods yet; otherwise after
two polls, because the planner's lists are older than the watches and not fetched atomically.

A Pod that is bound to a node starts there within seconds. Its node is announced at once, so that the holder of
that node fetches the weights before the containers start (`hosts_to_announce`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from pydantic import ValidationError

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObjectRef, ObservedPod, ObservedWorkload
from planner.integrations.kubernetes.controller.observed_state import (
    ObservedState,
    OwnerIndex,
    is_injected,
    is_ready,
    is_terminated,
    model_of,
    pods_of_replica,
    unschedulable,
    version_of,
)
from rfork.schema import ScaleUp, ScaleUpInfo

MIN_TTL_S: Final = 1.0
MAX_ANNOUNCER_CHARS: Final = 256
MAX_HOSTS: Final = 4096
"""Maximum number of nodes in one announcement. Nodes of replicas that have arrived make space for others."""
_VERSION_SUFFIX: Final = re.compile(r"\.[0-9a-f]{8}$")
REANNOUNCE_INTERVAL_S: Final = 10.0
"""Minimum time between two announcements of a workload whose own number of replicas does not grow:
replacement Pods appear one by one, each over minutes.
"""


@dataclass(frozen=True)
class MissingReplicas:
    """Replicas of a workload that have no Pods yet."""

    missing: int
    since: float
    """Time since when this many are missing."""


@dataclass(frozen=True)
class PendingScaleUp:
    """New replicas that are expected."""

    workload_ref: ObjectRef
    """Object of the Event."""
    scaleup: ScaleUp


@dataclass(frozen=True)
class PendingState:
    """All expected replicas."""

    pending_replicas: dict[str, PendingScaleUp]
    """By scale-up id."""
    missing_replicas: dict[str, MissingReplicas]
    """Input of the next call, by the workload's UID."""
    sizes: dict[str, int]
    """Desired replicas of each workload, or its current Pods if that is unknown, by the workload's UID.
    Includes workloads that expect no replica.
    """


@dataclass(frozen=True)
class _PodGroup:
    """Pods that start together: one Pod, or a LeaderWorkerSet's group."""

    is_pending: bool
    """True if it has or may get a node, and has not requested its forks yet."""
    since: float
    version: str | None
    """Weights version that its Pods state."""
    hosts: tuple[str, ...]
    """Nodes of its Pods, as far as they are bound: what their instances report as `Placement.host`."""


def scaleup_id(uid: str, version: str | None) -> str:
    """Return the id of the scale-up of a workload's replicas that state this version."""
    return uid if version is None else f"{uid}.{hashlib.sha256(version.encode()).hexdigest()[:8]}"


def workload_uid(scaleup_id: str) -> str:
    """Return the UID of the scale-up's workload; the inverse of `scaleup_id`."""
    return _VERSION_SUFFIX.sub("", scaleup_id)


def pending_replicas(
    observed: ObservedState, missing_replicas: Mapping[str, MissingReplicas], scaleup_ttl_s: float
) -> PendingState:
    """Return the expected replicas.

    Counts the replicas that a workload wants in addition to its Pods, and the Pods that have not requested
    their forks; both only if they became so within the last `scaleup_ttl_s`. Unschedulable Pods do not count,
    because other replicas would wait for them; they count once they are scheduled.
    """
    owners = OwnerIndex(observed.workloads.values())
    pods: dict[str, list[ObservedPod]] = {}
    others: dict[str, list[ObservedPod]] = {}
    for pod in observed.pods.values():
        if pod.deleting or is_terminated(pod):
            continue  # its owner creates a replacement if one is wanted
        workload = owners.of(pod)
        if workload is not None:
            pods.setdefault(workload.uid, []).append(pod)
        else:
            others.setdefault(pod.owner.uid if pod.owner else pod.uid, []).append(pod)

    found: list[PendingScaleUp] = []
    still_missing: dict[str, MissingReplicas] = {}
    sizes = {uid: workload.replicas for uid, workload in observed.workloads.items()}
    for uid, workload in observed.workloads.items():
        if workload.deleting or workload.template_annotations.get(names.INJECT) == "false":
            continue
        template = workload.template_labels, workload.template_annotations
        pod_groups = _pod_groups(observed, workload, pods.get(uid, []))
        starts = [_Start(group.version, group.since, group.hosts) for group in pod_groups if group.is_pending]
        missing, before = workload.replicas - len(pod_groups), missing_replicas.get(uid)
        if missing > 0:
            since = observed.now if before is None or missing > before.missing else before.since
            still_missing[uid] = MissingReplicas(missing, since)
            starts += [_Start(version_of(*template), since)] * missing
        pods_per_replica = 1 if workload.kind == "LeaderWorkerSet" else pods_of_replica(workload)
        found += _scaleups(observed.now, workload.ref, model_of(*template), starts, scaleup_ttl_s, pods_per_replica)
    for uid, members in others.items():  # Jobs, standalone ReplicaSets and bare Pods: the desired number is unknown
        first = members[0]
        model = model_of(first.labels, first.annotations)
        starts = [
            _Start(_stated_version(pod), _since(pod), _hosts((pod,))) for pod in members if _is_pending(observed, pod)
        ]
        found += _scaleups(observed.now, first.owner or first.ref, model, starts, scaleup_ttl_s)
        sizes[uid] = len(members)
    return PendingState({one.scaleup.scaleup_id: one for one in found}, still_missing, sizes)


@dataclass(frozen=True)
class _Start:
    """A Pod or group that starts, or has yet to be created."""

    version: str | None
    since: float
    hosts: tuple[str, ...] = ()


def _scaleups(
    now: float,
    workload_ref: ObjectRef,
    model: str,
    starts: Iterable[_Start],
    scaleup_ttl_s: float,
    pods_per_replica: int = 1,
) -> Iterator[PendingScaleUp]:
    """Yield one scale-up per version."""
    by_version: dict[str | None, list[_Start]] = {}
    for start in starts:
        if now - start.since < scaleup_ttl_s:
            by_version.setdefault(start.version, []).append(start)
    by = f"{workload_ref.kind.lower()}/{workload_ref.namespace}/{workload_ref.name}"
    for version, of_version in by_version.items():
        remaining_s = max(start.since for start in of_version) + scaleup_ttl_s - now
        try:
            scaleup = ScaleUp(
                scaleup_id=scaleup_id(workload_ref.uid, version),
                model=model,
                version=version,
                replicas=-(-len(of_version) // pods_per_replica),
                expires_in_s=min(max(remaining_s, MIN_TTL_S), scaleup_ttl_s),
                announced_by=by[:MAX_ANNOUNCER_CHARS],
                hosts=tuple(sorted({host for start in of_version for host in start.hosts}))[:MAX_HOSTS],
            )
        except ValidationError:
            continue  # invalid model or version: the webhook rejects these Pods and reports it
        yield PendingScaleUp(workload_ref, scaleup)


def _pod_groups(observed: ObservedState, workload: ObservedWorkload, pods: list[ObservedPod]) -> list[_PodGroup]:
    if workload.kind != "LeaderWorkerSet":
        return [
            _PodGroup(_is_pending(observed, pod), _since(pod), _stated_version(pod), _hosts((pod,))) for pod in pods
        ]
    groups: dict[str, list[ObservedPod]] = {}
    for pod in pods:
        groups.setdefault(pod.labels.get(names.LWS_GROUP, pod.uid), []).append(pod)
    return [
        # As in the planner: the replica has arrived with its first rank; the planner waits for the other
        # ranks.
        _PodGroup(
            not any(observed.has_reported(pod) or unschedulable(pod) for pod in group)
            and any(_is_pending(observed, pod) for pod in group),
            max(map(_since, group)),
            next(filter(None, map(_stated_version, group)), None),
            _hosts(group),
        )
        for group in groups.values()
    ]


def _is_pending(observed: ObservedState, pod: ObservedPod) -> bool:
    """Return True if the Pod can request a fork, has not done so, and does not serve yet."""
    return is_injected(pod) and not (observed.has_reported(pod) or is_ready(pod) or unschedulable(pod))


def _stated_version(pod: ObservedPod) -> str | None:
    return version_of(pod.labels, pod.annotations)


def _hosts(pods: Iterable[ObservedPod]) -> tuple[str, ...]:
    """Return the nodes to which the Pods are bound."""
    return tuple(pod.node for pod in pods if pod.node)


def _since(pod: ObservedPod) -> float:
    """Return the time from which the Pod is starting: its creation, or its scheduling if that was later."""
    return max(pod.created_at, pod.scheduled_at or 0.0)


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


def hosts_to_announce(
    pending_scaleups: Mapping[str, PendingScaleUp], reported: Mapping[str, ScaleUpInfo]
) -> tuple[PendingScaleUp, ...]:
    """Return the known scale-ups with a host that the planner does not know, to be announced at once.

    They keep the planner's number of replicas, because only `to_announce` decides about that. Hosts that are
    no longer pending do not matter: an engine starts there, or the number of replicas changes soon.
    """
    found: list[PendingScaleUp] = []
    for uid, one in pending_scaleups.items():
        view = reported.get(uid)
        left = _remaining(one, view)
        if view is None or left is None or set(one.scaleup.hosts) <= set(view.scaleup.hosts):
            continue
        found.append(replace(one, scaleup=one.scaleup.model_copy(update={"replicas": left})))
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
