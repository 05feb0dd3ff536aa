"""Input of one reconcile: caches of the cluster's objects, joined with the planner's lists.

Watches keep the caches up to date in every replica of the controller. `ObservedState` is immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import Synced, Upserted, WatchEvent
from planner.integrations.kubernetes.cluster import WORKLOAD_PATHS, ObservedPod, ObservedWorkload, WorkloadKind
from rfork.image.ranges import count
from rfork.schema import ForkInfo, InstanceInfo, InstanceReport, Rank, ScaleUpInfo

DELETED_TTL_S: Final = 900.0
"""Time for which deleted objects are remembered: their instances are removed, and Events name them."""
MAX_DELETED: Final = 10_000

ObservedT = TypeVar("ObservedT", ObservedPod, ObservedWorkload)
LWS_NAME: Final = "leaderworkerset.sigs.k8s.io/name"
"""Label of a LeaderWorkerSet's Pods: its name. Workers are owned by a StatefulSet that belongs to their
leader.
"""
TEMPLATE_HASH: Final = "pod-template-hash"
"""Label of a ReplicaSet's Pods. A Deployment's ReplicaSet is named after the Deployment, with this hash as
suffix.
"""
UID_LENGTH: Final = 36
"""Length of nearly all UIDs; others are searched for."""


class ResourceCache(Generic[ObservedT]):
    """Objects of one kind by UID, in their last observed state."""

    def __init__(self) -> None:
        self.items: dict[str, ObservedT] = {}
        self.deleted: dict[str, tuple[ObservedT, float]] = {}
        """Deleted objects and the time of their deletion, oldest first."""
        self.listed = False
        """True once all objects were listed. Before that, a missing object does not mean that it was deleted."""

    def apply(self, event: WatchEvent[ObservedT], now: float) -> None:
        """Update the cache from a watch event."""
        if isinstance(event, Upserted):
            self.items[event.item.uid] = event.item
            self.deleted.pop(event.item.uid, None)  # it was not deleted: its label had been removed and is back
            return
        if isinstance(event, Synced):
            there = {item.uid: item for item in event.items}
            removed = [item for uid, item in self.items.items() if uid not in there]
            self.items, self.listed = there, True
            for uid in there.keys() & self.deleted.keys():
                del self.deleted[uid]
        else:
            self.items.pop(event.item.uid, None)
            removed = [event.item]
        for item in removed:
            self.deleted.pop(item.uid, None)
            self.deleted[item.uid] = (item, now)
        while self.deleted:  # sorted by time: all later ones are newer
            uid, (_, since) = next(iter(self.deleted.items()))
            if since >= now - DELETED_TTL_S and len(self.deleted) <= MAX_DELETED:
                break
            del self.deleted[uid]


class PodCache(ResourceCache[ObservedPod]):
    """Pods, and the time since when their containers are ready by this controller's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: dict[str, float] = {}
        """By UID: when the Pod was first observed ready, since it was last observed not ready."""
        self._kubelet_ready_at: dict[str, float] = {}
        """By UID: since when the Pod is ready by its node's clock. A changed value means that it was not
        ready in between.
        """

    def apply(self, event: WatchEvent[ObservedPod], now: float) -> None:
        """Update the cache from a watch event."""
        super().apply(event, now)
        for pod in event.items if isinstance(event, Synced) else (event.item,):
            ready_at = pod.containers_ready_at
            if ready_at is None or pod.uid not in self.items:
                self._forget(pod.uid)
            elif self._kubelet_ready_at.get(pod.uid) != ready_at:
                self.ready[pod.uid], self._kubelet_ready_at[pod.uid] = now, ready_at
        if isinstance(event, Synced):
            for uid in self.ready.keys() - self.items.keys():
                self._forget(uid)

    def _forget(self, uid: str) -> None:
        self.ready.pop(uid, None)
        self._kubelet_ready_at.pop(uid, None)


class ResourceCaches:
    """Pods and workloads with the label `names.MODEL`."""

    def __init__(self) -> None:
        self.pods = PodCache()
        self.workloads: Mapping[WorkloadKind, ResourceCache[ObservedWorkload]] = {
            kind: ResourceCache() for kind in WORKLOAD_PATHS
        }

    @property
    def listed(self) -> bool:
        """True once all caches are complete."""
        return self.pods.listed and all(cache.listed for cache in self.workloads.values())


