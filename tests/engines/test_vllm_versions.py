"""Versions between real vLLM servers of one model name: a fork never receives another version's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rfork.schema import InstanceReport
from rfork.storage.versions.version import version_of
from rfork.weights_version import short
from tests.engines.conftest import TinyFolder
from tests.engines.engine_server import READY_S, ROOT, wait_until
from tests.engines.model_folders import copy_with_weights, copy_without_weights
from tests.engines.planner_process import PlannerProcess
from tests.engines.queries import serving_instances
from tests.engines.reference_digests import fused_digests
from tests.engines.servers import VllmServer
from tests.engines.vllm_extension import WorkerExtension

EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
UPDATE_TIMEOUT_S = 120.0

Start = Callable[..., VllmServer]
"""``start(folder, name, *arguments, **environment)``: returns a ready server."""
Ranks = dict[int, str | None]
"""weights_id of each tensor rank."""


@pytest.fixture
def start(planner: PlannerProcess, tmp_path: Path, request: pytest.FixtureRequest) -> Start:
    """Factory of servers that use the planner; ends those that are left after the test."""

    def start_server(folder: Path, name: str, *arguments: str, **environment: str) -> VllmServer:
        server = VllmServer(
            folder,
            log=tmp_path / f"{name}.log",
            arguments=("--load-format", "rfork", "--worker-extension-cls", EXTENSION, *arguments),
            environment={
                "RFORK_PLANNER": planner.url,
                "PYTHONPATH": str(ROOT),
                "VLLM_SERVER_DEV_MODE": "1",
                **environment,
            },
        )
        request.addfinalizer(server.stop)
        server.start()
        server.wait_ready(2 * READY_S)
        return server

    return start_server


def call(server: VllmServer, method: str, **named: str) -> list[Any]:
    """Call a method of each of its workers; returns their results."""
    body = {"method": method, "kwargs": named}
    response = httpx.post(f"{server.url}/collective_rpc", json=body, timeout=2 * UPDATE_TIMEOUT_S)
    response.raise_for_status()
    results: list[Any] = response.json()["results"]
    return results


def digests(server: VllmServer) -> dict[str, str]:
    """Return the digests of the weights of a server of one rank."""
    (found,) = call(server, "weight_digests")
    return dict(found)


def by_replica(planner: PlannerProcess) -> dict[str, list[InstanceReport]]:
    """Return the seeds that the planner knows, by replica."""
    found: dict[str, list[InstanceReport]] = {}
    for report in serving_instances(planner):
        found.setdefault(report.replica or report.instance_id, []).append(report)
    return found


def ranks_of(reports: list[InstanceReport]) -> Ranks:
    """Return the weights_ids of a replica by rank."""
    return {report.rank.tp: report.weights_id for report in reports}


class VllmFleet:
    """The servers that a planner knows, in the order of their arrival."""

    def __init__(self, planner: PlannerProcess, ranks: int) -> None:
        self._planner = planner
        self._ranks = ranks
        self._known: set[str] = set()

    def wait_new_replica(self) -> str:
        """Wait for one more server to serve all of its ranks, and return the replica's name."""
        wait_until(lambda: len(self._new_replicas()) == 1, deadline_s=UPDATE_TIMEOUT_S, what="a seed of each rank")
        (replica,) = self._new_replicas()
        self._known.add(replica)
        return replica

    def ranks(self, replica: str) -> Ranks:
        """Return the weights_ids that a server serves, by rank."""
        return ranks_of(by_replica(self._planner)[replica])

    def versions(self, replica: str) -> set[str | None]:
        """Return the versions that the ranks of a server report."""
        return {report.version for report in by_replica(self._planner).get(replica, [])}

    def _new_replicas(self) -> list[str]:
        found = by_replica(self._planner)
        return [name for name, each in found.items() if name not in self._known and len(each) == self._ranks]


