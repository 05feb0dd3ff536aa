"""Cold starts of real processes: no instance has the image, and the group reads storage once."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from rfork.engines.transformers import loaded_model
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.memory import image_sha256
from rfork.planner_client.client import PlannerClient
from rfork.schema import source_type
from rfork.storage.snapshots.writer import write_snapshot
from tests.conftest import StartRfork
from tests.processes import RforkProcess, startup_patch

READY = r'"event": ?"ready"'
CHUNKS_BEFORE_GATE = 4
"""Chunks that a gated disk returns before it blocks."""
GATED_DISK_PATCH = f"""
from rfork.storage.checkpoint import Checkpoint
from rfork.storage.checkpoint import CheckpointChunks
read, load, waited = CheckpointChunks.read, Checkpoint.load_into, []

def wait():
    if not waited:
        waited.append(open({{gate!r}}).read())

def gated_read(self, begin, end, into):
    if begin >= {CHUNKS_BEFORE_GATE * MIB}:
        wait()
    read(self, begin, end, into)

def gated_load(self, module):
    wait()
    load(self, module)

CheckpointChunks.read, Checkpoint.load_into = gated_read, gated_load
"""
"""Startup patch of a process with a gated disk: opening a FIFO waits for a writer."""

Report = dict[str, object]


class ColdGroup:
    """A planner, and instances of one model that start without a seed."""

    def __init__(self, start: StartRfork, model: Path, folder: Path) -> None:
        self._start = start
        self._model = model
        self._gate = folder / "gate"
        os.mkfifo(self._gate)
        self._gate_environment = startup_patch(folder / "patch", GATED_DISK_PATCH.format(gate=str(self._gate)))
        # Short enough to replace a killed instance soon; long enough that a slow machine loses none.
        environment = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5", "RFORK_PLANNER_INSTANCE_TTL_S": "8"}
        planner = start("planner", "--port", "0", "--json", until=READY, environment=environment)
        self.url = cast(str, json.loads(planner.wait_for(rf"^.*{READY}.*$").group())["url"])
        self.client = PlannerClient(self.url)

    def pull(
        self,
        *,
        checkpoint: Path | None = None,
        gated: bool = False,
        environment: dict[str, str] | None = None,
    ) -> RforkProcess:
        """Start an instance that stays as a seed once it has its weights."""
        more = {
            "RFORK_TRANSPORTS": "http",
            "RFORK_MAX_INFLIGHT_CHUNKS": "1",
            "RFORK_SOURCE_IDLE_TIMEOUT_S": "5",
            **(environment or {}),
        }
        if gated:
            more |= self._gate_environment
        arguments = ["pull", str(self._model), "--name", "tiny", "--planner", self.url]
        if checkpoint is not None:
            arguments += ["--checkpoint", str(checkpoint)]
        return self._start(*arguments, "--json", "--sha256", "--stay", environment=more)

    def open_gate(self) -> None:
        """Unblock the gated disk."""
        self._gate.write_text("")


def wait_for_chunks(process: RforkProcess, chunks: int) -> None:
    """Wait until the process has verified this many chunks of 1 MiB."""
    process.wait_for(rf"fork tiny: {chunks}\.\d+ MB of")


def results(processes: Sequence[RforkProcess]) -> list[Report]:
    """Return the report of each process, as soon as it has its weights."""
    return [json.loads(process.wait_for(r'^\{"fork_id".*$').group()) for process in processes]


def storage_bytes(reports: Sequence[Report]) -> int:
    return sum(cast(int, report["storage_bytes"]) for report in reports)


@pytest.fixture
def group(rfork_process: StartRfork, tiny_model: Path, tmp_path: Path) -> Iterator[ColdGroup]:
    """A planner without instances."""
    made = ColdGroup(rfork_process, tiny_model, tmp_path)
    yield made
    made.client.close()


@pytest.fixture(scope="session")
def expected_sha256(tiny_model: Path) -> str:
    """Hash of the tiny model's tensors, as loaded from its checkpoint."""
    return image_sha256(capture(loaded_model(tiny_model)))