class OwnerIndex:
    """Finds the workload of a Pod. ReplicaSets are not watched, because their names identify the Deployment."""

    def __init__(self, workloads: Iterable[ObservedWorkload]) -> None:
        self._by_uid = {workload.uid: workload for workload in workloads}
        self._by_name: Mapping[tuple[WorkloadKind, str, str], ObservedWorkload] = {
            (workload.kind, workload.namespace, workload.name): workload for workload in self._by_uid.values()
        }

    def of(self, pod: ObservedPod) -> ObservedWorkload | None:
        """Return the workload of the Pod. None for Jobs, standalone ReplicaSets and bare Pods."""
        group = pod.labels.get(LWS_NAME)
        if group is not None:
            found = self._by_name.get(("LeaderWorkerSet", pod.namespace, group))
            if found is not None:
                return found
        owner = pod.owner
        if owner is None:
            return None
        if owner.kind == "ReplicaSet":
            suffix = f"-{pod.labels.get(TEMPLATE_HASH, '')}"
            if len(suffix) > 1 and owner.name.endswith(suffix):
                return self._by_name.get(("Deployment", pod.namespace, owner.name.removesuffix(suffix)))
        return self._by_uid.get(owner.uid)


def pods_of_replica(workload: ObservedWorkload) -> int:
    """Return the number of Pods per replica of the model. Not meaningful for LeaderWorkerSets."""
    pod_count_text = workload.template_annotations.get(names.REPLICA_PODS, "1")
    return (
        int(pod_count_text)
        if pod_count_text.isascii() and pod_count_text.isdecimal() and 0 < int(pod_count_text) < 10_000
        else 1
    )


@dataclass(frozen=True)
class PlannerSnapshot:
    """The planner's lists, fetched together."""

    at: float = 0.0
    """Time of the fetch, in seconds since the epoch."""
    instances: tuple[InstanceInfo, ...] = ()
    forks: tuple[ForkInfo, ...] = ()
    scaleups: Mapping[str, ScaleUpInfo] = field(default_factory=dict)
    """By scale-up id."""


@dataclass(frozen=True)
class ObservedState:
    """Pods and workloads by UID, and the planner's view of each Pod."""

    now: float
    """Seconds since the epoch."""
    pods: Mapping[str, ObservedPod] = field(default_factory=dict)
    workloads: Mapping[str, ObservedWorkload] = field(default_factory=dict)
    deleted: Mapping[str, ObservedPod] = field(default_factory=dict)
    """Pods that this controller has observed and that no longer exist."""
    snapshot: PlannerSnapshot = PlannerSnapshot()
    """The last successful snapshot."""
    planner_down_since: float | None = None
    """Since when the planner does not respond. None: it responds."""
    instances: Mapping[str, tuple[InstanceInfo, ...]] = field(default_factory=dict)
    """By the UID of their Pod, deleted Pods included."""
    forks: Mapping[str, tuple[ForkInfo, ...]] = field(default_factory=dict)
    """By the UID of their Pod."""
    unmatched_instances: tuple[InstanceInfo, ...] = ()
    """Instances whose Pod this controller has never observed, and images of holders."""
    known_before: AbstractSet[str] = frozenset()
    """UIDs of Pods that the planner has known. A restarted planner does not know them at first."""

    ready: Mapping[str, float] = field(default_factory=dict)
    """When this controller first observed each Pod's containers ready, by UID and by its own clock."""

    def has_reported(self, pod: ObservedPod) -> bool:
        """Return True if any rank of the Pod has requested a fork or registered."""
        return pod.uid in self.instances or pod.uid in self.forks or pod.uid in self.known_before

    def ready_s(self, pod: ObservedPod) -> float | None:
        """Return how long the Pod's containers have been ready, or None; never negative.

        The maximum of the kubelet's value and this controller's own observation: a node's clock may be ahead,
        and a restarted controller has observed little. Never longer than the Pod's age.
        """
        if pod.containers_ready_at is None:
            return None
        kubelet_ready_s = self.now - max(pod.containers_ready_at, pod.created_at)
        return max(0.0, kubelet_ready_s, self.now - self.ready.get(pod.uid, self.now))

    def planner_down_for(self, seconds: float) -> bool:
        """Return True if the planner has not responded for this long."""
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
    """Join instances and forks with the Pods in which they run.

    Images of holders belong to no Pod: a holder that prefetches in an engine's Pod is not the engine.
    """
    snapshot, deleted = snapshot or PlannerSnapshot(), deleted or {}
    instances: dict[str, list[InstanceInfo]] = {}
    forks: dict[str, list[ForkInfo]] = {}
    unmatched_instances: list[InstanceInfo] = []
    of_holders: set[str] = set()
    for view in snapshot.instances:
        if view.report.holder is not None:
            of_holders.add(view.report.instance_id)
            unmatched_instances.append(view)
            continue
        uid = pod_uid(view.report.instance_id, pods, deleted)
        if uid is None:
            unmatched_instances.append(view)
        else:
            instances.setdefault(uid, []).append(view)
    for fork in snapshot.forks:
        uid = pod_uid(fork.instance_id, pods, deleted)
        if uid is not None and fork.instance_id not in of_holders:
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
        unmatched_instances=tuple(unmatched_instances),
        known_before=known_before,
        ready=ready or {},
    )


