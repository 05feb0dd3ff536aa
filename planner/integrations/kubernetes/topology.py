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

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import Deleted, ObservedNode, Synced, Upserted, WatchEvent
from rfork.settings import KubernetesSettings

NO_ANNOTATIONS: Final[Mapping[str, str]] = MappingProxyType({})


class NodeWatcher(Protocol):
    """What is asked of a `Cluster`."""

    def nodes(self) -> AsyncIterator[WatchEvent[ObservedNode]]:
        """All Nodes; see `Cluster.nodes`."""


class NodeTopology:
    """The Nodes' labels, in memory of the webhook's process."""

    def __init__(self, settings: KubernetesSettings) -> None:
        labels = {
            names.ZONE: settings.zone_label,
            names.RACK: settings.rack_label,
            names.NVLINK: settings.nvlink_label,
        }
        self._labels = labels if settings.inject_topology else {}
        self._annotations: dict[str, Mapping[str, str]] = {}

    async def follow(self, cluster: NodeWatcher) -> None:
        """Keep up with the cluster's Nodes, for ever: a task. What was known stays while it is away."""
        async for event in cluster.nodes():
            self.apply(event)

    def apply(self, event: WatchEvent[ObservedNode]) -> None:
        """Take one piece of news."""
        match event:
            case Synced(nodes):
                self._annotations = {node.name: self._of(node) for node in nodes}
            case Upserted(node):
                self._annotations[node.name] = self._of(node)
            case Deleted(node):
                self._annotations.pop(node.name, None)

    def annotations_for(self, node: str) -> Mapping[str, str]:
        """What a Pod that is bound to the node is told; nothing for a node that is not known."""
        return self._annotations.get(node, NO_ANNOTATIONS)

    def _of(self, node: ObservedNode) -> Mapping[str, str]:
        found = {name: node.labels.get(label, "") for name, label in self._labels.items() if label}
        return {name: value for name, value in found.items() if value} or NO_ANNOTATIONS
