"""Converts documents of the API server to the types of `planner.integrations.kubernetes.cluster`. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Final, get_args

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import (
    ObjectRef,
    ObservedLease,
    ObservedNode,
    ObservedPod,
    ObservedWorkload,
    WorkloadKind,
)
from planner.integrations.kubernetes.manifests import Document

PHASES: Final = ("Pending", "Running", "Succeeded", "Failed", "Unknown")
REPLICA: Final = "RFORK_REPLICA"
"""Variable that the webhook sets in the engine's container only."""
NO_LEASE: Final = ObservedLease(None, "", 0.0, "")


def parse_pod(pod: Document) -> ObservedPod:
    """Parse a Pod of core/v1."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    annotations = metadata.get("annotations") or {}
    phase = status.get("phase")
    return ObservedPod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        labels=metadata.get("labels") or {},
        annotations=annotations,
        phase=phase if phase in PHASES else "Unknown",
        node=pod["spec"].get("nodeName") or None,
        owner=_owner(metadata),
        created_at=_seconds(metadata["creationTimestamp"]),
        deleting=metadata.get("deletionTimestamp") is not None,
        gates=tuple(gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()),
        conditions={condition_type: each.get("status") == "True" for condition_type, each in conditions.items()},
        containers_ready_at=_true_since(conditions.get("ContainersReady", {})),
        has_readiness_probe=any(map(_has_readiness_probe, _engine_containers(pod["spec"], annotations))),
        scheduled_at=_true_since(conditions.get("PodScheduled", {})),
    )


def parse_node(node: Document) -> ObservedNode:
    """Parse a Node of core/v1."""
    return ObservedNode(node["metadata"]["name"], node["metadata"].get("labels") or {})


def parse_workload(kind: WorkloadKind, workload: Document) -> ObservedWorkload:
    """Parse a Deployment or StatefulSet of apps/v1, or a LeaderWorkerSet of leaderworkerset.x-k8s.io/v1.

    For a LeaderWorkerSet, `template_labels` and `template_annotations` merge the worker template with the
    leader template, if there is one, which has priority.
    """
    if kind not in get_args(WorkloadKind):
        raise ValueError(f"{kind} is not a workload")
    about, spec = workload["metadata"], workload["spec"]
    if kind == "LeaderWorkerSet":
        group = spec.get("leaderWorkerTemplate") or {}
        templates = [group.get("workerTemplate"), group.get("leaderTemplate")]
    else:
        templates = [spec.get("template")]
    metadata = [(template or {}).get("metadata") or {} for template in templates]
    replicas = spec.get("replicas")
    return ObservedWorkload(
        kind=kind,
        namespace=about["namespace"],
        name=about["name"],
        uid=about["uid"],
        generation=int(about.get("generation", 0)),
        replicas=1 if replicas is None else int(replicas),
        template_labels=_merged_metadata(metadata, "labels"),
        template_annotations=_merged_metadata(metadata, "annotations"),
        deleting=about.get("deletionTimestamp") is not None,
    )


def parse_lease(lease: Document) -> ObservedLease:
    """Parse a Lease of coordination.k8s.io/v1."""
    spec = lease.get("spec") or {}
    version = str(lease["metadata"]["resourceVersion"])
    return ObservedLease(
        holder=spec.get("holderIdentity") or None,
        # The version changes with every renewal, even if the holder's clock stands still.
        renewed=f"{spec.get('renewTime')} {version}",
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
        version=version,
    )


def _merged_metadata(metadata: list[Document], what: str) -> dict[str, str]:
    merged: dict[str, str] = {}
    for each in metadata:
        merged.update(each.get(what) or {})
    return merged


def _engine_containers(spec: Document, annotations: dict[str, str]) -> list[Document]:
    """Return the container named by `names.CONTAINER`, else those with `REPLICA` set, else all.

    If the engine's container is known, probes of other containers do not count.
    """
    containers: list[Document] = spec.get("containers") or []
    named = [each for each in containers if each.get("name") == annotations.get(names.CONTAINER)]
    changed = [each for each in containers if any(one.get("name") == REPLICA for one in each.get("env") or ())]
    return named or changed or containers


def _has_readiness_probe(container: Document) -> bool:
    """Return True if the container becomes ready only after a successful probe. A startupProbe is enough."""
    return bool(container.get("readinessProbe") or container.get("startupProbe"))


def _true_since(condition: Document) -> float | None:
    """Return since when a condition is True, or None."""
    since = condition.get("lastTransitionTime")
    return _seconds(since) if since and condition.get("status") == "True" else None


def _owner(metadata: Document) -> ObjectRef | None:
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller"):
            return ObjectRef(owner["kind"], owner["apiVersion"], metadata["namespace"], owner["name"], owner["uid"])
    return None


def _seconds(timestamp: str) -> float:
    """Convert RFC 3339 to seconds since the epoch."""
    return datetime.fromisoformat(timestamp).timestamp()
