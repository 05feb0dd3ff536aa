"""The real cluster behind the seam of `planner.integrations.kubernetes.cluster`: calls to its API server.

What the controller's ServiceAccount must be allowed, and no more:

=============================  ==============================  =========================================
API group                      resources                       verbs
=============================  ==============================  =========================================
(core)                         pods                            list, watch
(core)                         pods/status                     patch
(core)                         nodes                           list, watch
(core)                         events                          create, patch
apps                           deployments, statefulsets       list, watch
leaderworkerset.x-k8s.io       leaderworkersets                list, watch
coordination.k8s.io            leases (one, in its namespace)  get, create, update
=============================  ==============================  =========================================

The webhook needs of it ``list`` and ``watch`` of nodes (unless told no topology), and ``get`` of that Lease
(unless told no readiness gate).

Annotations are written through the Pod's status too: an API server takes a Pod's metadata from there, and
keeps the specification, so that whoever takes the controller's token cannot change what any Pod runs.

A workload is chosen by the label `names.MODEL` of its own, not of its Pods: the API server can select by
nothing else. One whose template alone has the label is not seen here; its Pods are, and fork all the same,
only that nobody says so before they start.
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
"""Who writes Events."""
ATTEMPTS: Final = 4
"""Most times that an Event is written, where others write it at the same time."""
MAX_MESSAGE: Final = 1000
"""Characters of an Event's message; Kubernetes takes 1,024 bytes at most, and a name is not cut."""


class ApiServerCluster:
    """See `Cluster`. For one event loop."""

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
        kind = Resource("pods", "/api/v1/pods", parse_pod, lambda pod: pod.uid, selector=names.MODEL)
        return watch_forever(self._server, kind)

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
        message = message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…"
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
            except NotFound as error:  # it is the namespace that is not there
                raise ClusterUnavailable(str(error)) from error
            except ResourceConflict:
                pass  # it was told before, here or by another replica
            try:
                await self._increment_event(f"{path}/{name}", stamp)
                return
            except (NotFound, ResourceConflict):
                continue  # its time was over just now, or another replica counted it up
        raise ClusterUnavailable(f"Event {name}: others write it as well, {ATTEMPTS} times over")

    async def _increment_event(self, path: str, stamp: str) -> None:
        """Raises Gone, Conflict where somebody else wrote it meanwhile, and ClusterUnavailable."""
        # The answer to a patch is the object as it is then: who may not get an Event learns its count so.
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
            # One that nobody holds names nobody: an empty name is refused by some versions.
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
            if not version:  # it is the namespace that is not there
                raise ClusterUnavailable(str(error)) from error
            raise ResourceConflict(str(error)) from error

    async def close(self) -> None:
        """See `Cluster`."""
        await self._server.close()

    async def _patch_status(self, pod: ObservedPod, content_type: str, patch: Document) -> None:
        """Patch the Pod that was seen, and no other that has its name by now."""
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status"
        body = {**patch, "metadata": {**patch.get("metadata", {}), "uid": pod.uid}}
        try:
            await self._server.call("PATCH", path, body=body, content_type=content_type)
        except ResourceConflict as error:  # its own writes passed one another by, more often than it tries
            raise ClusterUnavailable(str(error)) from error

    def _lease(self, lease: Document) -> ObservedLease:
        self._leases[lease["metadata"]["namespace"], lease["metadata"]["name"]] = lease
        return parse_lease(lease)


def connect(settings: KubernetesSettings) -> Cluster:
    """The cluster of `settings.kubeconfig`, or of the Pod that this is; connects to nothing yet.

    Raises SettingsError where it is not said how to reach it. Importing this module raises MissingExtra where
    lightkube is not installed.
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


def _event_name(about: ObjectRef, kind: EventType, reason: str, message: str) -> str:
    """One name for what is told again, by whichever replica: the API server lets it be created once."""
    unchanged = json.dumps((about.kind, about.uid, kind, reason, message))
    # A cut name may end in what no part of a name may end in.
    return f"{about.name[:230].rstrip('.-')}.{hashlib.sha256(unchanged.encode()).hexdigest()[:16]}"


def _seconds(unix: float) -> str:
    """As Kubernetes writes times: RFC 3339, UTC, whole seconds."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
