"""What one reconcile decides over: the cluster as it was seen beside what the planner said; frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObservedPod, ObservedWorkload
from rfork.image.ranges import count
from rfork.schema import ForkInfo, InstanceInfo, InstanceReport, Rank, ScaleUpInfo

UID_LENGTH: Final = 36
"""Of nearly all objects; those of others are looked for."""


@dataclass(frozen=True)
class PlannerSnapshot:
    """The planner's lists, fetched together."""

    at: float = 0.0
    """When; seconds since the epoch."""
    instances: tuple[InstanceInfo, ...] = ()
    forks: tuple[ForkInfo, ...] = ()
    scaleups: Mapping[str, ScaleUpInfo] = field(default_factory=dict)
    """By their id."""


@dataclass(frozen=True)
class ObservedState:
    """Pods and workloads by UID, and what the planner knows of each Pod."""

    now: float
    """Seconds since the epoch."""
    pods: Mapping[str, ObservedPod] = field(default_factory=dict)
    workloads: Mapping[str, ObservedWorkload] = field(default_factory=dict)
    deleted: Mapping[str, ObservedPod] = field(default_factory=dict)
    """Pods that this controller saw, and that are not there any more."""
    snapshot: PlannerSnapshot = PlannerSnapshot()
    """The last one that succeeded."""
    planner_down_since: float | None = None
    """Since when the planner does not answer, if it does not."""
    instances: Mapping[str, tuple[InstanceInfo, ...]] = field(default_factory=dict)
    """By the UID of their Pod, one that is gone too."""
    forks: Mapping[str, tuple[ForkInfo, ...]] = field(default_factory=dict)
    """By the UID of their Pod."""
    unknown_pods: tuple[InstanceInfo, ...] = ()
    """Instances of no Pod that this controller has seen."""
    known_before: AbstractSet[str] = frozenset()
    """UIDs of Pods that the planner knew once: one that was started anew does not know them at first."""

    ready: Mapping[str, float] = field(default_factory=dict)
    """When this controller first saw each Pod's containers ready, by UID and by its own clock."""

    def has_reported(self, pod: ObservedPod) -> bool:
        """Whether any rank of the Pod has asked for its fork, or registered."""
        return pod.uid in self.instances or pod.uid in self.forks or pod.uid in self.known_before

    def ready_s(self, pod: ObservedPod) -> float | None:
        """How long the Pod's containers have been ready, if they are; never negative.

        The longer of what the kubelet says and what this controller saw: a node's clock may be ahead, and a
        controller that was started anew has seen little. No clock makes it longer than the Pod is there.
        """
        if pod.containers_ready_at is None:
            return None
        kubelet_ready_s = self.now - max(pod.containers_ready_at, pod.created_at)
        return max(0.0, kubelet_ready_s, self.now - self.ready.get(pod.uid, self.now))

    def planner_down_for(self, seconds: float) -> bool:
        """Whether the planner has not answered for so long."""
        return self.planner_down_since is not None and self.now - self.planner_down_since >= seconds


def observe(
    now: float,
    pods: Mapping[str, ObservedPod],
    workloads: Mapping[str, ObservedWorkload] | None = None,
    snapshot: PlannerSnapshot | None = None,
    *,
    deleted: Mapping[str, ObservedPod] | None = None,
    planner_down_since: float | None = None,
    known_before: AbstractSet[str] = frozenset(),
    ready: Mapping[str, float] | None = None,
) -> ObservedState:
    """Put each instance and each fork beside the Pod that it runs in."""
    snapshot, deleted = snapshot or PlannerSnapshot(), deleted or {}
    instances: dict[str, list[InstanceInfo]] = {}
    forks: dict[str, list[ForkInfo]] = {}
    unknown_pods: list[InstanceInfo] = []
    for view in snapshot.instances:
        uid = pod_uid(view.report.instance_id, pods, deleted)
        if uid is None:
            unknown_pods.append(view)
        else:
            instances.setdefault(uid, []).append(view)
    for fork in snapshot.forks:
        uid = pod_uid(fork.instance_id, pods, deleted)
        if uid is not None:
            forks.setdefault(uid, []).append(fork)
    return ObservedState(
        now=now,
        pods=dict(pods),
        workloads=dict(workloads or {}),
        deleted=deleted,
        snapshot=snapshot,
        planner_down_since=planner_down_since,
        instances={uid: tuple(views) for uid, views in instances.items()},
        forks={uid: tuple(views) for uid, views in forks.items()},
        unknown_pods=tuple(unknown_pods),
        known_before=known_before,
        ready=ready or {},
    )


def pod_uid(instance_id: str, *known: Mapping[str, ObservedPod]) -> str | None:
    """The UID, among those known, that the id begins with: the webhook made it RFORK_REPLICA."""
    end = UID_LENGTH if instance_id[UID_LENGTH : UID_LENGTH + 1] == "-" else instance_id.find("-")
    while end > 0:
        uid = instance_id[:end]
        if any(uid in pods for pods in known):
            return uid
        end = -1 if end == UID_LENGTH else instance_id.find("-", end + 1)
    return None


def is_injected(pod: ObservedPod) -> bool:
    """Whether the Pod's engine is to ask the planner: the webhook changed it."""
    return names.INJECTED in pod.annotations


def is_terminated(pod: ObservedPod) -> bool:
    """Whether its containers have run for the last time."""
    return pod.phase in ("Succeeded", "Failed")


def is_ready(pod: ObservedPod) -> bool:
    """Whether the engine says that it serves. Without a probe, ready containers say nothing of it."""
    return pod.has_readiness_probe and pod.containers_ready_at is not None


def unschedulable(pod: ObservedPod) -> bool:
    """Whether no node takes it: nobody knows whether it ever comes."""
    return pod.conditions.get("PodScheduled") is False


def model_of(labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    """The model's name, by a Pod's (or its template's) annotation, else by the label."""
    return annotations.get(names.MODEL_NAME) or labels.get(names.MODEL, "")


def version_of(labels: Mapping[str, str], annotations: Mapping[str, str]) -> str | None:
    """Return the version of the weights that a Pod, or its template, states."""
    return annotations.get(names.VERSION, labels.get(names.VERSION))


def complete(report: InstanceReport) -> bool:
    """Whether it holds every chunk of weights that it can name."""
    return report.weights_id is not None and count(report.verified) == report.chunk_count


def is_seed(view: InstanceInfo) -> bool:
    """Whether it holds its rank whole, and others are sent to it."""
    return view.report.state == "serving" and view.quarantined is None and complete(view.report)


def all_ranks(pod: ObservedPod, ranks: Iterable[Rank]) -> bool:
    """Whether there is one of each rank that the Pod runs, as far as can be told.

    Of Pods that make a replica together nobody says which runs which rank: those are taken as they are.
    """
    if names.LWS_GROUP in pod.labels or pod.annotations.get(names.REPLICA_PODS, "1") != "1":
        return True
    there: dict[tuple[str, int, int], set[tuple[int, int]]] = {}
    for rank in ranks:
        there.setdefault((rank.role, rank.tp_size, rank.pp_size), set()).add((rank.tp, rank.pp))
    return all(len(found) >= tp_size * pp_size for (_, tp_size, pp_size), found in there.items())


def format_duration(seconds: float) -> str:
    """Return a duration as people are told it: ``1 h``, ``90 min``, ``5 s``."""
    for unit, scale in (("h", 3600), ("min", 60)):
        if seconds >= scale and seconds % scale == 0:
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds:g} s"


def format_size(nbytes: float) -> str:
    """Bytes as people are told: ``15.2 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"
