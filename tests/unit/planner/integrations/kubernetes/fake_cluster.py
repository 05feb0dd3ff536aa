"""A cluster in memory, changed by the test and with the test's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import (
    ClusterUnavailable,
    Deleted,
    NotFound,
    ResourceConflict,
    Synced,
    Upserted,
    WatchEvent,
)
from planner.integrations.kubernetes.cluster import (
    Cluster,
    EventType,
    ObjectRef,
    ObservedLease,
    ObservedNode,
    ObservedPod,
    ObservedWorkload,
    WorkloadKind,
)
from planner.integrations.kubernetes.controller.observed_state import ResourceCaches
from tests.unit.fake_clock import FakeClock

MODEL: Final = "llama"
HASH: Final = "5d4f8"
Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]


def uid(number: int) -> str:
    """Return a UID that is equal in every run."""
    return f"{number:08x}-0000-4000-8000-000000000000"


def workload(number: int = 1, replicas: int = 1, **changes: object) -> ObservedWorkload:
    """Return the Deployment ``default/serve-NUMBER``."""
    seen = ObservedWorkload(
        kind="Deployment",
        namespace="default",
        name=f"serve-{number}",
        uid=uid(number),
        generation=1,
        replicas=replicas,
        template_labels={names.MODEL: MODEL},
        template_annotations={},
    )
    return replace(seen, **changes)  # type: ignore[arg-type]  # each test names fields of ObservedWorkload


def owner_of(workload: ObservedWorkload, template: str = HASH) -> ObjectRef:
    """Return the owner of the workload's Pods."""
    if workload.kind == "Deployment":
        name = f"{workload.name}-{template}"
        return ObjectRef("ReplicaSet", "apps/v1", workload.namespace, name, f"replicaset-of-{workload.uid}-{template}")
    return workload.ref


def pod(number: int, of: ObservedWorkload | None = None, *, template: str = HASH, **changes: object) -> ObservedPod:
    """Return ``default/pod-NUMBER`` after injection, with a probe; pending, created at 100."""
    labels = {names.MODEL: MODEL}
    if of is not None and of.kind == "Deployment":
        labels["pod-template-hash"] = template
    seen = ObservedPod(
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
        has_readiness_probe=True,
    )
    return replace(seen, **changes)  # type: ignore[arg-type]  # each test names fields of ObservedPod


@dataclass(frozen=True)
class Event:
    """A written Event."""

    about: str
    """``Pod/NAME``"""
    event_type: EventType
    reason: str
    message: str


@dataclass(frozen=True)
class Write:
    """A requested change."""

    operation: str
    """``annotate`` or ``condition``."""
    pod: str
    value: str


def _kind_of(event: WatchEvent[ObservedWorkload]) -> WorkloadKind:
    assert not isinstance(event, Synced)
    return event.item.kind