@pytest.mark.timeout(1500)
def test_a_rollout_loads_new_weights_and_forks_old_ones(
    tiny_folder: TinyFolder, planner: PlannerProcess, start: Start, tmp_path: Path
) -> None:
    """A folder of the same name with other files is another version; a copy of the files is the same one."""
    old, new = tiny_folder(seed=1), tiny_folder(seed=2)
    seed = start(old, "seed")
    assert fused_digests(old) == digests(seed)
    target = start(new, "target")
    assert fused_digests(new) == digests(target)
    assert f"first of version {short(version_of(new))}" in target.wait_for_line(r".*fork done.*").group()
    assert target.lines_with("fork done report=loaded")
    copy = start(copy_with_weights(old, tmp_path), "copy")
    assert copy.lines_with("fork done report=forked")
    assert fused_digests(old) == digests(copy)
    assert {version_of(old), version_of(new)} == {report.version for report in serving_instances(planner)}


@pytest.mark.timeout(1500)
def test_a_weight_update_changes_the_forked_version(
    tiny_folder: TinyFolder, planner: PlannerProcess, start: Start
) -> None:
    """After a reload from the new folder, a server on that folder forks, and one on the old one does not."""
    old, new = tiny_folder(seed=1), tiny_folder(seed=2)
    seed = start(old, "seed")
    call(seed, "reload_weights", weights_path=str(new))
    wait_until(
        lambda: [version_of(new)] == [report.version for report in serving_instances(planner)],
        deadline_s=UPDATE_TIMEOUT_S,
        what="a seed of the new version",
    )
    upgraded = start(new, "upgraded")
    assert upgraded.lines_with("fork done report=forked")
    assert fused_digests(new) == digests(upgraded)
    rolled_back = start(old, "rolled-back")
    assert rolled_back.lines_with("fork done report=loaded")
    assert fused_digests(old) == digests(rolled_back)


TWO_RANKS = ("--tensor-parallel-size", "2")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_both_ranks_come_from_one_version(
    tiny_folder: TinyFolder, planner: PlannerProcess, start: Start, tmp_path: Path
) -> None:
    """While two versions are served, a server forks that of its files; without files, the one it states."""
    old, new = tiny_folder(seed=1), tiny_folder(seed=2)
    fleet = VllmFleet(planner, 2)
    start(old, "old", *TWO_RANKS)
    first = fleet.wait_new_replica()
    start(new, "new", *TWO_RANKS)
    second = fleet.wait_new_replica()
    assert set(fleet.ranks(first).values()).isdisjoint(fleet.ranks(second).values())
    copy = start(copy_with_weights(old, tmp_path), "copy", *TWO_RANKS)
    assert 2 == len(copy.lines_with("fork done report=forked"))
    assert fleet.ranks(first) == fleet.ranks(fleet.wait_new_replica())
    copy.stop()
    bare = copy_without_weights(old, tmp_path / "bare")
    stated = start(bare, "stated", *TWO_RANKS, RFORK_VERSION=str(version_of(new)))
    assert 2 == len(stated.lines_with("fork done report=forked"))
    assert fleet.ranks(second) == fleet.ranks(fleet.wait_new_replica())


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_both_ranks_are_forked_from_an_update(
    tiny_folder: TinyFolder, planner: PlannerProcess, start: Start, tmp_path: Path
) -> None:
    """A server of two ranks continues to serve after an update without known files, under one new version."""
    old, new = tiny_folder(seed=1), tiny_folder(seed=2)
    fleet = VllmFleet(planner, 2)
    seed = start(old, "seed", *TWO_RANKS)
    replica = fleet.wait_new_replica()
    before = fleet.ranks(replica)
    call(seed, "load_tensors", folder=str(new))
    wait_until(
        lambda: fleet.versions(replica) == {f"update:{replica}:1"} and len(fleet.ranks(replica)) == 2,
        deadline_s=UPDATE_TIMEOUT_S,
        what="both ranks of the update",
    )
    updated = fleet.ranks(replica)
    assert set(before.values()).isdisjoint(updated.values())
    fork = start(copy_without_weights(old, tmp_path), "fork", *TWO_RANKS)
    assert 2 == len(fork.lines_with("fork done report=forked"))
    assert updated == fleet.ranks(fleet.wait_new_replica())
    assert call(seed, "weight_digests") == call(fork, "weight_digests")
