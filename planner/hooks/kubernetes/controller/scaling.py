"""Which replicas are about to ask for their forks: announced, so that one plan covers all of them.

A scale-up is named by the UID of its workload: another replica of the controller, or a new start of this
one, goes on with it. Only names that this controller could have given are ever withdrawn, for others (a
second cluster, an autoscaler) may announce to the same planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import ObjectRef, PodSeen, WorkloadSeen
from planner.hooks.kubernetes.controller.owners import Owners, pods_of_replica
from planner.hooks.kubernetes.controller.scene import Scene, ended, joins, model_of
from rfork.wire import ScaleUp, ScaleUpView

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
class _Unit:
    """Pods that come together: one Pod, or a LeaderWorkerSet's group."""

    settled: bool
    """They have asked for their forks, or never will."""
    created_at: float


def coming(
    scene: Scene, rises: Mapping[str, Rise], scaleup_s: float
) -> tuple[dict[str, Coming], dict[str, Rise]]:
    """What is waited for now, by the scale-up's id, and the rises to be handed in next time.

    Counted are the replicas that a workload wants more than it has Pods for, and the Pods that have not asked
    for their forks: of each those that came to be so within the last `scaleup_s`.
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
    return found, left


def to_announce(wanted: Mapping[str, Coming], told: Mapping[str, ScaleUpView]) -> tuple[Coming, ...]:
    """Those that the planner does not know, or of which it knows another number."""
    return tuple(one for uid, one in wanted.items() if uid not in told or not _same(one, told[uid]))


def to_withdraw(
    wanted: Mapping[str, Coming], told: Mapping[str, ScaleUpView], own: Iterable[str]
) -> tuple[str, ...]:
    """Of the planner's scale-ups, those of this controller (`own`) in which nobody is waited for any more."""
    return tuple(uid for uid in own if uid in told and uid not in wanted)


def own_names(scene: Scene) -> set[str]:
    """Ids that this controller gives to what it sees now, and gave to Pods that are gone."""
    found = set(scene.workloads)
    for pods in (scene.pods, scene.gone):
        found.update(pod.owner.uid if pod.owner else uid for uid, pod in pods.items())
    return found


def _same(one: Coming, view: ScaleUpView) -> bool:
    return (one.scaleup.model, one.scaleup.replicas) == (view.scaleup.model, view.scaleup.replicas)


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
    begun = [unit.created_at for unit in units if not unit.settled]
    begun += [rise.since] * missing if rise is not None else []
    model = model_of(workload.template_labels, workload.template_annotations)
    return _coming(scene, workload.uid, workload.ref, model, begun, together, scaleup_s), rise


def _of_others(scene: Scene, uid: str, pods: list[PodSeen], scaleup_s: float) -> Coming | None:
    """Pods of a Job, of a ReplicaSet alone, or one that nobody made: there is no telling how many follow."""
    begun = [pod.created_at for pod in pods if not _settled(scene, pod)]
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
        return [_Unit(_settled(scene, pod), pod.created_at) for pod in pods]
    groups: dict[str, list[PodSeen]] = {}
    for pod in pods:
        groups.setdefault(pod.labels.get(names.LWS_GROUP, pod.uid), []).append(pod)
    return [
        # As the planner counts: one rank of it that came is the replica, its others are waited for by that.
        _Unit(
            any(scene.knows(pod) for pod in group) or all(_settled(scene, pod) for pod in group),
            max(pod.created_at for pod in group),
        )
        for group in groups.values()
    ]


def _settled(scene: Scene, pod: PodSeen) -> bool:
    """Whether the Pod has asked for its fork, or need not any more, or never will."""
    return scene.knows(pod) or pod.containers_ready_at is not None or not joins(pod)