def test_a_cold_group_reads_its_checkpoint_once(group: ColdGroup, tiny_model: Path, expected_sha256: str) -> None:
    """Two follow while the leader's disk is still reading; all have the right bytes, read once in total."""
    leader = group.pull(checkpoint=tiny_model, gated=True)
    wait_for_chunks(leader, CHUNKS_BEFORE_GATE)
    followers = [group.pull(checkpoint=tiny_model) for _ in range(2)]
    for follower in followers:
        wait_for_chunks(follower, CHUNKS_BEFORE_GATE)
    group.open_gate()
    reports = results([leader, *followers])
    size = cast(int, reports[0]["image_bytes"])
    assert [expected_sha256] * 3 == [report["sha256"] for report in reports]
    assert ["forked"] * 3 == [report["outcome"] for report in reports]
    assert size == storage_bytes(reports)
    reason_counts = Counter[str]()
    for view in group.client.forks(model="tiny"):
        for name, count in (view.finish.sources if view.finish is not None else {}).items():
            reason_counts[source_type(name)] += count
    assert {"checkpoint": size, "peer": 2 * size} == reason_counts


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow),
    ],
)
def test_a_lost_leader_is_replaced_without_a_restart(
    group: ColdGroup, tiny_model: Path, expected_sha256: str, number: signal.Signals
) -> None:
    """It dies or hangs during the read: another instance continues where it stopped, and nothing is read
    twice.
    """
    leader = group.pull(checkpoint=tiny_model, gated=True)
    wait_for_chunks(leader, CHUNKS_BEFORE_GATE)
    # Without the race, in which a follower that got nothing for as long loads the complete checkpoint.
    alone = {"RFORK_RACE_STORAGE": "0"}
    followers = [group.pull(checkpoint=tiny_model, environment=alone) for _ in range(2)]
    for follower in followers:
        wait_for_chunks(follower, CHUNKS_BEFORE_GATE)
    leader.signal(number)
    reports = results(followers)
    size = cast(int, reports[0]["image_bytes"])
    assert [expected_sha256] * 2 == [report["sha256"] for report in reports]
    assert ["forked"] * 2 == [report["outcome"] for report in reports]
    assert size - CHUNKS_BEFORE_GATE * MIB == storage_bytes(reports)


def test_a_checkpoint_that_must_be_converted(
    group: ColdGroup, tiny_model: Path, tmp_path: Path, expected_sha256: str
) -> None:
    """One instance loads and converts the complete checkpoint and serves the result to the other."""
    loaded_model(tiny_model).float().save_pretrained(tmp_path / "float32")
    reports = results([group.pull(checkpoint=tmp_path / "float32") for _ in range(2)])
    names = {share["source_id"] for report in reports for share in cast(list[dict[str, str]], report["sources"])}
    assert [expected_sha256] * 2 == [report["sha256"] for report in reports]
    assert reports[0]["image_bytes"] == storage_bytes(reports)
    assert 1 == len([name for name in names if re.match("loader:file://.*/float32$", name)])


def test_a_loader_that_dies_is_replaced(
    group: ColdGroup, tiny_model: Path, tmp_path: Path, expected_sha256: str
) -> None:
    """Instances that wait for a loader without chunks elect another when it is killed."""
    loaded_model(tiny_model).float().save_pretrained(tmp_path / "float32")
    leader = group.pull(checkpoint=tmp_path / "float32", gated=True)
    leader.wait_for("loading for all waiting instances")
    followers = [group.pull(checkpoint=tmp_path / "float32") for _ in range(2)]
    for follower in followers:
        follower.wait_for('"event": "plan received"')
    leader.signal(signal.SIGKILL)
    reports = results(followers)
    assert [expected_sha256] * 2 == [report["sha256"] for report in reports]
    assert ["forked"] * 2 == [report["outcome"] for report in reports]
    assert reports[0]["image_bytes"] == storage_bytes(reports)


def test_a_group_shares_a_snapshot(group: ColdGroup, tiny_model: Path, tmp_path: Path, expected_sha256: str) -> None:
    """Three instances with a snapshot and without a checkpoint read every byte of it once."""
    image = capture(loaded_model(tiny_model))
    path = tmp_path / "snapshot.safetensors"
    write_snapshot(image, image.manifest(), path)
    snapshot = {"RFORK_SNAPSHOT": path.as_uri()}
    reports = results([group.pull(environment=snapshot) for _ in range(3)])
    assert [expected_sha256] * 3 == [report["sha256"] for report in reports]
    assert reports[0]["image_bytes"] == storage_bytes(reports)
