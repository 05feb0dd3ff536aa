"""What a Pod is told of its node."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import Listed, News, NodeSeen, Put, Removed
from planner.hooks.kubernetes.topology import Topology
from tests.unit.hooks.kubernetes.documents import hook

A = NodeSeen(
    "a",
    {
        "topology.kubernetes.io/zone": "z1",
        "topology.kubernetes.io/rack": "r7",
        "nvidia.com/gpu.clique": "c.3",
    },
)
B = NodeSeen("b", {"topology.kubernetes.io/zone": "z2", "topology.kubernetes.io/rack": ""})
TOLD_OF_A = {names.ZONE: "z1", names.RACK: "r7", names.NVLINK: "c.3"}
TOLD_OF_B = {names.ZONE: "z2"}


@pytest.mark.parametrize(
    ("news", "expected"),
    [
        ([], ({}, {})),
        ([Listed((A, B))], (TOLD_OF_A, TOLD_OF_B)),
        ([Listed((A,)), Put(B)], (TOLD_OF_A, TOLD_OF_B)),
        ([Listed((A, B)), Put(NodeSeen("a", {}))], ({}, TOLD_OF_B)),
        ([Listed((A, B)), Removed(A), Removed(A)], ({}, TOLD_OF_B)),
        ([Listed((A, B)), Listed((B,))], ({}, TOLD_OF_B)),
    ],
)
def test_the_last_news_of_a_node_counts(
    news: list[News[NodeSeen]], expected: tuple[dict[str, str], dict[str, str]]
) -> None:
    """Labels that a node lacks, and nodes that are not known, are told nothing of."""
    topology = Topology(hook())
    for each in news:
        topology.see(each)
    assert expected == tuple(dict(topology.annotations_for(name)) for name in "ab")


def test_which_labels_count_is_a_setting() -> None:
    """An empty one: none."""
    topology = Topology(hook(zone_label="zone", rack_label="", nvlink_label="nvl"))
    topology.see(Put(NodeSeen("a", {"zone": "z", "": "x", "topology.kubernetes.io/rack": "r"})))
    assert {names.ZONE: "z"} == dict(topology.annotations_for("a"))


async def test_it_follows_the_cluster() -> None:
    """Piece by piece, to the end."""

    class Nodes:
        async def nodes(self) -> AsyncIterator[News[NodeSeen]]:
            yield Listed((A,))
            yield Put(B)

    topology = Topology(hook())
    await topology.follow(Nodes())
    assert (TOLD_OF_A, TOLD_OF_B) == tuple(dict(topology.annotations_for(name)) for name in "ab")


def test_no_node_is_remembered_where_that_is_off() -> None:
    """Pods are told nothing."""
    topology = Topology(hook(topology=False))
    topology.see(Put(A))
    assert {} == dict(topology.annotations_for("a"))
