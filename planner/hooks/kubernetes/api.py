"""The real cluster behind the seam of `planner.hooks.kubernetes.cluster`: calls to its API server.

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

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import (
    Cluster,
    ClusterUnavailable,
    Conflict,
    EventType,
    Gone,
    LeaseSeen,
    News,
    NodeSeen,
    ObjectRef,
    PodSeen,
    WorkloadKind,
    WorkloadSeen,
)
from planner.hooks.kubernetes.seen import NO_LEASE, lease_seen, node_seen, pod_seen, workload_seen
from planner.hooks.kubernetes.server import MERGE, STRATEGIC, ApiServer, open_server
from planner.hooks.kubernetes.shapes import Document
from planner.hooks.kubernetes.watching import Kind, follow, merged
from rfork.settings import HookSettings

REPORTER: Final = "rfork.dev/controller"
"""Who writes Events."""
ATTEMPTS: Final = 4
"""Most times that an Event is written, where others write it at the same time."""
LONGEST_MESSAGE: Final = 1000
"""Characters of an Event's message; Kubernetes takes 1,024 bytes at most, and a name is not cut."""


class ApiCluster:
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

    def pods(self) -> AsyncIterator[News[PodSeen]]:
        """See `Cluster`."""
        kind = Kind("pods", "/api/v1/pods", pod_seen, lambda pod: pod.uid, selector=names.MODEL)
        return follow(self._server, kind)

    def workloads(self) -> AsyncIterator[News[WorkloadSeen]]:
        """See `Cluster`."""
        return merged(
            self._server,
            (
                _workloads("Deployment", "/apis/apps/v1/deployments"),
                _workloads("StatefulSet", "/apis/apps/v1/statefulsets"),
                _workloads("LeaderWorkerSet", "/apis/leaderworkerset.x-k8s.io/v1/leaderworkersets"),
            ),
        )

    def nodes(self) -> AsyncIterator[News[NodeSeen]]:
        """See `Cluster`."""
        return follow(self._server, Kind("nodes", "/api/v1/nodes", node_seen, lambda node: node.name))

    async def annotate(self, pod: PodSeen, annotations: Mapping[str, str | None]) -> None:
        """See `Cluster`."""
        await self._patch_status(pod, MERGE, {"metadata": {"annotations": dict(annotations)}})

    async def set_condition(
        self, pod: PodSeen, kind: str, *, status: bool, reason: str, message: str
    ) -> None:
        """See `Cluster`."""
        condition = {"type": kind, "status": str(status), "reason": reason, "message": message}
        if pod.conditions.get(kind) is not status:
            condition["lastTransitionTime"] = _seconds(self._unix())
        await self._patch_status(pod, STRATEGIC, {"status": {"conditions": [condition]}})

    async def tell(self, about: ObjectRef, kind: EventType, reason: str, message: str) -> None:
        """See `Cluster`."""
        message = message if len(message) <= LONGEST_MESSAGE else f"{message[: LONGEST_MESSAGE - 1]}…"
        namespace = about.namespace or "default"
        name = _event_name(about, kind, reason, message)
        path = f"/api/v1/namespaces/{namespace}/events"
        stamp = _seconds(self._unix())
        event: Document = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "kind": about.kind,
                "apiVersion": about.api_version,
                "namespace": about.namespace,
                "name": about.name,
                "uid": about.uid,
            },
            "type": kind,
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
                await self._server.ask("POST", path, body=event)
                return
            except Gone as error:  # it is the namespace that is not there
                raise ClusterUnavailable(str(error)) from error
            except Conflict:
                pass  # it was told before, here or by another replica
            try:
                await self._count_up(f"{path}/{name}", stamp)
                return
            except (Gone, Conflict):
                continue  # its time was over just now, or another replica counted it up
        raise ClusterUnavailable(f"Event {name}: others write it as well, {ATTEMPTS} times over")

    async def _count_up(self, path: str, stamp: str) -> None:
        """Raises Gone, Conflict where somebody else wrote it meanwhile, and ClusterUnavailable."""
        # The answer to a patch is the object as it is then: who may not get an Event learns its count so.
        known = await self._server.ask("PATCH", path, body={}, content_type=MERGE)
        counted = {
            "metadata": {"resourceVersion": known["metadata"]["resourceVersion"]},
            "count": int(known.get("count") or 1) + 1,
            "lastTimestamp": stamp,
        }
        await self._server.ask("PATCH", path, body=counted, content_type=MERGE)

    async def read_lease(self, name: str, namespace: str) -> LeaseSeen:
        """See `Cluster`."""
        try:
            return self._lease(await self._server.ask("GET", _lease_path(namespace, name)))
        except Gone:
            return NO_LEASE
        except Conflict as error:
            raise ClusterUnavailable(str(error)) from error

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> LeaseSeen:
        """See `Cluster`."""
        known = self._leases.get((namespace, name), {})
        was = known.get("spec") or {} if known.get("metadata", {}).get("resourceVersion") == version else {}
        now = datetime.fromtimestamp(self._unix(), UTC).isoformat(timespec="microseconds")
        stamp = now.replace("+00:00", "Z")
        same = was.get("holderIdentity") == holder
        spec = {
            # One that nobody holds names nobody: an empty name is refused by some versions.
            **({"holderIdentity": holder} if holder is not None else {}),
            "leaseDurationSeconds": max(1, math.ceil(duration_s)),
            "acquireTime": was.get("acquireTime", stamp) if same else stamp,
            "renewTime": stamp,
            "leaseTransitions": int(was.get("leaseTransitions") or 0) + (not same and holder is not None),
        }
        lease: Document = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }
        try:
            if not version:
                return self._lease(await self._server.ask("POST", _lease_path(namespace), body=lease))
            lease["metadata"] |= {**known.get("metadata", {}), "resourceVersion": version}
            return self._lease(await self._server.ask("PUT", _lease_path(namespace, name), body=lease))
        except Gone as error:
            if not version:  # it is the namespace that is not there
                raise ClusterUnavailable(str(error)) from error
            raise Conflict(str(error)) from error

    async def close(self) -> None:
        """See `Cluster`."""
        await self._server.close()

    async def _patch_status(self, pod: PodSeen, content_type: str, patch: Document) -> None:
        """Patch the Pod that was seen, and no other that has its name by now."""
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status"
        body = {**patch, "metadata": {**patch.get("metadata", {}), "uid": pod.uid}}
        try:
            await self._server.ask("PATCH", path, body=body, content_type=content_type)
        except Conflict as error:  # its own writes passed one another by, more often than it tries
            raise ClusterUnavailable(str(error)) from error

    def _lease(self, lease: Document) -> LeaseSeen:
        self._leases[lease["metadata"]["namespace"], lease["metadata"]["name"]] = lease
        return lease_seen(lease)


