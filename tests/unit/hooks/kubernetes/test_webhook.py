"""What the webhook asks the cluster for beside its certificate, and that it does without."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from planner.hooks.kubernetes import webhook
from planner.hooks.kubernetes.cluster import LeaseSeen, Listed, News, NodeSeen
from planner.hooks.kubernetes.leading import Leading
from planner.hooks.kubernetes.topology import Topology
from rfork.errors import SettingsError
from rfork.settings import HookSettings
from tests.unit.hooks.kubernetes.documents import hook


class Broken:
    """A cluster that is asked, and breaks in a way that it should not."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def nodes(self) -> AsyncIterator[News[NodeSeen]]:
        self.asked.append("nodes")
        yield Listed((NodeSeen("a", {"topology.kubernetes.io/zone": "z1"}),))
        raise RuntimeError("a bug")

    async def read_lease(self, name: str, namespace: str) -> LeaseSeen:
        self.asked.append(f"{namespace}/{name}")
        raise RuntimeError("a bug")

    async def close(self) -> None:
        self.asked.append("close")


ASKED = [
    (hook(namespace="rfork"), ["close", "nodes", "rfork/rfork-controller"]),
    (hook(readiness_gate=False), ["close", "nodes"]),
    (hook(topology=False, namespace="rfork", lease="it"), ["close", "rfork/it"]),
    (hook(topology=False, readiness_gate=False), []),
]


@pytest.mark.parametrize(("settings", "expected"), ASKED)
async def test_it_asks_for_what_pods_are_to_get(
    monkeypatch: pytest.MonkeyPatch, settings: HookSettings, expected: list[str]
) -> None:
    """And for no more; what breaks is done without, and takes nothing else with it."""
    cluster, topology, leading = Broken(), Topology(settings), Leading(settings)
    monkeypatch.setattr(webhook, "connect", lambda _: cluster)
    await webhook._follow(settings, topology, leading)
    assert expected == sorted(cluster.asked)
    assert (settings.topology, False) == (bool(topology.annotations_for("a")), leading())


@pytest.mark.parametrize(("settings", "expected"), [(row[0], len(row[1][1:])) for row in ASKED])
async def test_it_does_without_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: HookSettings,
    expected: int,
) -> None:
    """One line for each thing that Pods do not get then; they get no readiness gate."""

    def connect(_: HookSettings) -> None:
        raise SettingsError("there is none")

    monkeypatch.setattr(webhook, "connect", connect)
    leading = Leading(settings)
    await webhook._follow(settings, Topology(settings), leading)
    lines = [record.getMessage() for record in caplog.records]
    assert (expected, False) == (
        sum("no cluster is known why=there is none" in line for line in lines),
        leading(),
    )
