"""A cluster in memory: what happens in it is what the test does, and its clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import (
    ClusterUnavailable,
    Conflict,
    EventType,
    Gone,
    LeaseSeen,
    Listed,
    News,
    NodeSeen,
    ObjectRef,
    PodSeen,
    Put,
    Removed,
    WorkloadKind,
    WorkloadSeen,
)
from tests.unit.clock import Clock

MODEL: Final = "llama"
HASH: Final = "5d4f8"
Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]


def uid(number: int) -> str:
    """A UID, the same in every run."""
    return f"{number:08x}-0000-4000-8000-000000000000"


def workload(number: int = 1, replicas: int = 1, **changes: object) -> WorkloadSeen:
    """The Deployment ``default/serve-NUMBER``."""
    seen = WorkloadSeen(
        kind="Deployment",
        namespace="default",
        name=f"serve-{number}",
        uid=uid(number),
        generation=1,
        replicas=replicas,
        template_labels={names.MODEL: MODEL},
        template_annotations={},
    )
    return replace(seen, **changes)  # type: ignore[arg-type]  # each test names fields of WorkloadSeen


def owner_of(one: WorkloadSeen, template: str = HASH) -> ObjectRef:
    """Who controls the workload's Pods."""
    if one.kind == "Deployment":
        name = f"{one.name}-{template}"
        return ObjectRef("ReplicaSet", "apps/v1", one.namespace, name, f"replicaset-of-{one.uid}-{template}")
    return one.ref


def pod(number: int, of: WorkloadSeen | None = None, *, template: str = HASH, **changes: object) -> PodSeen:
    """``default/pod-NUMBER``, as the webhook made it, with a probe; pending, created at 100."""
    labels = {names.MODEL: MODEL}
    if of is not None and of.kind == "Deployment":
        labels["pod-template-hash"] = template
    seen = PodSeen(
        namespace="default",
        name=f"pod-{number}",
        uid=uid(number),
        labels=labels,
        annotations={names.INJECTED: "1"},
        phase="Pending",
        node=None,
        owner=owner_of(of, template) if of is not None else None,
        created_at=100.0,
        deleting=False,
        gates=(names.WEIGHTS_READY,),
        probed=True,
    )
    return replace(seen, **changes)  # type: ignore[arg-type]  # each test names fields of PodSeen


@dataclass(frozen=True)
class Event:
    """An Event that was told."""

    about: str
    """``Pod/NAME``"""
    kind: EventType
    reason: str
    message: str


@dataclass(frozen=True)
class Write:
    """A change that was asked for."""

    what: str
    """``annotate`` or ``condition``."""
    pod: str
    value: str


