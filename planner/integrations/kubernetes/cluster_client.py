"""Implementation of `planner.integrations.kubernetes.cluster` with calls to an API server.

The controller's ServiceAccount needs these permissions and no others:

=============================  ==============================  ========================================= API
group                      resources                       verbs =============================
==============================  ========================================= (core)                         pods
list, watch (core)                         pods/status                     patch (core)
nodes                           list, watch (core)                         events
create, patch apps                           deployments, statefulsets       list, watch
leaderworkerset.x-k8s.io       leaderworkersets                list, watch coordination.k8s.io
leases (one, in its namespace)  get, create, update =============================
==============================  =========================================

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
import time
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_client import MERGE, STRATEGIC, ApiServer, open_server
from planner.integrations.kubernetes.cluster import (
    Cluster,
    ClusterUnavailable,
    EventType,
    NotFound,
    ObjectRef,
    ObservedLease,
    ObservedNode,
    ObservedPod,
    ObservedWorkload,
    ResourceConflict,
    WatchEvent,
    WorkloadKind,
)
from planner.integrations.kubernetes.informer import Resource, merge_watches, watch_forever
from planner.integrations.kubernetes.manifests import Document
from planner.integrations.kubernetes.parse import NO_LEASE, parse_lease, parse_node, parse_pod, parse_workload
from rfork.settings import KubernetesSettings

REPORTER: Final = "rfork.dev/controller"
"""Source component of the Events."""
ATTEMPTS: Final = 4
"""Maximum attempts to write an Event that others write at the same time."""
MAX_MESSAGE_CHARS: Final = 1000
"""Maximum characters of an Event's message. Kubernetes accepts 1,024 bytes, and names must not be cut."""


class ApiServerCluster:
    """Implements `Cluster`. For one event loop."""

    def __init__(
        self,
        server: ApiServer,
        *,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._server = server
        self._unix = unix
        self._leases: dict[tuple[str, str], Document] = {}

    def pods(self) -> AsyncIterator[WatchEvent[ObservedPod]]:
        """See `Cluster`."""
        resource = Resource("pods", "/api/v1/pods", parse_pod, lambda pod: pod.uid, selector=names.MODEL)
        return watch_forever(self._server, resource)

    def workloads(self) -> AsyncIterator[WatchEvent[ObservedWorkload]]:
        """See `Cluster`."""
        return merge_watches(
            self._server,
            (
                _workloads("Deployment", "/apis/apps/v1/deployments"),
                _workloads("StatefulSet", "/apis/apps/v1/statefulsets"),
                _workloads("LeaderWorkerSet", "/apis/leaderworkerset.x-k8s.io/v1/leaderworkersets"),
            ),
        )

    def nodes(self) -> AsyncIterator[WatchEvent[ObservedNode]]:
        """See `Cluster`."""
        return watch_forever(self._server, Resource("nodes", "/api/v1/nodes", parse_node, lambda node: node.name))

    async def annotate(self, pod: ObservedPod, annotations: Mapping[str, str | None]) -> None:
        """See `Cluster`."""
        await self._patch_status(pod, MERGE, {"metadata": {"annotations": dict(annotations)}})

    async def set_condition(
        self, pod: ObservedPod, condition_type: str, *, status: bool, reason: str, message: str
    ) -> None:
        """See `Cluster`."""
        condition = {"type": condition_type, "status": str(status), "reason": reason, "message": message}
        if pod.conditions.get(condition_type) is not status:
            condition["lastTransitionTime"] = _seconds(self._unix())
        await self._patch_status(pod, STRATEGIC, {"status": {"conditions": [condition]}})

    async def emit_event(self, subject: ObjectRef, event_type: EventType, reason: str, message: str) -> None:
        """See `Cluster`."""
        message = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[: MAX_MESSAGE_CHARS - 1]}…"
        namespace = subject.namespace or "default"
        name = _event_name(subject, event_type, reason, message)
        path = f"/api/v1/namespaces/{namespace}/events"
        stamp = _seconds(self._unix())
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
        """See `Cluster`."""
        try:
            return self._lease(await self._server.call("GET", _lease_path(namespace, name)))
        except NotFound:
            return NO_LEASE
        except ResourceConflict as error:
            raise ClusterUnavailable(str(error)) from error

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> ObservedLease:
        """See `Cluster`."""
        known = self._leases.get((namespace, name), {})
        previous = known.get("spec") or {} if known.get("metadata", {}).get("resourceVersion") == version else {}
        now = datetime.fromtimestamp(self._unix(), UTC).isoformat(timespec="microseconds")
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
        """See `Cluster`."""
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
    """Return the cluster of `settings.kubeconfig`, or of this Pod. Does not connect yet.

    Raises SettingsError if no cluster is configured. Importing this module raises MissingExtra if lightkube
    is not installed.
    """
    return ApiServerCluster(open_server(settings))


def _workloads(kind: WorkloadKind, path: str) -> Resource[ObservedWorkload]:
    return Resource(
        name=path.rpartition("/")[2],
        path=path,
        read=partial(parse_workload, kind),
        key=lambda workload: (workload.kind, workload.uid),
        selector=names.MODEL,
        optional=kind == "LeaderWorkerSet",
    )


def _lease_path(namespace: str, name: str = "") -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    return f"{path}/{name}" if name else path


def _event_name(subject: ObjectRef, event_type: EventType, reason: str, message: str) -> str:
    """Return one name for equal Events of all replicas: the API server accepts only one object of that name."""
    unchanged = json.dumps((subject.kind, subject.uid, event_type, reason, message))
    # A truncated name may end in a character that a name must not end in.
    return f"{subject.name[:230].rstrip('.-')}.{hashlib.sha256(unchanged.encode()).hexdigest()[:16]}"


def _seconds(unix: float) -> str:
    """Format a time as Kubernetes does: RFC 3339, UTC, whole seconds."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
