"""Cluster: the observed objects, and the operations on them.

The controller's ServiceAccount needs these permissions and no others:

=========================  ==============================  ====================
API group                  resources                       verbs
=========================  ==============================  ====================
(core)                     pods                            list, watch
(core)                     pods/status                     patch
(core)                     events                          create, patch
apps                       deployments, statefulsets       list, watch
leaderworkerset.x-k8s.io   leaderworkersets                list, watch
coordination.k8s.io        leases (one, in its namespace)  get, create, update
=========================  ==============================  ====================

The webhook needs ``list`` and ``watch`` of nodes (unless topology is off) and ``get`` of that Lease (unless
the readiness gate is off).

Annotations are written through the Pod's status subresource: it accepts metadata and ignores the
specification, so a stolen controller token cannot change what a Pod runs.

A workload is selected by its own label `names.MODEL`, not by that of its Pods, because the API server cannot
select by the template. If only the template has the label, the workload is not observed; its Pods are
observed and fork, but they are not announced before they exist.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Final, Literal

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import (
    MERGE,
    STRATEGIC,
    ApiServer,
    ClusterUnavailable,
    Document,
    NotFound,
    Resource,
    ResourceConflict,
    WatchEvent,
    open_server,
    watch_forever,
)
from rfork.settings import KubernetesSettings

WorkloadKind = Literal["Deployment", "StatefulSet", "LeaderWorkerSet"]
WORKLOAD_PATHS: Final[Mapping[WorkloadKind, str]] = {
    "Deployment": "/apis/apps/v1/deployments",
    "StatefulSet": "/apis/apps/v1/statefulsets",
    "LeaderWorkerSet": "/apis/leaderworkerset.x-k8s.io/v1/leaderworkersets",
}
EventType = Literal["Normal", "Warning"]
PHASES: Final = ("Pending", "Running", "Succeeded", "Failed", "Unknown")
REPLICA: Final = "RFORK_REPLICA"
"""Variable that the webhook sets in the engine's container only."""
REPORTER: Final = "rfork.dev/controller"
"""Source component of the Events."""
ATTEMPTS: Final = 4
"""Maximum attempts to write an Event that others write at the same time."""
MAX_MESSAGE_CHARS: Final = 1000
"""Maximum characters of an Event's message. Kubernetes accepts 1,024 bytes, and names must not be cut."""


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Reference to an object, for Events."""

    kind: str
    api_version: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class ObservedPod:
    """A Pod with the label `names.MODEL`."""

    namespace: str
    name: str
    uid: str
    """Prefix of the instance ids of its ranks (RFORK_REPLICA)."""
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
    node: str | None
    """Name of its node, once it is scheduled."""
    owner: ObjectRef | None
    """Its controller: a ReplicaSet, a StatefulSet, …"""
    created_at: float
    """Seconds since the epoch."""
    deleting: bool
    gates: tuple[str, ...]
    """Condition types of its readiness gates."""
    conditions: Mapping[str, bool] = field(default_factory=dict)
    """Conditions by type; True if the status is "True"."""
    containers_ready_at: float | None = None
    """When its condition ContainersReady became True, if it is; seconds since the epoch, by its node's clock."""
    has_readiness_probe: bool = False
    """True if the engine's container has a readiness or startup probe, so that ContainersReady means that the
    engine responds.

    Without a probe, the condition is True as soon as the process runs.
    """
    scheduled_at: float | None = None
    """When it was scheduled to its node, if known; seconds since the epoch."""

    @property
    def key(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"

    @property
    def ref(self) -> ObjectRef:
        """Reference for Events."""
        return ObjectRef("Pod", "v1", self.namespace, self.name, self.uid)


@dataclass(frozen=True)
class ObservedWorkload:
    """A Deployment, StatefulSet or LeaderWorkerSet with the label `names.MODEL`."""

    kind: WorkloadKind
    namespace: str
    name: str
    uid: str
    generation: int
    replicas: int
    """Desired replicas of the model (LeaderWorkerSet: groups)."""
    template_labels: Mapping[str, str]
    template_annotations: Mapping[str, str]
    deleting: bool = False

    @property
    def ref(self) -> ObjectRef:
        """Reference for Events."""
        versions = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1"}
        return ObjectRef(self.kind, versions.get(self.kind, "apps/v1"), self.namespace, self.name, self.uid)


@dataclass(frozen=True)
class ObservedNode:
    """Labels of a Node."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class ObservedLease:
    """State of a `coordination.k8s.io/v1` Lease, which elects the leader."""

    holder: str | None
    renewed: str
    """Changes with each renewal. Observers measure its age with their own clocks."""
    duration_s: float
    version: str
    """Required by `write_lease`. Empty: the Lease does not exist yet."""


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
    # Python 3.10 does not know the suffix Z.
    return datetime.fromisoformat(re.sub("Z$", "+00:00", timestamp)).timestamp()


class Cluster:
    """Operations of the controller and the webhook on a cluster. For one event loop.

    The iterators are those of `api_server.watch_forever`.
    """

    def __init__(self, server: ApiServer, *, unix: Callable[[], float] = time.time) -> None:
        self._server = server
        self._unix = unix
        self._leases: dict[tuple[str, str], Document] = {}

    def pods(self) -> AsyncIterator[WatchEvent[ObservedPod]]:
        """Yield Pods with the label `names.MODEL`, in all namespaces."""
        return watch_forever(self._server, Resource("pods", "/api/v1/pods", parse_pod, names.MODEL))

    def workloads(self, kind: WorkloadKind) -> AsyncIterator[WatchEvent[ObservedWorkload]]:
        """Yield workloads of a kind with that label. A cluster without LeaderWorkerSets counts as empty."""
        path = WORKLOAD_PATHS[kind]
        read, optional = partial(parse_workload, kind), kind == "LeaderWorkerSet"
        return watch_forever(self._server, Resource(path.rpartition("/")[2], path, read, names.MODEL, optional))

    def nodes(self) -> AsyncIterator[WatchEvent[ObservedNode]]:
        """Yield all Nodes."""
        return watch_forever(self._server, Resource("nodes", "/api/v1/nodes", parse_node))

    async def annotate(self, pod: ObservedPod, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a Pod; None removes one. Raises NotFound, ClusterUnavailable."""
        await self._patch_status(pod, MERGE, {"metadata": {"annotations": dict(annotations)}})

    async def set_condition(
        self, pod: ObservedPod, condition_type: str, *, status: bool, reason: str, message: str
    ) -> None:
        """Set a condition of a Pod's status. Raises NotFound, ClusterUnavailable."""
        condition = {"type": condition_type, "status": str(status), "reason": reason, "message": message}
        if pod.conditions.get(condition_type) is not status:
            condition["lastTransitionTime"] = _timestamp(self._unix())
        await self._patch_status(pod, STRATEGIC, {"status": {"conditions": [condition]}})

    async def emit_event(self, subject: ObjectRef, event_type: EventType, reason: str, message: str) -> None:
        """Write an Event about an object, or increment the count of an equal Event of any replica.

        Raises ClusterUnavailable.
        """
        message = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[: MAX_MESSAGE_CHARS - 1]}…"
        namespace = subject.namespace or "default"
        name = _event_name(subject, event_type, reason, message)
        path = f"/api/v1/namespaces/{namespace}/events"
        stamp = _timestamp(self._unix())
        event: Document = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "kind": subject.kind,
                "apiVersion": subject.api_version,
                "namespace": subject.namespace,
                "name": subject.name,
                "uid": subject.uid,
            },
            "type": event_type,
            "reason": reason,
            "message": message,
            "count": 1,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "source": {"component": REPORTER},
            "reportingComponent": REPORTER,
        }
        for _ in range(ATTEMPTS):
            try:
                await self._server.call("POST", path, body=event)
                return
            except NotFound as error:  # the namespace does not exist
                raise ClusterUnavailable(str(error)) from error
            except ResourceConflict:
                pass  # written before, by this or another replica
            try:
                await self._increment_event(f"{path}/{name}", stamp)
                return
            except (NotFound, ResourceConflict):
                continue  # it expired just now, or another replica incremented it
        raise ClusterUnavailable(f"Event {name}: concurrent writes by others, {ATTEMPTS} attempts failed")

    async def _increment_event(self, path: str, stamp: str) -> None:
        """Increment an Event's count.

        Raises NotFound, ResourceConflict after a concurrent write, and ClusterUnavailable.
        """
        # The response to a patch is the current object, so the count can be read without permission to get
        # Events.
        known = await self._server.call("PATCH", path, body={}, content_type=MERGE)
        counted = {
            "metadata": {"resourceVersion": known["metadata"]["resourceVersion"]},
            "count": int(known.get("count") or 1) + 1,
            "lastTimestamp": stamp,
        }
        await self._server.call("PATCH", path, body=counted, content_type=MERGE)

    async def read_lease(self, name: str, namespace: str) -> ObservedLease:
        """Return the Lease; without holder and version if it does not exist. Raises ClusterUnavailable."""
        try:
            return self._lease(await self._server.call("GET", _lease_path(namespace, name)))
        except NotFound:
            return NO_LEASE
        except ResourceConflict as error:
            raise ClusterUnavailable(str(error)) from error

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> ObservedLease:
        """Acquire, renew or release a Lease that still has `version`.

        Raises ResourceConflict, ClusterUnavailable.
        """
        known = self._leases.get((namespace, name), {})
        previous = known.get("spec") or {} if known.get("metadata", {}).get("resourceVersion") == version else {}
        now = datetime.fromtimestamp(self._unix(), timezone.utc).isoformat(timespec="microseconds")
        stamp = now.replace("+00:00", "Z")
        unchanged = previous.get("holderIdentity") == holder
        spec = {
            # Without a holder the field is omitted: some versions reject an empty name.
            **({"holderIdentity": holder} if holder is not None else {}),
            "leaseDurationSeconds": max(1, math.ceil(duration_s)),
            "acquireTime": previous.get("acquireTime", stamp) if unchanged else stamp,
            "renewTime": stamp,
            "leaseTransitions": int(previous.get("leaseTransitions") or 0) + (not unchanged and holder is not None),
        }
        lease: Document = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }
        try:
            if not version:
                return self._lease(await self._server.call("POST", _lease_path(namespace), body=lease))
            lease["metadata"] |= {**known.get("metadata", {}), "resourceVersion": version}
            return self._lease(await self._server.call("PUT", _lease_path(namespace, name), body=lease))
        except NotFound as error:
            if not version:  # the namespace does not exist
                raise ClusterUnavailable(str(error)) from error
            raise ResourceConflict(str(error)) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._server.close()

    async def _patch_status(self, pod: ObservedPod, content_type: str, patch: Document) -> None:
        """Patch the observed Pod, and no other Pod that has its name by now."""
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status"
        body = {**patch, "metadata": {**patch.get("metadata", {}), "uid": pod.uid}}
        try:
            await self._server.call("PATCH", path, body=body, content_type=content_type)
        except ResourceConflict as error:  # concurrent writes of this client conflicted more often than it retries
            raise ClusterUnavailable(str(error)) from error

    def _lease(self, lease: Document) -> ObservedLease:
        self._leases[lease["metadata"]["namespace"], lease["metadata"]["name"]] = lease
        return parse_lease(lease)


def connect(settings: KubernetesSettings) -> Cluster:
    """Return the cluster of the settings, see `open_server`. Raises SettingsError."""
    return Cluster(open_server(settings))


def _lease_path(namespace: str, name: str = "") -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    return f"{path}/{name}" if name else path


def _event_name(subject: ObjectRef, event_type: EventType, reason: str, message: str) -> str:
    """Return one name for equal Events of all replicas: the API server accepts only one object of that name."""
    unchanged = json.dumps((subject.kind, subject.uid, event_type, reason, message))
    # A truncated name may end in a character that a name must not end in.
    return f"{subject.name[:230].rstrip('.-')}.{hashlib.sha256(unchanged.encode()).hexdigest()[:16]}"


def _timestamp(unix: float) -> str:
    """Format a time as Kubernetes does: RFC 3339, UTC, whole seconds."""
    return datetime.fromtimestamp(unix, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