class FakeCluster:
    """See `Cluster`. Of the Pods named in `refused` no change is taken; `away`: nothing is answered."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.away = False
        self.refused: set[str] = set()
        self.broken: set[str] = set()
        """Pods whose changes end in a defect."""
        self.events: list[Event] = []
        self.writes: list[Write] = []
        self.pods_there: dict[str, PodSeen] = {}
        self.workloads_there: dict[str, WorkloadSeen] = {}
        self._leases: dict[str, LeaseSeen] = {}
        self._pod_watches: list[Callable[[News[PodSeen]], None]] = []
        self._workload_watches: list[Callable[[News[WorkloadSeen]], None]] = []
        self._numbers = iter(range(1000, 1_000_000))
        self._changed = asyncio.Condition()

    # -- what happens in it ------------------------------------------------------------------------

    def deploy(
        self, number: int = 1, replicas: int = 1, *, kind: WorkloadKind = "Deployment", **changes: object
    ) -> WorkloadSeen:
        """A workload is made or changed; its Pods are not yet."""
        return self.put_workload(workload(number, replicas, kind=kind, **changes))

    def scale(self, one: WorkloadSeen, replicas: int) -> WorkloadSeen:
        """Its number of replicas is set; nothing else happens yet."""
        return self.put_workload(replace(self.workloads_there[one.uid], replicas=replicas))

    def create(self, of: WorkloadSeen | None = None, count: int = 1, **changes: object) -> list[PodSeen]:
        """Pods are made."""
        made = [
            pod(next(self._numbers), of, **{"created_at": self.clock.now, **changes})  # type: ignore[arg-type]
            for _ in range(count)
        ]
        return [self.put(each) for each in made]

    def change(self, one: PodSeen, **changes: object) -> PodSeen:
        """Fields of a Pod change."""
        return self.put(replace(self.pods_there[one.uid], **changes))  # type: ignore[arg-type]

    def run(self, one: PodSeen) -> PodSeen:
        """Its containers have started."""
        return self.change(one, phase="Running", node="node-1")

    def ready(self, one: PodSeen) -> PodSeen:
        """Its containers are ready."""
        conditions = {**self.pods_there[one.uid].conditions, "ContainersReady": True}
        return self.change(one, phase="Running", containers_ready_at=self.clock.now, conditions=conditions)

    def delete(self, one: PodSeen) -> None:
        """It is deleted, and gone at once."""
        self.change(one, deleting=True)
        self.vanish(one)

    def vanish(self, one: PodSeen) -> None:
        """It is not seen any more; so it is where its label is taken away."""
        seen = self.pods_there.pop(one.uid)
        for watch in self._pod_watches:
            watch(Removed(seen))

    def put(self, one: PodSeen) -> PodSeen:
        """A Pod is as this says."""
        self.pods_there[one.uid] = one
        for watch in self._pod_watches:
            watch(Put(one))
        return one

    def put_workload(self, one: WorkloadSeen) -> WorkloadSeen:
        """A workload is as this says."""
        self.workloads_there[one.uid] = one
        for watch in self._workload_watches:
            watch(Put(one))
        return one

    def remove_workload(self, one: WorkloadSeen) -> None:
        """It is gone; its Pods are not yet."""
        seen = self.workloads_there.pop(one.uid)
        for watch in self._workload_watches:
            watch(Removed(seen))

    def watch(
        self, pods: Callable[[News[PodSeen]], None], workloads: Callable[[News[WorkloadSeen]], None]
    ) -> None:
        """Call these with what there is now, and with each change."""
        self._pod_watches.append(pods)
        self._workload_watches.append(workloads)
        pods(Listed(tuple(self.pods_there.values())))
        workloads(Listed(tuple(self.workloads_there.values())))

    def seen(self, one: PodSeen) -> PodSeen:
        """The Pod as it is now."""
        return self.pods_there[one.uid]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds, which is looked at after each write."""
        async with self._changed:
            await self._changed.wait_for(holds)

    # -- as Cluster --------------------------------------------------------------------------------

    async def pods(self) -> AsyncIterator[News[PodSeen]]:
        queue: asyncio.Queue[News[PodSeen]] = asyncio.Queue()
        self._pod_watches.append(queue.put_nowait)
        yield Listed(tuple(self.pods_there.values()))
        while True:
            yield await queue.get()

    async def workloads(self) -> AsyncIterator[News[WorkloadSeen]]:
        queue: asyncio.Queue[News[WorkloadSeen]] = asyncio.Queue()
        self._workload_watches.append(queue.put_nowait)
        yield Listed(tuple(self.workloads_there.values()))
        while True:
            yield await queue.get()

    async def nodes(self) -> AsyncIterator[News[NodeSeen]]:
        yield Listed(())

    async def annotate(self, pod: PodSeen, annotations: Mapping[str, str | None]) -> None:
        now = self._open(pod)
        kept = {**now.annotations, **annotations}
        self.put(replace(now, annotations={name: value for name, value in kept.items() if value is not None}))
        for value in annotations.values():
            await self._wrote(Write("annotate", pod.name, str(value)))

    async def set_condition(
        self, pod: PodSeen, kind: str, *, status: bool, reason: str, message: str
    ) -> None:
        now = self._open(pod)
        self.put(replace(now, conditions={**now.conditions, kind: status}))
        await self._wrote(Write("condition", pod.name, f"{status} {reason}: {message}"))

    async def tell(self, about: ObjectRef, kind: EventType, reason: str, message: str) -> None:
        self._answers()
        self.events.append(Event(f"{about.kind}/{about.name}", kind, reason, message))
        async with self._changed:
            self._changed.notify_all()

    async def read_lease(self, name: str, namespace: str) -> LeaseSeen:
        self._answers()
        return self._leases.get(name, LeaseSeen(None, "", 0.0, ""))

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> LeaseSeen:
        self._answers()
        before = self._leases.get(name)
        if (before.version if before else "") != version:
            raise Conflict(name)
        number = int(version or 0) + 1
        self._leases[name] = LeaseSeen(holder, str(number), duration_s, str(number))
        return self._leases[name]

    async def close(self) -> None:
        pass

    def _open(self, one: PodSeen) -> PodSeen:
        self._answers()
        if one.name in self.refused:
            raise ClusterUnavailable(f"{one.name} may not be changed")
        if one.name in self.broken:
            raise KeyError(one.name)
        if one.uid not in self.pods_there:
            raise Gone(one.name)
        return self.pods_there[one.uid]

    def _answers(self) -> None:
        if self.away:
            raise ClusterUnavailable("no answer")

    async def _wrote(self, write: Write) -> None:
        self.writes.append(write)
        async with self._changed:
            self._changed.notify_all()
