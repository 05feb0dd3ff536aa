"""Passes the zone, rack and NVLink domain of a Pod's node to the Pod before it starts.

Kubernetes exposes only the name of the node to containers. The API server copies the annotations of a Binding
to the Pod, so the webhook sets them there, and the container reads them with ``fieldRef``. Bindings of all
Pods pass through here, because a Binding does not show if its Pod uses rfork, so a lookup is one step.
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
    """The part of `Cluster` that is needed here."""

    def nodes(self) -> AsyncIterator[WatchEvent[ObservedNode]]:
        """See `Cluster.nodes`."""


class NodeTopology:
    """The Nodes' labels, in the memory of the webhook's process."""

    def __init__(self, settings: KubernetesSettings) -> None:
        labels = {
            names.ZONE: settings.zone_label,
            names.RACK: settings.rack_label,
            names.NVLINK: settings.nvlink_label,
        }
        self._labels = labels if settings.inject_topology else {}
        self._annotations: dict[str, Mapping[str, str]] = {}

    async def follow(self, cluster: NodeWatcher) -> None:
        """Watch the cluster's Nodes forever. While the cluster is unreachable, the last state stays."""
        async for event in cluster.nodes():
            self.apply(event)

    def apply(self, event: WatchEvent[ObservedNode]) -> None:
        """Update the state from a watch event."""
        match event:
            case Synced(nodes):
                self._annotations = {node.name: self._of(node) for node in nodes}
            case Upserted(node):
                self._annotations[node.name] = self._of(node)
            case Deleted(node):
                self._annotations.pop(node.name, None)

    def annotations_for(self, node: str) -> Mapping[str, str]:
        """Return the annotations for a Pod that is bound to the node. Empty for an unknown node."""
        return self._annotations.get(node, NO_ANNOTATIONS)

    def _of(self, node: ObservedNode) -> Mapping[str, str]:
        found = {name: node.labels.get(label, "") for name, label in self._labels.items() if label}
        return {name: value for name, value in found.items() if value} or NO_ANNOTATIONS
