"""Versions between real SGLang servers of one served name: no fork ever gets another version's weights."""

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
"""Of each SHA-256: what SGLang's weight checker tells."""

Start = Callable[[Path, str], SglangServer]
"""``start(folder, name)``: a server that is ready."""


@pytest.fixture
def start(planner: PlannerProcess, tmp_path: Path, request: pytest.FixtureRequest) -> Start:
    """Starts servers under the planner, and ends those that are left after the test."""

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
    """Return the digests of the weights of a server, by SGLang's own weight checker."""
    response = httpx.post(f"{server.url}/weights_checker", json={"action": "checksum"}, timeout=UPDATE_TIMEOUT_S)
    response.raise_for_status()
    (rank,) = response.json()["ranks"]
    return dict(rank["checksums"])


def expected_digests(folder: Path) -> dict[str, str]:
    """Return the digests that a server has which loaded this folder."""
    return {name: digest[:DIGITS] for name, digest in fused_digests(folder).items()}


def update(server: SglangServer, folder: Path, **named: str) -> None:
    """Have it load other weights from a folder."""
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
def test_a_rollout_loads_the_new_weights_and_forks_the_old(
    tiny_folder: TinyFolder, planner: PlannerProcess, start: Start, tmp_path: Path
) -> None:
    """A folder with other files is another version; a copy of the files under another path is the same."""
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
def test_an_update_in_place_changes_who_forks_from_it(
    tiny_folder: TinyFolder, planner: PlannerProcess, start: Start
) -> None:
    """After an update from the new folder, a server on that folder forks, and one on the old one does not.

    An update that brings a weight version is named by it.
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
    rolled_back = start(old, "behind")
    assert rolled_back.lines_with("fork done report=loaded")
    assert expected_digests(old) == digests(rolled_back)
