"""What a replica of the controller knows of the cluster: kept up to date by its watches, leader or not."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from planner.integrations.kubernetes.cluster import (
    ObservedPod,
    ObservedWorkload,
    Synced,
    Upserted,
    WatchEvent,
)

DELETED_TTL_S: Final = 900.0
"""How long Pods are remembered that are gone: for their instances, and for their names in Events."""
MAX_DELETED: Final = 10_000

ObservedT = TypeVar("ObservedT", ObservedPod, ObservedWorkload)


class ResourceCache(Generic[ObservedT]):
    """Objects of one kind by UID, as they were last seen."""

    def __init__(self) -> None:
        self.items: dict[str, ObservedT] = {}
        self.deleted: dict[str, tuple[ObservedT, float]] = {}
        """Those that were seen and are not there any more, and since when; the first to go first."""
        self.listed = False
        """Whether all that there are have been seen once: before that, what is missing here is not gone."""

    def apply(self, event: WatchEvent[ObservedT], now: float) -> None:
        """Take in what a watch says."""
        if isinstance(event, Upserted):
            self.items[event.item.uid] = event.item
            self.deleted.pop(event.item.uid, None)  # its label came back: it was never gone
            return
        if isinstance(event, Synced):
            there = {item.uid: item for item in event.items}
            removed = [item for uid, item in self.items.items() if uid not in there]
            self.items, self.listed = there, True
            for uid in there.keys() & self.deleted.keys():
                del self.deleted[uid]
        else:
            self.items.pop(event.item.uid, None)
            removed = [event.item]
        for item in removed:
            self.deleted.pop(item.uid, None)
            self.deleted[item.uid] = (item, now)
        while self.deleted:  # the first went first: what is behind it need not be looked at
            uid, (_, since) = next(iter(self.deleted.items()))
            if since >= now - DELETED_TTL_S and len(self.deleted) <= MAX_DELETED:
                break
            del self.deleted[uid]


class PodCache(ResourceCache[ObservedPod]):
    """Pods, and since when their containers are ready by this controller's own clock."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: dict[str, float] = {}
        """By UID: when they were first seen so, since they were last seen otherwise."""
        self._kubelet_ready_at: dict[str, float] = {}
        """By UID: since when they are so by their node's clock. Another time: they were not, meanwhile."""

    def apply(self, event: WatchEvent[ObservedPod], now: float) -> None:
        """Take in what a watch says."""
        super().apply(event, now)
        for pod in event.items if isinstance(event, Synced) else (event.item,):
            ready_at = pod.containers_ready_at
            if ready_at is None or pod.uid not in self.items:
                self._forget(pod.uid)
            elif self._kubelet_ready_at.get(pod.uid) != ready_at:
                self.ready[pod.uid], self._kubelet_ready_at[pod.uid] = now, ready_at
        if isinstance(event, Synced):
            for uid in self.ready.keys() - self.items.keys():
                self._forget(uid)

    def _forget(self, uid: str) -> None:
        self.ready.pop(uid, None)
        self._kubelet_ready_at.pop(uid, None)


class ResourceCaches:
    """Pods and workloads with the label `names.MODEL`."""

    def __init__(self) -> None:
        self.pods = PodCache()
        self.workloads: ResourceCache[ObservedWorkload] = ResourceCache()

    @property
    def listed(self) -> bool:
        """Whether there is anything to decide by."""
        return self.pods.listed and self.workloads.listed
