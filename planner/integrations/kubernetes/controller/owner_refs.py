"""Finds the workload of a Pod."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObservedPod, ObservedWorkload, WorkloadKind

LWS_NAME: Final = "leaderworkerset.sigs.k8s.io/name"
"""Label of a LeaderWorkerSet's Pods: its name. Workers are owned by a StatefulSet that belongs to their
leader.
"""
TEMPLATE_HASH: Final = "pod-template-hash"
"""Label of a ReplicaSet's Pods. A Deployment's ReplicaSet is named after the Deployment, with this hash as
suffix.
"""


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