def pod_uid(instance_id: str, *known: Mapping[str, ObservedPod]) -> str | None:
    """Return the known UID that is the prefix of an instance id (the webhook sets RFORK_REPLICA to the UID)."""
    end = UID_LENGTH if instance_id[UID_LENGTH : UID_LENGTH + 1] == "-" else instance_id.find("-")
    while end > 0:
        uid = instance_id[:end]
        if any(uid in pods for pods in known):
            return uid
        end = -1 if end == UID_LENGTH else instance_id.find("-", end + 1)
    return None


def is_injected(pod: ObservedPod) -> bool:
    """Return True if the webhook has injected rfork into the Pod."""
    return names.INJECTED in pod.annotations


def is_terminated(pod: ObservedPod) -> bool:
    """Return True if the Pod has finished and its containers will not run again."""
    return pod.phase in ("Succeeded", "Failed")


def is_ready(pod: ObservedPod) -> bool:
    """Return True if a probe confirmed that the engine serves. Without a probe this is unknown."""
    return pod.has_readiness_probe and pod.containers_ready_at is not None


def unschedulable(pod: ObservedPod) -> bool:
    """Return True if the scheduler found no node for the Pod: it may never start."""
    return pod.conditions.get("PodScheduled") is False


def model_of(labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    """Return the model's name from the annotation of a Pod or template, else from the label."""
    return annotations.get(names.MODEL_NAME) or labels.get(names.MODEL, "")


def version_of(labels: Mapping[str, str], annotations: Mapping[str, str]) -> str | None:
    """Return the weights version that a Pod or template states."""
    return annotations.get(names.VERSION, labels.get(names.VERSION))


def complete(report: InstanceReport) -> bool:
    """Return True if the instance has every chunk of weights with a known id."""
    return report.weights_id is not None and count(report.verified) == report.chunk_count


def is_seed(view: InstanceInfo) -> bool:
    """Return True if the instance has its rank's complete weights and serves readers."""
    return view.report.state == "serving" and view.quarantined is None and complete(view.report)


def all_ranks(pod: ObservedPod, ranks: Iterable[Rank]) -> bool:
    """Return True if every rank of the Pod is included, as far as can be determined.

    If several Pods make one replica, the mapping of ranks to Pods is unknown, and any set counts as complete.
    """
    if names.LWS_GROUP in pod.labels or pod.annotations.get(names.REPLICA_PODS, "1") != "1":
        return True
    there: dict[tuple[str, int, int], set[tuple[int, int]]] = {}
    for rank in ranks:
        there.setdefault((rank.role, rank.tp_size, rank.pp_size), set()).add((rank.tp, rank.pp))
    return all(len(found) >= tp_size * pp_size for (_, tp_size, pp_size), found in there.items())


def format_duration(seconds: float) -> str:
    """Format a duration: ``1 h``, ``90 min``, ``5 s``."""
    for unit, scale in (("h", 3600), ("min", 60)):
        if seconds >= scale and seconds % scale == 0:
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds:g} s"


def format_size(nbytes: float) -> str:
    """Format a size: ``15.2 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"