class FakeCluster(Cluster):
    """A cluster in memory. Changes of Pods in `refused` are rejected; while `unavailable`, all calls fail."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.unavailable = False
        self.refused: set[str] = set()
        self.broken: set[str] = set()
        """Pods whose changes raise an unexpected error."""
        self.events: list[Event] = []
        self.writes: list[Write] = []
        self.pod_objects: dict[str, ObservedPod] = {}
        self.workload_objects: dict[str, ObservedWorkload] = {}
        self._lease_states: dict[str, ObservedLease] = {}
        self._pod_watches: list[Callable[[WatchEvent[ObservedPod]], None]] = []
        self._workload_watches: list[Callable[[WatchEvent[ObservedWorkload]], None]] = []
        self._numbers = iter(range(1000, 1_000_000))
        self._changed = asyncio.Condition()

    # -- changes of the cluster --------------------------------------------------------------------

    def deploy(
        self, number: int = 1, replicas: int = 1, *, kind: WorkloadKind = "Deployment", **changes: object
    ) -> ObservedWorkload:
        """Create or change a workload, without its Pods."""
        return self.put_workload(workload(number, replicas, kind=kind, **changes))

    def scale(self, workload: ObservedWorkload, replicas: int) -> ObservedWorkload:
        """Set its number of replicas, without its Pods."""
        return self.put_workload(replace(self.workload_objects[workload.uid], replicas=replicas))

    def create(self, of: ObservedWorkload | None = None, count: int = 1, **changes: object) -> list[ObservedPod]:
        """Create Pods."""
        made = [
            pod(next(self._numbers), of, **{"created_at": self.clock.now, **changes})  # type: ignore[arg-type]
            for _ in range(count)
        ]
        return [self.put(each) for each in made]

    def change(self, pod: ObservedPod, **changes: object) -> ObservedPod:
        """Change fields of a Pod."""
        return self.put(replace(self.pod_objects[pod.uid], **changes))  # type: ignore[arg-type]

    def run(self, pod: ObservedPod) -> ObservedPod:
        """Start its containers."""
        return self.change(pod, phase="Running", node="node-1")

    def ready(self, pod: ObservedPod) -> ObservedPod:
        """Make its containers ready."""
        conditions = {**self.pod_objects[pod.uid].conditions, "ContainersReady": True}
        return self.change(pod, phase="Running", containers_ready_at=self.clock.now, conditions=conditions)

    def delete(self, pod: ObservedPod) -> None:
        """Delete it and let it disappear."""
        self.change(pod, deleting=True)
        self.drop(pod)

    def drop(self, pod: ObservedPod) -> None:
        """Let it disappear from the watch, as when its label is removed."""
        removed = self.pod_objects.pop(pod.uid)
        for watch in self._pod_watches:
            watch(Deleted(removed))

    def put(self, pod: ObservedPod) -> ObservedPod:
        """Replace a Pod."""
        self.pod_objects[pod.uid] = pod
        for watch in self._pod_watches:
            watch(Upserted(pod))
        return pod

    def put_workload(self, workload: ObservedWorkload) -> ObservedWorkload:
        """Replace a workload."""
        self.workload_objects[workload.uid] = workload
        for watch in self._workload_watches:
            watch(Upserted(workload))
        return workload

    def remove_workload(self, workload: ObservedWorkload) -> None:
        """Delete a workload, but not its Pods."""
        removed = self.workload_objects.pop(workload.uid)
        for watch in self._workload_watches:
            watch(Deleted(removed))

    def watch(self, caches: ResourceCaches) -> None:
        """Keep the caches up to date."""
        self._pod_watches.append(lambda event: caches.pods.apply(event, self.clock.now))
        self._workload_watches.append(lambda event: caches.workloads[_kind_of(event)].apply(event, self.clock.now))
        caches.pods.apply(Synced(tuple(self.pod_objects.values())), self.clock.now)
        for kind, cache in caches.workloads.items():
            cache.apply(Synced(self._workloads_of(kind)), self.clock.now)

    def _workloads_of(self, kind: WorkloadKind) -> tuple[ObservedWorkload, ...]:
        return tuple(each for each in self.workload_objects.values() if each.kind == kind)

    def current_pod(self, pod: ObservedPod) -> ObservedPod:
        """Return the current Pod."""
        return self.pod_objects[pod.uid]

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true; it is checked after each write."""
        async with self._changed:
            await self._changed.wait_for(condition)

    # -- implementation of Cluster -----------------------------------------------------------------

    async def pods(self) -> AsyncIterator[WatchEvent[ObservedPod]]:
        queue: asyncio.Queue[WatchEvent[ObservedPod]] = asyncio.Queue()
        self._pod_watches.append(queue.put_nowait)
        yield Synced(tuple(self.pod_objects.values()))
        while True:
            yield await queue.get()

    async def workloads(self, kind: WorkloadKind) -> AsyncIterator[WatchEvent[ObservedWorkload]]:
        queue: asyncio.Queue[WatchEvent[ObservedWorkload]] = asyncio.Queue()
        self._workload_watches.append(queue.put_nowait)
        yield Synced(self._workloads_of(kind))
        while True:
            event = await queue.get()
            if _kind_of(event) == kind:
                yield event

    async def nodes(self) -> AsyncIterator[WatchEvent[ObservedNode]]:
        yield Synced(())

    async def annotate(self, pod: ObservedPod, annotations: Mapping[str, str | None]) -> None:
        now = self._writable_pod(pod)
        kept = {**now.annotations, **annotations}
        self.put(replace(now, annotations={name: value for name, value in kept.items() if value is not None}))
        for value in annotations.values():
            await self._record_write(Write("annotate", pod.name, str(value)))

    async def set_condition(
        self, pod: ObservedPod, condition_type: str, *, status: bool, reason: str, message: str
    ) -> None:
        now = self._writable_pod(pod)
        self.put(replace(now, conditions={**now.conditions, condition_type: status}))
        await self._record_write(Write("condition", pod.name, f"{status} {reason}: {message}"))

    async def emit_event(self, subject: ObjectRef, event_type: EventType, reason: str, message: str) -> None:
        self._check_available()
        self.events.append(Event(f"{subject.kind}/{subject.name}", event_type, reason, message))
        async with self._changed:
            self._changed.notify_all()

    async def read_lease(self, name: str, namespace: str) -> ObservedLease:
        self._check_available()
        return self._lease_states.get(name, ObservedLease(None, "", 0.0, ""))

    async def write_lease(
        self, name: str, namespace: str, holder: str | None, duration_s: float, version: str
    ) -> ObservedLease:
        self._check_available()
        before = self._lease_states.get(name)
        if (before.version if before else "") != version:
            raise ResourceConflict(name)
        number = int(version or 0) + 1
        self._lease_states[name] = ObservedLease(holder, str(number), duration_s, str(number))
        return self._lease_states[name]

    async def close(self) -> None:
        pass

    def _writable_pod(self, pod: ObservedPod) -> ObservedPod:
        self._check_available()
        if pod.name in self.refused:
            raise ClusterUnavailable(f"{pod.name} may not be changed")
        if pod.name in self.broken:
            raise KeyError(pod.name)
        if pod.uid not in self.pod_objects:
            raise NotFound(pod.name)
        return self.pod_objects[pod.uid]

    def _check_available(self) -> None:
        if self.unavailable:
            raise ClusterUnavailable("no response")

    async def _record_write(self, write: Write) -> None:
        self.writes.append(write)
        async with self._changed:
            self._changed.notify_all()
