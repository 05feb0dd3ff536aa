"""Which replicas are about to ask for their forks: those without Pods yet, and Pods that have not asked.

During a rollout the Pods of one workload may state different versions of the weights: each version that is
stated is a scale-up of its own, since instances share weights only with those of their version.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import ObjectRef, PodSeen, WorkloadSeen
from planner.hooks.kubernetes.controller.owners import Owners, pods_of_replica
from planner.hooks.kubernetes.controller.scene import (
    Scene,
    answers,
    ended,
    joins,
    model_of,
    unschedulable,
    version_of,
)
from rfork.wire import ScaleUp

LEAST_S: Final = 1.0
MOST_BY: Final = 256
_OF_VERSION: Final = re.compile(r"\.[0-9a-f]{8}$")


@dataclass(frozen=True)
class Rise:
    """Replicas of a workload that have no Pods yet."""

    missing: int
    since: float
    """When there came to be so many."""


@dataclass(frozen=True)
class Coming:
    """New replicas that are waited for."""

    about: ObjectRef
    """Who is told."""
    scaleup: ScaleUp


@dataclass(frozen=True)
class Waited:
    """Who is waited for."""

    coming: dict[str, Coming]
    """By the scale-up's id."""
    rises: dict[str, Rise]
    """To be handed in next time; by the workload's UID."""
    sizes: dict[str, int]
    """Wanted replicas of each workload, or its current Pods where that is not known, by the workload's UID.
    Workloads that expect no replica are included."""


@dataclass(frozen=True)
class _Unit:
    """Pods that come together: one Pod, or a LeaderWorkerSet's group."""

    comes: bool
    """It has a node, or may get one, and has not asked for its forks yet."""
    since: float
    version: str | None
    """Version of the weights that its Pods state."""


def scaleup_id(uid: str, version: str | None) -> str:
    """Return the id of the scale-up of a workload's replicas that state this version."""
    return uid if version is None else f"{uid}.{hashlib.sha256(version.encode()).hexdigest()[:8]}"


def workload_uid(scaleup_id: str) -> str:
    """Return the UID of the workload that a scale-up is of; the inverse of `scaleup_id`."""
    return _OF_VERSION.sub("", scaleup_id)


def coming(scene: Scene, rises: Mapping[str, Rise], scaleup_s: float) -> Waited:
    """What is waited for now.

    Counted are the replicas that a workload wants more than it has Pods for, and the Pods that have not asked
    for their forks: of each those that came to be so within the last `scaleup_s`. Pods that no node takes are
    not: who does come would wait for them. Bound, they count, from then on.
    """
    owners = Owners(scene.workloads.values())
    pods: dict[str, list[PodSeen]] = {}
    others: dict[str, list[PodSeen]] = {}
    for pod in scene.pods.values():
        if pod.deleting or ended(pod):
            continue  # whoever made it makes another one in its place, if one is wanted
        workload = owners.of(pod)
        if workload is not None:
            pods.setdefault(workload.uid, []).append(pod)
        else:
            others.setdefault(pod.owner.uid if pod.owner else pod.uid, []).append(pod)

    found: dict[str, Coming] = {}
    left: dict[str, Rise] = {}
    sizes = {uid: workload.replicas for uid, workload in scene.workloads.items()}
    for uid, workload in scene.workloads.items():
        ones, rise = _of_workload(scene, workload, pods.get(uid, []), rises.get(uid), scaleup_s)
        found.update((one.scaleup.scaleup_id, one) for one in ones)
        if rise is not None:
            left[uid] = rise
    for uid, members in others.items():
        found.update((one.scaleup.scaleup_id, one) for one in _of_others(scene, members, scaleup_s))
        sizes[uid] = len(members)
    return Waited(found, left, sizes)


