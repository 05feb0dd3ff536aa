"""Topology of a Pod's node."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import Deleted, Synced, Upserted, WatchEvent
from planner.integrations.kubernetes.cluster import Cluster, ObservedNode
from planner.integrations.kubernetes.webhook import NodeTopology
from tests.unit.planner.integrations.kubernetes.pod_documents import webhook_settings

A = ObservedNode(
    "a",
    {
        "topology.kubernetes.io/zone": "z1",
        "topology.kubernetes.io/rack": "r7",
        "nvidia.com/gpu.clique": "c.3",
    },
)
B = ObservedNode("b", {"topology.kubernetes.io/zone": "z2", "topology.kubernetes.io/rack": ""})
ANNOTATIONS_A = {names.ZONE: "z1", names.RACK: "r7", names.NVLINK: "c.3"}
ANNOTATIONS_B = {names.ZONE: "z2"}


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ([], ({}, {})),
        ([Synced((A, B))], (ANNOTATIONS_A, ANNOTATIONS_B)),
        ([Synced((A,)), Upserted(B)], (ANNOTATIONS_A, ANNOTATIONS_B)),
        ([Synced((A, B)), Upserted(ObservedNode("a", {}))], ({}, ANNOTATIONS_B)),
        ([Synced((A, B)), Deleted(A), Deleted(A)], ({}, ANNOTATIONS_B)),
        ([Synced((A, B)), Synced((B,))], ({}, ANNOTATIONS_B)),
    ],
)
def test_the_latest_state_of_a_node_counts(
    updates: list[WatchEvent[ObservedNode]], expected: tuple[dict[str, str], dict[str, str]]
) -> None:
    """Missing labels and unknown nodes result in no annotation."""
    topology = NodeTopology(webhook_settings())
    for each in updates:
        topology.apply(each)
    assert expected == tuple(dict(topology.annotations_for(name)) for name in "ab")


def test_labels_are_configurable() -> None:
    """An empty setting disables one."""
    topology = NodeTopology(webhook_settings(zone_label="zone", rack_label="", nvlink_label="nvl"))
    topology.apply(Upserted(ObservedNode("a", {"zone": "z", "": "x", "topology.kubernetes.io/rack": "r"})))
    assert {names.ZONE: "z"} == dict(topology.annotations_for("a"))


async def test_it_follows_the_cluster() -> None:
    """All events of the watch are applied."""

    class FakeNodes(Cluster):
        def __init__(self) -> None:
            pass

        async def nodes(self) -> AsyncIterator[WatchEvent[ObservedNode]]:
            yield Synced((A,))
            yield Upserted(B)

    topology = NodeTopology(webhook_settings())
    await topology.follow(FakeNodes())
    assert (ANNOTATIONS_A, ANNOTATIONS_B) == tuple(dict(topology.annotations_for(name)) for name in "ab")


def test_nodes_are_not_stored_if_topology_is_off() -> None:
    """Pods get no annotations."""
    topology = NodeTopology(webhook_settings(inject_topology=False))
    topology.apply(Upserted(A))
    assert {} == dict(topology.annotations_for("a"))
