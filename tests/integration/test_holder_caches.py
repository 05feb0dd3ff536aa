"""A holder pulls the JIT caches of a model that is announced for its host, together with the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rfork import artifacts
from rfork.settings import InstanceSettings
from tests.conftest import StartRfork
from tests.integration.test_artifacts import artifact_settings, read_tree
from tests.integration.test_holder import HolderFleet
from tests.integration.weights_node import MODEL


@pytest.fixture
def announced_fleet(rfork_process: StartRfork) -> Iterator[HolderFleet]:
    """A fleet with an empty planner."""
    with contextlib.ExitStack() as stack:
        yield HolderFleet(rfork_process, stack)


def test_caches_travel_with_announced_weights(announced_fleet: HolderFleet, tmp_path: Path) -> None:
    """One announcement brings both to the host before an engine starts there."""
    fleet = announced_fleet
    compiled = tmp_path / "a" / "fxgraph" / "ab" / "x" / "graph"
    compiled.parent.mkdir(parents=True)
    compiled.write_bytes(b"graph" * 1000)
    seed_settings = InstanceSettings(planner=fleet.url, transports=("http",), drain_timeout_s=0.0)
    fleet.seed_of(1)
    with artifacts.seed(model=MODEL, settings=seed_settings, artifacts=artifact_settings(tmp_path / "a")) as seed:
        assert seed.wait_registered(10)
        holder = fleet.hold(RFORK_ARTIFACTS_KINDS="inductor", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "b"))
        fleet.announce("v1")
        line = holder.wait_for("JIT caches prefetched.*").group()
        fleet.wait_until(lambda: "v1" in fleet.images())
    assert '"files": 1,' in line
    assert read_tree(tmp_path / "a") == read_tree(tmp_path / "b")
