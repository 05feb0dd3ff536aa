"""Where a Pod will run, told to it before it starts: its node's zone, rack and NVLink domain.

Kubernetes tells containers nothing of their node but its name. The API server copies the annotations of a
Binding to the Pod that it binds, so the webhook sets them there, and the container reads them as its own
(``fieldRef``). Bindings of all Pods come this way, whether or not they are rfork's (a Binding does not say):
a look-up is one step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import Listed, News, NodeSeen, Put, Removed
from rfork.settings import HookSettings

NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class Nodes(Protocol):
    """What is asked of a `Cluster`."""

    def nodes(self) -> AsyncIterator[News[NodeSeen]]:
        """All Nodes; see `Cluster.nodes`."""


class Topology:
    """The Nodes' labels, in memory of the webhook's process."""

    def __init__(self, settings: HookSettings) -> None:
        labels = {
            names.ZONE: settings.zone_label,
            names.RACK: settings.rack_label,
            names.NVLINK: settings.nvlink_label,
        }
        self._labels = labels if settings.topology else {}
        self._annotations: dict[str, Mapping[str, str]] = {}

    async def follow(self, cluster: Nodes) -> None:
        """Keep up with the cluster's Nodes, for ever: a task. What was known stays while it is away."""
        async for news in cluster.nodes():
            self.see(news)

    def see(self, news: News[NodeSeen]) -> None:
        """Take one piece of news."""
        match news:
            case Listed(nodes):
                self._annotations = {node.name: self._of(node) for node in nodes}
            case Put(node):
                self._annotations[node.name] = self._of(node)
            case Removed(node):
                self._annotations.pop(node.name, None)

    def annotations_for(self, node: str) -> Mapping[str, str]:
        """What a Pod that is bound to the node is told; nothing for a node that is not known."""
        return self._annotations.get(node, NOTHING)

    def _of(self, node: NodeSeen) -> Mapping[str, str]:
        found = {name: node.labels.get(label, "") for name, label in self._labels.items() if label}
        return {name: value for name, value in found.items() if value} or NOTHING
