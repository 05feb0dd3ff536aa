"""What a replica of the controller knows of the cluster: kept up to date by its watches, leader or not."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from planner.hooks.kubernetes.cluster import Listed, News, PodSeen, Put, WorkloadSeen

GONE_S: Final = 900.0
"""How long Pods are remembered that are gone: for their instances, and for their names in Events."""
MOST_GONE: Final = 10_000

Seen = TypeVar("Seen", PodSeen, WorkloadSeen)


class Kept(Generic[Seen]):
    """Objects of one kind by UID, as they were last seen."""

    def __init__(self) -> None:
        self.items: dict[str, Seen] = {}
        self.gone: dict[str, tuple[Seen, float]] = {}
        """Those that were seen and are not there any more, and since when; the first to go first."""
        self.listed = False
        """Whether all that there are have been seen once: before that, what is missing here is not gone."""

    def hear(self, news: News[Seen], now: float) -> None:
        """Take in what a watch says."""
        if isinstance(news, Put):
            self.items[news.item.uid] = news.item
            self.gone.pop(news.item.uid, None)  # its label came back: it was never gone
            return
        if isinstance(news, Listed):
            there = {item.uid: item for item in news.items}
            left = [item for uid, item in self.items.items() if uid not in there]
            self.items, self.listed = there, True
            for uid in there.keys() & self.gone.keys():
                del self.gone[uid]
        else:
            self.items.pop(news.item.uid, None)
            left = [news.item]
        for item in left:
            self.gone.pop(item.uid, None)
            self.gone[item.uid] = (item, now)
        while self.gone:  # the first went first: what is behind it need not be looked at
            uid, (_, since) = next(iter(self.gone.items()))
            if since >= now - GONE_S and len(self.gone) <= MOST_GONE:
                break
            del self.gone[uid]


class KeptPods(Kept[PodSeen]):
    """Pods, and since when their containers are ready by this controller's own clock."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: dict[str, float] = {}
        """By UID: when they were first seen so, since they were last seen otherwise."""
        self._said: dict[str, float] = {}
        """By UID: since when they are so by their node's clock. Another time: they were not, meanwhile."""

    def hear(self, news: News[PodSeen], now: float) -> None:
        """Take in what a watch says."""
        super().hear(news, now)
        for pod in news.items if isinstance(news, Listed) else (news.item,):
            said = pod.containers_ready_at
            if said is None or pod.uid not in self.items:
                self._forget(pod.uid)
            elif self._said.get(pod.uid) != said:
                self.ready[pod.uid], self._said[pod.uid] = now, said
        if isinstance(news, Listed):
            for uid in self.ready.keys() - self.items.keys():
                self._forget(uid)

    def _forget(self, uid: str) -> None:
        self.ready.pop(uid, None)
        self._said.pop(uid, None)


class World:
    """Pods and workloads with the label `names.MODEL`."""

    def __init__(self) -> None:
        self.pods = KeptPods()
        self.workloads: Kept[WorkloadSeen] = Kept()

    @property
    def listed(self) -> bool:
        """Whether there is anything to decide by."""
        return self.pods.listed and self.workloads.listed