def connect(settings: HookSettings) -> Cluster:
    """The cluster of `settings.kubeconfig`, or of the Pod that this is; connects to nothing yet.

    Raises SettingsError where it is not said how to reach it. Importing this module raises MissingExtra where
    lightkube is not installed.
    """
    return ApiCluster(open_server(settings))


def _workloads(kind: WorkloadKind, path: str) -> Kind[WorkloadSeen]:
    return Kind(
        name=path.rpartition("/")[2],
        path=path,
        read=partial(workload_seen, kind),
        key=lambda workload: (workload.kind, workload.uid),
        selector=names.MODEL,
        optional=kind == "LeaderWorkerSet",
    )


def _lease_path(namespace: str, name: str = "") -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    return f"{path}/{name}" if name else path


def _event_name(about: ObjectRef, kind: EventType, reason: str, message: str) -> str:
    """One name for what is told again, by whichever replica: the API server lets it be created once."""
    same = json.dumps((about.kind, about.uid, kind, reason, message))
    # A cut name may end in what no part of a name may end in.
    return f"{about.name[:230].rstrip('.-')}.{hashlib.sha256(same.encode()).hexdigest()[:16]}"


def _seconds(unix: float) -> str:
    """As Kubernetes writes times: RFC 3339, UTC, whole seconds."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
