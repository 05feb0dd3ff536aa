"""End-to-end forks over shared_memory: processes of one host keep the weights in memory once."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from rfork.engines.model_ranks import sources_by_rank
from rfork.image.chunks import MIB
from rfork.planner_client.client import PlannerClient
from rfork.receiver.session import fetch
from rfork.settings import InstanceSettings
from rfork.transport.same_host.memory_file import FILE_NAME
from tests.conftest import StartRfork
from tests.integration.shared_memory.pairs import mapped_chunk_bytes
from tests.integration.weights_node import MODEL, WeightsNode, sha256_of

READY = r'"event": ?"ready"'


@pytest.fixture
def planner(rfork_process: StartRfork) -> str:
    """Return the URL of an empty planner."""
    process = rfork_process("planner", "--port", "0", "--json", until=READY)
    return str(json.loads(process.wait_for(rf"^.*{READY}.*$").group())["url"])


def mapped_by_children() -> list[int]:
    """Return the chunk bytes that each child process of this one has mapped."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [mapped_chunk_bytes(pid)["Rss"] for task in tasks for pid in task.read_text().split()]


def chunk_files_of_children() -> list[str]:
    """Return the complete-chunk files that child processes of this one have open."""
    tasks = Path("/proc/self/task").glob("*/children")
    folders = [Path(f"/proc/{pid}/fd") for task in tasks for pid in task.read_text().split()]
    targets = [os.readlink(file) for folder in folders for file in folder.iterdir()]
    return [target for target in targets if target.startswith(f"/memfd:{FILE_NAME}")]


def test_forks_of_one_host_share_the_memory(planner: str) -> None:
    """Two targets fork from a seed, or one from the other, and both map the chunks."""
    options = {"RFORK_TRANSPORTS": "shared_memory,http", "RFORK_DRAIN_TIMEOUT_S": "0"}
    with contextlib.ExitStack() as stack:
        seed, *targets = (stack.enter_context(WeightsNode(planner, options)) for _ in range(3))
        seed.request("seed", 1)
        for target in targets:
            target.request("fork")
        reports = [target.request("report") for target in targets]
        large = [size for size in mapped_by_children() if size > 10 * MIB]
        assert [("forked", sha256_of(1), [])] * 2 == [
            (report["outcome"], report["sha256"], report["reasons"]) for report in reports
        ]
        assert 2 == len(large)


def test_a_snapshot_writer_leaves_no_cached_files(planner: str) -> None:
    """Writing a snapshot of a seed's weights makes the seed cache no chunk file for other readers."""
    options = {"RFORK_TRANSPORTS": "shared_memory,http", "RFORK_DRAIN_TIMEOUT_S": "0"}
    with WeightsNode(planner, options) as seed:
        seed.request("seed", 1)
        settings = InstanceSettings(planner=planner, transports=("shared_memory",))
        with PlannerClient.of(settings) as client:
            (holder,) = sources_by_rank(client, MODEL)
        _, manifest, report = fetch(holder, settings)
        assert [("shared_memory", len(manifest.digests))] == [
            (share.transport, share.verified_chunks) for share in report.sources
        ]
        assert [] == chunk_files_of_children()


def test_a_target_without_the_shared_dir_uses_http(planner: str, tmp_path: Path) -> None:
    """A container that does not share the seed's socket directory falls back to the next transport and logs
    the reason.
    """
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    options = {"RFORK_TRANSPORTS": "shared_memory,http", "RFORK_DRAIN_TIMEOUT_S": "0"}
    with contextlib.ExitStack() as stack:
        seed, target = (
            stack.enter_context(WeightsNode(planner, {**options, "RFORK_UNIX_SOCKET_DIR": str(folder)}))
            for folder in folders
        )
        seed.request("seed", 1)
        assert [1, 0] == [len(list(folder.iterdir())) for folder in folders]
        target.request("fork")
        report = target.request("report")
        assert "forked" == report["outcome"]
        assert sha256_of(1) == report["sha256"]
        assert "NotSameHost" in str(report["reasons"])
    assert [0, 0] == [len(list(folder.iterdir())) for folder in folders]
