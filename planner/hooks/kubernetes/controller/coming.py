"""Which replicas are about to ask for their forks: those without Pods yet, and Pods that have not asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import ObjectRef, PodSeen, WorkloadSeen
from planner.hooks.kubernetes.controller.owners import Owners, pods_of_replica
from planner.hooks.kubernetes.controller.scene import Scene, answers, ended, joins, model_of, unschedulable
from rfork.wire import ScaleUp

LEAST_S: Final = 1.0
MOST_BY: Final = 256


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
    """Who is waited for, all by the scale-up's id."""

    coming: dict[str, Coming]
    rises: dict[str, Rise]
    """To be handed in next time."""
    sizes: dict[str, int]
    """Replicas that each workload is to have; of others the Pods that there are. Also where nobody comes."""


@dataclass(frozen=True)
class _Unit:
    """Pods that come together: one Pod, or a LeaderWorkerSet's group."""

    comes: bool
    """It has a node, or may get one, and has not asked for its forks yet."""
    since: float


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
        one, rise = _of_workload(scene, workload, pods.get(uid, []), rises.get(uid), scaleup_s)
        if one is not None:
            found[uid] = one
        if rise is not None:
            left[uid] = rise
    for uid, members in others.items():
        one = _of_others(scene, uid, members, scaleup_s)
        if one is not None:
            found[uid] = one
        sizes[uid] = len(members)
    return Waited(found, left, sizes)


def _of_workload(
    scene: Scene, workload: WorkloadSeen, pods: list[PodSeen], before: Rise | None, scaleup_s: float
) -> tuple[Coming | None, Rise | None]:
    if workload.deleting or workload.template_annotations.get(names.INJECT) == "false":
        return None, None
    units = _units(scene, workload, pods)
    together = 1 if workload.kind == "LeaderWorkerSet" else pods_of_replica(workload)
    missing = max(0, workload.replicas - len(units))
    rise: Rise | None = None
    if missing:
        risen = before is None or missing > before.missing
        rise = Rise(missing, scene.now if risen or before is None else before.since)
    begun = [unit.since for unit in units if unit.comes]
    begun += [rise.since] * missing if rise is not None else []
    model = model_of(workload.template_labels, workload.template_annotations)
    return _coming(scene, workload.uid, workload.ref, model, begun, together, scaleup_s), rise


def _of_others(scene: Scene, uid: str, pods: list[PodSeen], scaleup_s: float) -> Coming | None:
    """Pods of a Job, of a ReplicaSet alone, or one that nobody made: there is no telling how many follow."""
    begun = [_since(pod) for pod in pods if _comes(scene, pod)]
    first = pods[0]
    about = first.owner or first.ref
    return _coming(scene, uid, about, model_of(first.labels, first.annotations), begun, 1, scaleup_s)


def _coming(
    scene: Scene, uid: str, about: ObjectRef, model: str, begun: list[float], together: int, scaleup_s: float
) -> Coming | None:
    left = [since + scaleup_s - scene.now for since in begun if scene.now - since < scaleup_s]
    if not left:
        return None
    by = f"{about.kind.lower()}/{about.namespace}/{about.name}"
    try:
        scaleup = ScaleUp(
            scaleup_id=uid,
            model=model,
            replicas=-(-len(left) // together),
            expires_in_s=min(max(*left, LEAST_S), scaleup_s),
            by=by[:MOST_BY],
        )
    except ValidationError:
        return None  # a name that no model has: its Pods' forks are refused for it too, and say so
    return Coming(about, scaleup)


def _units(scene: Scene, workload: WorkloadSeen, pods: list[PodSeen]) -> list[_Unit]:
    if workload.kind != "LeaderWorkerSet":
        return [_Unit(_comes(scene, pod), _since(pod)) for pod in pods]
    groups: dict[str, list[PodSeen]] = {}
    for pod in pods:
        groups.setdefault(pod.labels.get(names.LWS_GROUP, pod.uid), []).append(pod)
    return [
        # As the planner counts: one rank of it that came is the replica, its others are waited for by that.
        _Unit(
            not any(scene.knows(pod) or unschedulable(pod) for pod in group)
            and any(_comes(scene, pod) for pod in group),
            max(map(_since, group)),
        )
        for group in groups.values()
    ]


def _comes(scene: Scene, pod: PodSeen) -> bool:
    """Whether the Pod is about to ask for its fork: it has not, and can, and has not served without."""
    return joins(pod) and not (scene.knows(pod) or answers(pod) or unschedulable(pod))


def _since(pod: PodSeen) -> float:
    """Since when it is on its way: one that waited for a node, from when it got one."""
    return max(pod.created_at, pod.scheduled_at or 0.0)
