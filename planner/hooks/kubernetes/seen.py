"""From the API server's documents to the values of `planner.hooks.kubernetes.cluster`. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Final, get_args

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import (
    LeaseSeen,
    NodeSeen,
    ObjectRef,
    PodSeen,
    WorkloadKind,
    WorkloadSeen,
)
from planner.hooks.kubernetes.shapes import Document

PHASES: Final = ("Pending", "Running", "Succeeded", "Failed", "Unknown")
REPLICA: Final = "RFORK_REPLICA"
"""The variable that the webhook gives to the engine's container, and to no other."""
NO_LEASE: Final = LeaseSeen(None, "", 0.0, "")


def pod_seen(pod: Document) -> PodSeen:
    """A Pod of core/v1."""
    about, status = pod["metadata"], pod.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    annotations = about.get("annotations") or {}
    phase = status.get("phase")
    return PodSeen(
        namespace=about["namespace"],
        name=about["name"],
        uid=about["uid"],
        labels=about.get("labels") or {},
        annotations=annotations,
        phase=phase if phase in PHASES else "Unknown",
        node=pod["spec"].get("nodeName") or None,
        owner=_owner(about),
        created_at=_seconds(about["creationTimestamp"]),
        deleting=about.get("deletionTimestamp") is not None,
        gates=tuple(gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()),
        conditions={kind: each.get("status") == "True" for kind, each in conditions.items()},
        containers_ready_at=_true_since(conditions.get("ContainersReady", {})),
        probed=any(map(_probed, _engines(pod["spec"], annotations))),
        scheduled_at=_true_since(conditions.get("PodScheduled", {})),
    )


def node_seen(node: Document) -> NodeSeen:
    """A Node of core/v1."""
    return NodeSeen(node["metadata"]["name"], node["metadata"].get("labels") or {})


def workload_seen(kind: WorkloadKind, workload: Document) -> WorkloadSeen:
    """A Deployment or StatefulSet of apps/v1, or a LeaderWorkerSet of leaderworkerset.x-k8s.io/v1.

    Of a LeaderWorkerSet, `template_labels` and `template_annotations` are those of its workers' template and,
    before them, of its leaders', where it has one of its own.
    """
    if kind not in get_args(WorkloadKind):
        raise ValueError(f"{kind} is no kind of workload")
    about, spec = workload["metadata"], workload["spec"]
    if kind == "LeaderWorkerSet":
        group = spec.get("leaderWorkerTemplate") or {}
        templates = [group.get("workerTemplate"), group.get("leaderTemplate")]
    else:
        templates = [spec.get("template")]
    metadata = [(template or {}).get("metadata") or {} for template in templates]
    replicas = spec.get("replicas")
    return WorkloadSeen(
        kind=kind,
        namespace=about["namespace"],
        name=about["name"],
        uid=about["uid"],
        generation=int(about.get("generation", 0)),
        replicas=1 if replicas is None else int(replicas),
        template_labels=_merged(metadata, "labels"),
        template_annotations=_merged(metadata, "annotations"),
        deleting=about.get("deletionTimestamp") is not None,
    )


def lease_seen(lease: Document) -> LeaseSeen:
    """A Lease of coordination.k8s.io/v1."""
    spec = lease.get("spec") or {}
    version = str(lease["metadata"]["resourceVersion"])
    return LeaseSeen(
        holder=spec.get("holderIdentity") or None,
        # The version changes with every renewal too, also where a holder's clock stands still.
        renewed=f"{spec.get('renewTime')} {version}",
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
        version=version,
    )


def _merged(metadata: list[Document], what: str) -> dict[str, str]:
    merged: dict[str, str] = {}
    for each in metadata:
        merged.update(each.get(what) or {})
    return merged


def _engines(spec: Document, annotations: dict[str, str]) -> list[Document]:
    """The container that `names.CONTAINER` names; else those that the webhook gave `REPLICA`; else all.

    That is: another container's probe says nothing of the engine, where it can be told which the engine's is.
    """
    containers: list[Document] = spec.get("containers") or []
    named = [each for each in containers if each.get("name") == annotations.get(names.CONTAINER)]
    changed = [
        each for each in containers if any(one.get("name") == REPLICA for one in each.get("env") or ())
    ]
    return named or changed or containers


def _probed(container: Document) -> bool:
    """Whether it becomes ready only once somebody has asked it: a startupProbe alone does that too."""
    return bool(container.get("readinessProbe") or container.get("startupProbe"))


def _true_since(condition: Document) -> float | None:
    """Since when a condition is True, if it is."""
    since = condition.get("lastTransitionTime")
    return _seconds(since) if since and condition.get("status") == "True" else None


def _owner(about: Document) -> ObjectRef | None:
    for owner in about.get("ownerReferences") or ():
        if owner.get("controller"):
            return ObjectRef(
                owner["kind"], owner["apiVersion"], about["namespace"], owner["name"], owner["uid"]
            )
    return None


def _seconds(timestamp: str) -> float:
    """Seconds since the epoch, of RFC 3339."""
    return datetime.fromisoformat(timestamp).timestamp()
