"""The seam to a cluster, in the words of the hooks: values that were seen, and what may be done.

`planner.integrations.kubernetes.cluster_client` does it with a real API server; tests have a cluster in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

WorkloadKind = Literal["Deployment", "StatefulSet", "LeaderWorkerSet"]
EventType = Literal["Normal", "Warning"]


class ClusterUnavailable(Exception):
    """The API server does not answer, or refuses; its text says what was asked for and why it failed."""


class ResourceConflict(Exception):
    """The object is not as it was read (or is there already): read it again."""


class NotFound(Exception):
    """There is no such object (any more)."""


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Which object is meant, for Events."""

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
    """What instance ids of its ranks begin with (RFORK_REPLICA)."""
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
    node: str | None
    """Its node's name, once it is bound."""
    owner: ObjectRef | None
    """Its controller: a ReplicaSet, a StatefulSet, …"""
    created_at: float
    """Seconds since the epoch."""
    deleting: bool
    gates: tuple[str, ...]
    """Condition types of its readiness gates."""
    conditions: Mapping[str, bool] = field(default_factory=dict)
    """Its conditions by type: whether each is True."""
    containers_ready_at: float | None = None
    """When its condition ContainersReady became True, if it is; seconds since the epoch, by its node."""
    has_readiness_probe: bool = False
    """Whether ContainersReady says that its engine answers: the engine's container has a probe for that.

    Without one the condition is True as soon as the process runs.
    """
    scheduled_at: float | None = None
    """When it was bound to its node, if anybody says so; seconds since the epoch."""

    @property
    def key(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"

    @property
    def ref(self) -> ObjectRef:
        """Itself, for Events."""
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
    """Replicas of the model that it is to have (a LeaderWorkerSet: groups)."""
    template_labels: Mapping[str, str]
    template_annotations: Mapping[str, str]
    deleting: bool = False

    @property
    def ref(self) -> ObjectRef:
        """Itself, for Events."""
        versions = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1"}
        return ObjectRef(self.kind, versions.get(self.kind, "apps/v1"), self.namespace, self.name, self.uid)


@dataclass(frozen=True)
class ObservedNode:
    """A Node's labels."""

    name: str
    labels: Mapping[str, str]


ObservedT = TypeVar("ObservedT")


@dataclass(frozen=True)
class Synced(Generic[ObservedT]):
    """Everything there is of a kind, each time that it was listed: what is not in it is gone."""

    items: tuple[ObservedT, ...]


@dataclass(frozen=True)
class Upserted(Generic[ObservedT]):
    """An object came, or changed."""

    item: ObservedT


@dataclass(frozen=True)
class Deleted(Generic[ObservedT]):
    """An object is gone; as it was last seen."""

    item: ObservedT


WatchEvent = Synced[ObservedT] | Upserted[ObservedT] | Deleted[ObservedT]


@dataclass(frozen=True)
class ObservedLease:
    """Who leads, by a Lease of `coordination.k8s.io/v1`."""

    holder: str | None
    renewed: str
    """Changes whenever the holder renews it: by its own clock each process sees how long ago."""
    duration_s: float
    version: str
    """What `write_lease` has to name; empty: there is no Lease yet."""


class Cluster(Protocol):
    """What the controller and the webhook ask of a cluster.

    The iterators begin with a `Synced`, go on for ever, and begin anew with another `Synced` where the API
    server was away or forgot where they stood; meanwhile they log, once for each cause, and never raise.
    """

    def pods(self) -> AsyncIterator[WatchEvent[ObservedPod]]:
        """Pods with the label `names.MODEL`, in all namespaces."""

    def workloads(self) -> AsyncIterator[WatchEvent[ObservedWorkload]]:
        """Workloads with that label, all kinds in one `Synced`; a kind that the cluster lacks is none."""

    def nodes(self) -> AsyncIterator[WatchEvent[ObservedNode]]:
        """All Nodes."""

    async def annotate(self, pod: ObservedPod, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a Pod; None removes one. Raises Gone, ClusterUnavailable."""

    async def set_condition(
        self, pod: ObservedPod, condition_type: str, *, status: bool, reason: str, message: str
    ) -> None:
        """Set a condition of a Pod's status. Raises Gone, ClusterUnavailable."""

    async def emit_event(self, subject: ObjectRef, event_type: EventType, reason: str, message: str) -> None:
        """Write an Event about an object; one like it that is still kept is counted up, whoever wrote it.

        Raises ClusterUnavailable.
        """

    async def read_lease(self, name: str, namespace: str) -> ObservedLease:
        """The Lease, or one without holder and version where there is none. Raises ClusterUnavailable."""

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> ObservedLease:
        """Take, renew or give up a Lease that is still of `version`. Raises Conflict, ClusterUnavailable."""

    async def close(self) -> None:
        """Let go of connections."""
