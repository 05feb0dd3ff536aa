"""The webhook's use of the cluster in addition to its certificate, and its behaviour without one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from planner.integrations.kubernetes import webhook
from planner.integrations.kubernetes.api_server import Synced, WatchEvent
from planner.integrations.kubernetes.cluster import ObservedLease, ObservedNode
from planner.integrations.kubernetes.leader_election import LeaderWatch
from planner.integrations.kubernetes.webhook import NodeTopology
from rfork.errors import SettingsError
from rfork.settings import KubernetesSettings
from tests.unit.planner.integrations.kubernetes.pod_documents import webhook_settings


class BrokenCluster:
    """A cluster that records calls and raises unexpected errors."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def nodes(self) -> AsyncIterator[WatchEvent[ObservedNode]]:
        self.calls.append("nodes")
        yield Synced((ObservedNode("a", {"topology.kubernetes.io/zone": "z1"}),))
        raise RuntimeError("a bug")

    async def read_lease(self, name: str, namespace: str) -> ObservedLease:
        self.calls.append(f"{namespace}/{name}")
        raise RuntimeError("a bug")

    async def close(self) -> None:
        self.calls.append("close")


EXPECTED_CALLS = [
    (webhook_settings(namespace="rfork"), ["close", "nodes", "rfork/rfork-controller"]),
    (webhook_settings(readiness_gate=False), ["close", "nodes"]),
    (webhook_settings(inject_topology=False, namespace="rfork", lease="it"), ["close", "rfork/it"]),
    (webhook_settings(inject_topology=False, readiness_gate=False), []),
]


@pytest.mark.parametrize(("settings", "expected"), EXPECTED_CALLS)
async def test_only_needed_resources_are_watched(
    monkeypatch: pytest.MonkeyPatch, settings: KubernetesSettings, expected: list[str]
) -> None:
    """A failing watch is logged and does not affect the others."""
    cluster, topology, leading = BrokenCluster(), NodeTopology(settings), LeaderWatch(settings)
    monkeypatch.setattr(webhook, "connect", lambda _: cluster)
    await webhook._follow(settings, topology, leading)
    assert expected == sorted(cluster.calls)
    assert settings.inject_topology == bool(topology.annotations_for("a"))
    assert not leading()


@pytest.mark.parametrize(("settings", "expected"), [(row[0], len(row[1][1:])) for row in EXPECTED_CALLS])
async def test_the_webhook_works_without_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: KubernetesSettings,
    expected: int,
) -> None:
    """One log line per missing feature; Pods get no readiness gate."""

    def connect(_: KubernetesSettings) -> None:
        raise SettingsError("not configured")

    monkeypatch.setattr(webhook, "connect", connect)
    leading = LeaderWatch(settings)
    await webhook._follow(settings, NodeTopology(settings), leading)
    lines = [record.getMessage() for record in caplog.records]
    assert expected == sum("the webhook cannot connect to the cluster reason=not configured" in line for line in lines)
    assert not leading()