def _of_workload(
    scene: Scene, workload: WorkloadSeen, pods: list[PodSeen], before: Rise | None, scaleup_s: float
) -> tuple[list[Coming], Rise | None]:
    if workload.deleting or workload.template_annotations.get(names.INJECT) == "false":
        return [], None
    units = _units(scene, workload, pods)
    together = 1 if workload.kind == "LeaderWorkerSet" else pods_of_replica(workload)
    missing = max(0, workload.replicas - len(units))
    rise: Rise | None = None
    if missing:
        risen = before is None or missing > before.missing
        rise = Rise(missing, scene.now if risen or before is None else before.since)
    template = workload.template_labels, workload.template_annotations
    begun = [(unit.version, unit.since) for unit in units if unit.comes]
    begun += [(version_of(*template), rise.since)] * missing if rise is not None else []
    return _by_version(scene, workload.ref, model_of(*template), begun, together, scaleup_s), rise


def _of_others(scene: Scene, pods: list[PodSeen], scaleup_s: float) -> list[Coming]:
    """Pods of a Job, of a ReplicaSet alone, or one that nobody made: there is no telling how many follow."""
    begun = [(_stated(pod), _since(pod)) for pod in pods if _comes(scene, pod)]
    first = pods[0]
    model = model_of(first.labels, first.annotations)
    return _by_version(scene, first.owner or first.ref, model, begun, 1, scaleup_s)


def _by_version(
    scene: Scene,
    about: ObjectRef,
    model: str,
    begun: Iterable[tuple[str | None, float]],
    together: int,
    scaleup_s: float,
) -> list[Coming]:
    """Return a scale-up for each version; `begun`: version and begin of each Pod, or of each group."""
    times: dict[str | None, list[float]] = {}
    for version, since in begun:
        times.setdefault(version, []).append(since)
    ones = (
        _coming(scene, about, model, version, of_version, together, scaleup_s)
        for version, of_version in times.items()
    )
    return [one for one in ones if one is not None]


def _coming(
    scene: Scene,
    about: ObjectRef,
    model: str,
    version: str | None,
    begun: list[float],
    together: int,
    scaleup_s: float,
) -> Coming | None:
    left = [since + scaleup_s - scene.now for since in begun if scene.now - since < scaleup_s]
    if not left:
        return None
    by = f"{about.kind.lower()}/{about.namespace}/{about.name}"
    try:
        scaleup = ScaleUp(
            scaleup_id=scaleup_id(about.uid, version),
            model=model,
            version=version,
            replicas=-(-len(left) // together),
            expires_in_s=min(max(*left, LEAST_S), scaleup_s),
            by=by[:MOST_BY],
        )
    except ValidationError:
        return None  # a name that no model or version has: the webhook leaves its Pods alone, and says so
    return Coming(about, scaleup)


def _units(scene: Scene, workload: WorkloadSeen, pods: list[PodSeen]) -> list[_Unit]:
    if workload.kind != "LeaderWorkerSet":
        return [_Unit(_comes(scene, pod), _since(pod), _stated(pod)) for pod in pods]
    groups: dict[str, list[PodSeen]] = {}
    for pod in pods:
        groups.setdefault(pod.labels.get(names.LWS_GROUP, pod.uid), []).append(pod)
    return [
        # As the planner counts: one rank of it that came is the replica, its others are waited for by that.
        _Unit(
            not any(scene.knows(pod) or unschedulable(pod) for pod in group)
            and any(_comes(scene, pod) for pod in group),
            max(map(_since, group)),
            next(filter(None, map(_stated, group)), None),
        )
        for group in groups.values()
    ]


def _comes(scene: Scene, pod: PodSeen) -> bool:
    """Whether the Pod is about to ask for its fork: it has not, and can, and has not served without."""
    return joins(pod) and not (scene.knows(pod) or answers(pod) or unschedulable(pod))


def _stated(pod: PodSeen) -> str | None:
    return version_of(pod.labels, pod.annotations)


def _since(pod: PodSeen) -> float:
    """Since when it is on its way: one that waited for a node, from when it got one."""
    return max(pod.created_at, pod.scheduled_at or 0.0)
