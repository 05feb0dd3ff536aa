"""The seam to a cluster, in the words of the hooks: values that were seen, and what may be done.

`planner.hooks.kubernetes.api` does it with a real API server; tests have a cluster in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

WorkloadKind = Literal["Deployment", "StatefulSet", "LeaderWorkerSet"]
EventType = Literal["Normal", "Warning"]


class ClusterUnavailable(Exception):
    """The API server does not answer, or refuses; its text says what was asked for and why it failed."""


class Conflict(Exception):
    """The object is not as it was read (or is there already): read it again."""


class Gone(Exception):
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
class PodSeen:
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
    probed: bool = False
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
class WorkloadSeen:
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
class NodeSeen:
    """A Node's labels."""

    name: str
    labels: Mapping[str, str]


Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Listed(Generic[Seen]):
    """Everything there is of a kind, each time that it was listed: what is not in it is gone."""

    items: tuple[Seen, ...]


@dataclass(frozen=True)
class Put(Generic[Seen]):
    """An object came, or changed."""

    item: Seen


@dataclass(frozen=True)
class Removed(Generic[Seen]):
    """An object is gone; as it was last seen."""

    item: Seen


News = Listed[Seen] | Put[Seen] | Removed[Seen]


@dataclass(frozen=True)
class LeaseSeen:
    """Who leads, by a Lease of `coordination.k8s.io/v1`."""

    holder: str | None
    renewed: str
    """Changes whenever the holder renews it: by its own clock each process sees how long ago."""
    duration_s: float
    version: str
    """What `write_lease` has to name; empty: there is no Lease yet."""


class Cluster(Protocol):
    """What the controller and the webhook ask of a cluster.

    The iterators begin with a `Listed`, go on for ever, and begin anew with another `Listed` where the API
    server was away or forgot where they stood; meanwhile they log, once for each cause, and never raise.
    """

    def pods(self) -> AsyncIterator[News[PodSeen]]:
        """Pods with the label `names.MODEL`, in all namespaces."""

    def workloads(self) -> AsyncIterator[News[WorkloadSeen]]:
        """Workloads with that label, all kinds in one `Listed`; a kind that the cluster lacks is none."""

    def nodes(self) -> AsyncIterator[News[NodeSeen]]:
        """All Nodes."""

    async def annotate(self, pod: PodSeen, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a Pod; None removes one. Raises Gone, ClusterUnavailable."""

    async def set_condition(
        self, pod: PodSeen, kind: str, *, status: bool, reason: str, message: str
    ) -> None:
        """Set a condition of a Pod's status. Raises Gone, ClusterUnavailable."""

    async def tell(self, about: ObjectRef, kind: EventType, reason: str, message: str) -> None:
        """Write an Event about an object; one like it that is still kept is counted up, whoever wrote it.

        Raises ClusterUnavailable.
        """

    async def read_lease(self, name: str, namespace: str) -> LeaseSeen:
        """The Lease, or one without holder and version where there is none. Raises ClusterUnavailable."""

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> LeaseSeen:
        """Take, renew or give up a Lease that is still of `version`. Raises Conflict, ClusterUnavailable."""

    async def close(self) -> None:
        """Let go of connections."""
