"""Interface to a Kubernetes cluster: the observed objects, and the operations on them.

`planner.integrations.kubernetes.cluster_client` implements it with an API server; tests use a cluster in
memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

WorkloadKind = Literal["Deployment", "StatefulSet", "LeaderWorkerSet"]
EventType = Literal["Normal", "Warning"]


class ClusterUnavailable(Exception):
    """The API server did not respond, or rejected the request. The text names the request and the cause."""


class ResourceConflict(Exception):
    """The object changed since it was read (or already exists): read it again."""


class NotFound(Exception):
    """The object does not exist (any more)."""


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


ObservedT = TypeVar("ObservedT")


@dataclass(frozen=True)
class Synced(Generic[ObservedT]):
    """All objects of a kind, sent after each list. Objects that are not included no longer exist."""

    items: tuple[ObservedT, ...]


@dataclass(frozen=True)
class Upserted(Generic[ObservedT]):
    """An object was created or changed."""

    item: ObservedT


@dataclass(frozen=True)
class Deleted(Generic[ObservedT]):
    """An object was deleted; its last known state."""

    item: ObservedT


WatchEvent = Synced[ObservedT] | Upserted[ObservedT] | Deleted[ObservedT]


@dataclass(frozen=True)
class ObservedLease:
    """State of a `coordination.k8s.io/v1` Lease, which elects the leader."""

    holder: str | None
    renewed: str
    """Changes with each renewal. Observers measure its age with their own clocks."""
    duration_s: float
    version: str
    """Required by `write_lease`. Empty: the Lease does not exist yet."""


class Cluster(Protocol):
    """Operations of the controller and the webhook on a cluster.

    The iterators start with a `Synced`, never end, and send a new `Synced` after the API server was
    unavailable or had dropped the watch position. Meanwhile they log each cause once, and never raise.
    """

    def pods(self) -> AsyncIterator[WatchEvent[ObservedPod]]:
        """Yield Pods with the label `names.MODEL`, in all namespaces."""

    def workloads(self) -> AsyncIterator[WatchEvent[ObservedWorkload]]:
        """Yield workloads with that label, all kinds in one `Synced`. A missing kind counts as empty."""

    def nodes(self) -> AsyncIterator[WatchEvent[ObservedNode]]:
        """Yield all Nodes."""

    async def annotate(self, pod: ObservedPod, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a Pod; None removes one. Raises NotFound, ClusterUnavailable."""

    async def set_condition(
        self, pod: ObservedPod, condition_type: str, *, status: bool, reason: str, message: str
    ) -> None:
        """Set a condition of a Pod's status. Raises NotFound, ClusterUnavailable."""

    async def emit_event(self, subject: ObjectRef, event_type: EventType, reason: str, message: str) -> None:
        """Write an Event about an object, or increment the count of an equal Event of any replica.

        Raises ClusterUnavailable.
        """

    async def read_lease(self, name: str, namespace: str) -> ObservedLease:
        """Return the Lease; without holder and version if it does not exist. Raises ClusterUnavailable."""

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> ObservedLease:
        """Acquire, renew or release a Lease that still has `version`.

        Raises ResourceConflict, ClusterUnavailable.
        """

    async def close(self) -> None:
        """Close all connections."""
