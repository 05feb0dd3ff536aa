"""Records watch events of a cluster, and creates test objects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, Generic, TypeVar

from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import Document, Synced, Upserted, WatchEvent
from planner.integrations.kubernetes.cluster import Cluster, ObservedPod
from rfork.asyncio_timeout import timeout

SOON_S: Final = 60.0
LABELS: Final = {names.MODEL: "tiny"}
Post = Callable[[str, Document], Document]
"""Creates an object at a path and returns it."""
ObservedT = TypeVar("ObservedT")


class WatchRecorder(Generic[ObservedT]):
    """Events of an iterator of the cluster so far."""

    def __init__(self, events: AsyncIterator[WatchEvent[ObservedT]]) -> None:
        self.events: list[WatchEvent[ObservedT]] = []
        self._more = asyncio.Condition()
        self._task = asyncio.create_task(self._record_events(events))

    async def _record_events(self, events: AsyncIterator[WatchEvent[ObservedT]]) -> None:
        async for each in events:
            async with self._more:
                self.events.append(each)
                self._more.notify_all()

    async def until(
        self, predicate: Callable[[WatchEvent[ObservedT]], bool], *, after: int = 0
    ) -> WatchEvent[ObservedT]:
        """Return the first event that matches, and those before it."""
        async with timeout(SOON_S), self._more:
            while True:
                for each in self.events[after:]:
                    if predicate(each):
                        return each
                await self._more.wait()

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@contextlib.asynccontextmanager
async def recording(events: AsyncIterator[WatchEvent[ObservedT]]) -> AsyncIterator[WatchRecorder[ObservedT]]:
    recorder = WatchRecorder(events)
    try:
        yield recorder
    finally:
        await recorder.stop()


def pod(namespace: str, name: str, labels: Mapping[str, str] = LABELS) -> Pod:
    return Pod(
        metadata=ObjectMeta(name=name, namespace=namespace, labels=dict(labels)),
        spec=PodSpec(containers=[Container(name="engine", image="none")], terminationGracePeriodSeconds=0),
    )


def pod_upserted(
    name: str, condition: Callable[[ObservedPod], bool] = lambda _: True
) -> Callable[[WatchEvent[ObservedPod]], bool]:
    """Return a predicate that matches an upserted Pod."""
    return lambda event: isinstance(event, Upserted) and event.item.name == name and condition(event.item)


def workload(workload_kind: str, name: str, replicas: int) -> Document:
    template = {
        "metadata": {"labels": {"app": name, **LABELS}, "annotations": {names.ENGINE: "pytorch"}},
        "spec": {"containers": [{"name": "engine", "image": "none"}]},
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    more = {"serviceName": name} if workload_kind == "StatefulSet" else {}
    return {"kind": workload_kind, "metadata": {"name": name, "labels": LABELS}, "spec": {**spec, **more}}


async def observe_pod(cluster: Cluster, namespace: str, name: str) -> ObservedPod:
    """Return a Pod as the cluster observes it now."""
    async with recording(cluster.pods()) as recorder:
        first = await recorder.until(lambda event: isinstance(event, Synced))
        assert isinstance(first, Synced)
        for each in first.items:
            if each.key == f"{namespace}/{name}":
                return each
        found = await recorder.until(pod_upserted(name, lambda item: item.namespace == namespace))
        assert isinstance(found, Upserted)
        return found.item
