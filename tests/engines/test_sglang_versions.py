"""Versions between real SGLang servers of one served name: a fork never receives another version's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from rfork.storage.versions.version import version_of
from rfork.weights_version import short
from tests.engines.conftest import TinyFolder
from tests.engines.engine_server import READY_S, wait_until
from tests.engines.model_folders import copy_with_weights
from tests.engines.planner_process import PlannerProcess
from tests.engines.queries import serving_instances
from tests.engines.reference_digests import fused_digests
from tests.engines.servers import SglangServer

UPDATE_TIMEOUT_S = 120.0
DIGITS = 16
"""Digits of each SHA-256 that SGLang's weight checker returns."""

Start = Callable[[Path, str], SglangServer]
"""``start(folder, name)``: returns a ready server."""


@pytest.fixture
def start(planner: PlannerProcess, tmp_path: Path, request: pytest.FixtureRequest) -> Start:
    """Factory of servers that use the planner; ends those that are left after the test."""

    def start_server(folder: Path, name: str) -> SglangServer:
        server = SglangServer(
            folder,
            log=tmp_path / f"{name}.log",
            arguments=("--rfork-planner", planner.url, "--served-model-name", "model"),
        )
        request.addfinalizer(server.stop)
        server.start()
        server.wait_ready(2 * READY_S)
        return server

    return start_server


def digests(server: SglangServer) -> dict[str, str]:
    """Return the digests of a server's weights, computed by SGLang's own weight checker."""
    response = httpx.post(f"{server.url}/weights_checker", json={"action": "checksum"}, timeout=UPDATE_TIMEOUT_S)
    response.raise_for_status()
    (rank,) = response.json()["ranks"]
    return dict(rank["checksums"])


def expected_digests(folder: Path) -> dict[str, str]:
    """Return the digests of a server that loaded this folder."""
    return {name: digest[:DIGITS] for name, digest in fused_digests(folder).items()}


def update(server: SglangServer, folder: Path, **named: str) -> None:
    """Update the server's weights from a folder."""
    body = {"model_path": str(folder), **named}
    response = httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=UPDATE_TIMEOUT_S)
    assert response.json()["success"], response.text


def wait_version(planner: PlannerProcess, version: str | None) -> None:
    """Wait until the only server serves this version."""
    wait_until(
        lambda: [version] == [report.version for report in serving_instances(planner)],
        deadline_s=UPDATE_TIMEOUT_S,
        what=f"a seed of version {version}",
    )


@pytest.mark.timeout(1500)
def test_a_rollout_loads_new_weights_and_forks_old_ones(
    tiny_folder: TinyFolder, planner: PlannerProcess, start: Start, tmp_path: Path
) -> None:
    """A folder with other files is another version; a copy of the files under another path is the same one."""
    old, new = tiny_folder(seed=1), tiny_folder(seed=2)
    seed = start(old, "seed")
    assert expected_digests(old) == digests(seed)
    target = start(new, "target")
    assert expected_digests(new) == digests(target)
    assert f"first of version {short(version_of(new))}" in target.wait_for_line(r".*fork done.*").group()
    assert target.lines_with("fork done report=loaded")
    copy = start(copy_with_weights(old, tmp_path), "copy")
    assert copy.lines_with("fork done report=forked")
    assert expected_digests(old) == digests(copy)
    assert {version_of(old), version_of(new)} == {report.version for report in serving_instances(planner)}


@pytest.mark.timeout(1500)
def test_a_weight_update_changes_the_forked_version(
    tiny_folder: TinyFolder, planner: PlannerProcess, start: Start
) -> None:
    """After an update from the new folder, a server on that folder forks, and one on the old one does not.

    An update with a weight version is named after it.
    """
    old, new = tiny_folder(seed=1), tiny_folder(seed=2)
    seed = start(old, "seed")
    update(seed, old, weight_version="step-5")
    wait_version(planner, "step-5")
    update(seed, new)
    wait_version(planner, version_of(new))
    upgraded = start(new, "upgraded")
    assert upgraded.lines_with("fork done report=forked")
    assert expected_digests(new) == digests(upgraded)
    rolled_back = start(old, "rolled-back")
    assert rolled_back.lines_with("fork done report=loaded")
    assert expected_digests(old) == digests(rolled_back)
