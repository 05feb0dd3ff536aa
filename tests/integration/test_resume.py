"""Targets that are killed during a fork and restarted: only missing chunks are fetched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from rfork.engines.transformers import loaded_model
from rfork.image.capture import capture
from rfork.image.memory import Image, image_sha256
from rfork.planner_client.client import PlannerClient
from rfork.receiver.spool import spool_name
from rfork.source.seed import InstanceIdentity
from rfork.storage.spool import PAGE, RECORD, acquire_spool
from tests.conftest import StartRfork
from tests.processes import RforkProcess, startup_patch

SLOW = str(2 << 20)
"""Bytes per second at which the tiny model (9 MB) takes seconds, enough to kill its reader."""
READY = r'"event": ?"ready"'
SHARED_MEMORY = Path("/dev/shm")
LONG_FLUSH_PATCH = "import rfork.receiver.spool as persister\npersister.FLUSH_TIMEOUT_S = 60.0\n"
"""Makes a target wait for its spool on a slow disk."""

Report = dict[str, object]


class ResumeFleet:
    """A planner, seeds, and targets that spool to one directory."""

    def __init__(self, start: StartRfork, model: Path, folder: Path, patch_environment: dict[str, str]) -> None:
        self._start = start
        self._patch_environment = patch_environment
        self._model = model
        self.folder = folder
        environment = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5", "RFORK_PLANNER_INSTANCE_TTL_S": "3"}
        planner = start("planner", "--port", "0", "--json", until=READY, environment=environment)
        self.url = cast(str, json.loads(planner.wait_for(rf"^.*{READY}.*$").group())["url"])
        self.client = PlannerClient(self.url)

    def seed(self, model: Path | None = None, *, rate: str | None = SLOW) -> RforkProcess:
        """Start a seed, by default a slow one."""
        arguments = ["seed", str(model or self._model), "--name", "tiny", "--planner", self.url, "--json"]
        arguments += ["--egress-rate", rate] if rate is not None else []
        return self._start(*arguments, until=READY, environment={"RFORK_TRANSPORTS": "http"})

    def pull(self) -> RforkProcess:
        """Start a target."""
        arguments = ["pull", str(self._model), "--name", "tiny", "--planner", self.url, "--json", "--sha256"]
        more = {"RFORK_TRANSPORTS": "http", "RFORK_MAX_INFLIGHT_CHUNKS": "1", "RFORK_RESUME_DIR": str(self.folder)}
        more["RFORK_RACE_STORAGE"] = "0"
        return self._start(*arguments, environment={**more, **self._patch_environment})

    def kill_mid_fork(self, chunks: int) -> None:
        """Start a target, and kill it after it has verified `chunks` of eight chunks, but not all."""
        process = self.pull()
        process.wait_for(rf"fork tiny: [{chunks}-7]\.\d+ MB of")
        self.wait_recorded(1, chunks - 1)
        process.signal(signal.SIGKILL)
        process.wait()

    def wait_recorded(self, spools: int, chunks: int) -> None:
        """Wait until `spools` spools have recorded `chunks` chunks.

        Chunks are recorded after they are verified, possibly much later on a busy machine.
        """
        deadline = time.monotonic() + 30
        while sum(count >= chunks for count in self.recorded_chunks()) < spools and time.monotonic() < deadline:
            time.sleep(0.01)

    def recorded_chunks(self) -> list[int]:
        """Return the number of recorded chunks per spool in the directory, while targets write them."""
        counts = []
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                file.seek(PAGE)
                records = file.read(PAGE)
            steps = range(0, len(records), RECORD.size)
            counts.append(sum(any(records[at : at + RECORD.size]) for at in steps))
        return counts

    def kept_chunks(self, image: Image) -> list[int]:
        """Return the chunks of this image that the next target will find."""
        spool = acquire_spool(self.folder, spool_name(InstanceIdentity("tiny")), image.layout)
        records = spool.records
        spool.close()
        return sorted(chunk for chunk, digest in records.items() if digest == image.digest(chunk))


def result(process: RforkProcess) -> Report:
    """Return the report of a pull that succeeded."""
    assert 0 == process.wait()
    return cast(Report, json.loads(process.stdout))


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty directory: on disk, or in shared memory where the test requests it."""
    if getattr(request, "param", "disk") == "disk":
        yield tmp_path
        return
    if not SHARED_MEMORY.is_dir():
        pytest.skip("NO /dev/shm: a resume from shared memory is NOT tested")
    made = Path(tempfile.mkdtemp(prefix="rfork-test-", dir=SHARED_MEMORY))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def fleet(
    rfork_process: StartRfork, tiny_model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ResumeFleet]:
    """A fleet with an empty planner."""
    patch_environment = startup_patch(tmp_path_factory.mktemp("start") / "patch", LONG_FLUSH_PATCH)
    made = ResumeFleet(rfork_process, tiny_model, folder, patch_environment)
    yield made
    made.client.close()


