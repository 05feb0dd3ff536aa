"""What tests of the hooks' seam to a cluster share: to hear what it says, and objects to make."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, Generic, TypeVar

from lightkube.models.core_v1 import Container, PodSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import Cluster, Listed, News, PodSeen, Put
from planner.hooks.kubernetes.shapes import Document

SOON_S: Final = 60.0
LABELS: Final = {names.MODEL: "tiny"}
Post = Callable[[str, Document], Document]
"""Creates an object of a path; its answer."""
Seen = TypeVar("Seen")


class Heard(Generic[Seen]):
    """What an iterator of the cluster said so far."""

    def __init__(self, news: AsyncIterator[News[Seen]]) -> None:
        self.news: list[News[Seen]] = []
        self._more = asyncio.Condition()
        self._task = asyncio.create_task(self._hear(news))

    async def _hear(self, news: AsyncIterator[News[Seen]]) -> None:
        async for each in news:
            async with self._more:
                self.news.append(each)
                self._more.notify_all()

    async def until(self, holds: Callable[[News[Seen]], bool], *, after: int = 0) -> News[Seen]:
        """The first piece of news that it holds for, and what came before it."""
        async with asyncio.timeout(SOON_S), self._more:
            while True:
                for each in self.news[after:]:
                    if holds(each):
                        return each
                await self._more.wait()

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@contextlib.asynccontextmanager
async def hearing(news: AsyncIterator[News[Seen]]) -> AsyncIterator[Heard[Seen]]:
    heard = Heard(news)
    try:
        yield heard
    finally:
        await heard.stop()


def pod(namespace: str, name: str, labels: Mapping[str, str] = LABELS) -> Pod:
    return Pod(
        metadata=ObjectMeta(name=name, namespace=namespace, labels=dict(labels)),
        spec=PodSpec(containers=[Container(name="engine", image="none")], terminationGracePeriodSeconds=0),
    )


def put(name: str, also: Callable[[PodSeen], bool] = lambda _: True) -> Callable[[News[PodSeen]], bool]:
    """Whether news is of a Pod that came, or changed."""
    return lambda news: isinstance(news, Put) and news.item.name == name and also(news.item)


def workload(kind: str, name: str, replicas: int) -> Document:
    template = {
        "metadata": {"labels": {"app": name, **LABELS}, "annotations": {names.ENGINE: "pytorch"}},
        "spec": {"containers": [{"name": "engine", "image": "none"}]},
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
    more = {"serviceName": name} if kind == "StatefulSet" else {}
    return {"kind": kind, "metadata": {"name": name, "labels": LABELS}, "spec": {**spec, **more}}


async def seen_pod(cluster: Cluster, namespace: str, name: str) -> PodSeen:
    """A Pod, as the cluster sees it now."""
    async with hearing(cluster.pods()) as heard:
        first = await heard.until(lambda news: isinstance(news, Listed))
        assert isinstance(first, Listed)
        for each in first.items:
            if each.key == f"{namespace}/{name}":
                return each
        found = await heard.until(put(name, lambda item: item.namespace == namespace))
        assert isinstance(found, Put)
        return found.item
