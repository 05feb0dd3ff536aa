"""Caches of the cluster's objects, kept up to date by watches in every replica of the controller."""

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
"""Time for which deleted objects are remembered: their instances are removed, and Events name them."""
MAX_DELETED: Final = 10_000

ObservedT = TypeVar("ObservedT", ObservedPod, ObservedWorkload)


class ResourceCache(Generic[ObservedT]):
    """Objects of one kind by UID, in their last observed state."""

    def __init__(self) -> None:
        self.items: dict[str, ObservedT] = {}
        self.deleted: dict[str, tuple[ObservedT, float]] = {}
        """Deleted objects and the time of their deletion, oldest first."""
        self.listed = False
        """True once all objects were listed. Before that, a missing object does not mean that it was deleted."""

    def apply(self, event: WatchEvent[ObservedT], now: float) -> None:
        """Update the cache from a watch event."""
        if isinstance(event, Upserted):
            self.items[event.item.uid] = event.item
            self.deleted.pop(event.item.uid, None)  # it was not deleted: its label had been removed and is back
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
        while self.deleted:  # sorted by time: all later ones are newer
            uid, (_, since) = next(iter(self.deleted.items()))
            if since >= now - DELETED_TTL_S and len(self.deleted) <= MAX_DELETED:
                break
            del self.deleted[uid]


class PodCache(ResourceCache[ObservedPod]):
    """Pods, and the time since when their containers are ready by this controller's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: dict[str, float] = {}
        """By UID: when the Pod was first observed ready, since it was last observed not ready."""
        self._kubelet_ready_at: dict[str, float] = {}
        """By UID: since when the Pod is ready by its node's clock. A changed value means that it was not
        ready in between.
        """

    def apply(self, event: WatchEvent[ObservedPod], now: float) -> None:
        """Update the cache from a watch event."""
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
        """True once both caches are complete."""
        return self.pods.listed and self.workloads.listed