@pytest.fixture(scope="module")
def expected_image(tiny_model: Path) -> Image:
    """The bytes that a target must have."""
    return capture(loaded_model(tiny_model))


def nbytes(image: Image, chunks: list[int]) -> int:
    return sum(end - begin for begin, end in (image.layout.chunks[chunk] for chunk in chunks))


@pytest.mark.parametrize("folder", ["disk", "shared memory"], indirect=True)
def test_a_killed_target_resumes(fleet: ResumeFleet, expected_image: Image) -> None:
    """Spooled chunks are not fetched again, everything else is fetched once, and the spool is removed."""
    fleet.seed()
    fleet.kill_mid_fork(4)
    kept = fleet.kept_chunks(expected_image)
    report = result(fleet.pull())
    assert "forked" == report["outcome"]
    assert image_sha256(expected_image) == report["sha256"]
    assert nbytes(expected_image, kept) == report["resumed_bytes"]
    assert [] == os.listdir(fleet.folder)
    missing = expected_image.layout.image_bytes - nbytes(expected_image, kept)
    assert missing == report["bytes_read"]
    assert 0 == report["bytes_repeated"]
    assert 3 <= len(kept) < 8


@pytest.mark.timeout(300)
@pytest.mark.slow  # logic: tests/unit/receiver/test_resume.py
def test_a_target_that_is_killed_repeatedly_resumes(fleet: ResumeFleet, expected_image: Image) -> None:
    """Each process resumes from the state of the previous one."""
    fleet.seed()
    verified_counts: list[int] = []
    for chunks in (2, 5):
        fleet.kill_mid_fork(chunks)
        verified_counts.append(len(fleet.kept_chunks(expected_image)))
    report = result(fleet.pull())
    assert image_sha256(expected_image) == report["sha256"]
    assert verified_counts == sorted(verified_counts)
    assert len(expected_image.layout.chunks) - verified_counts[-1] == (
        len(expected_image.layout.chunks)
        - cast(int, report["resumed_bytes"]) // expected_image.layout.chunks.chunk_size
    )


@pytest.mark.slow  # logic: tests/unit/receiver/test_resume.py
def test_weights_that_changed_meanwhile_are_fetched(
    fleet: ResumeFleet,
    expected_image: Image,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The seed has other weights under the same stated version: every changed chunk is fetched."""
    monkeypatch.setenv("RFORK_VERSION", "v1")
    first = fleet.seed()
    fleet.kill_mid_fork(4)
    before = fleet.kept_chunks(expected_image)
    first.stop()
    model = loaded_model(tiny_model)
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight")[0, 0] += 1
    changed_folder = tmp_path_factory.mktemp("models") / "changed"
    shutil.copytree(tiny_model, changed_folder)
    model.save_pretrained(changed_folder, max_shard_size="4MB")
    changed = capture(loaded_model(changed_folder))
    same = fleet.kept_chunks(changed)
    fleet.seed(changed_folder, rate=None)
    report = result(fleet.pull())
    assert "forked" == report["outcome"]
    assert image_sha256(changed) == report["sha256"]
    assert nbytes(changed, same) == report["resumed_bytes"]
    assert 0 < len(same) < len(before)


@pytest.mark.slow  # logic: tests/unit/receiver/test_resume.py
def test_two_targets_resume_from_one_directory(fleet: ResumeFleet, expected_image: Image) -> None:
    """Two processes of one rank on one host are killed; each has its own file, and both resume."""
    fleet.seed()
    processes = [fleet.pull() for _ in range(2)]
    for process in processes:
        process.wait_for(r"fork tiny: [2-7]\.\d+ MB of")
    fleet.wait_recorded(2, 1)
    for process in processes:
        process.signal(signal.SIGKILL)
        process.wait()
    files = len(os.listdir(fleet.folder))
    reports = [result(process) for process in [fleet.pull() for _ in range(2)]]
    assert 2 == files
    assert [image_sha256(expected_image)] * 2 == [report["sha256"] for report in reports]
    assert [] == os.listdir(fleet.folder)
    assert all(cast(int, report["resumed_bytes"]) > 0 for report in reports)
