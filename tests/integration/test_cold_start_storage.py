"""Cold starts from network storage: read once by the group, and abandoned cleanly when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from benchmarks.seaweed import WRITER, SeaweedServer
from rfork.engines.transformers import loaded_model
from rfork.image.capture import capture
from rfork.image.memory import Image, image_sha256
from rfork.storage.snapshots.writer import write_snapshot
from rfork.storage.versions.version import version_of
from tests.conftest import StartRfork
from tests.integration.test_cold_start import ColdGroup, Report, results, storage_bytes
from tests.processes import startup_patch
from tests.storage_faults import ResetFault, StallFault
from tests.storage_server import StorageServer

NAME = "model-rank-000.safetensors"
BEFORE = 6
"""Responses of a server before it stalls: enough to open the file and read some chunks."""
SEQUENTIAL_READS = {
    "RFORK_STORAGE_CONCURRENCY": "1",
    "RFORK_STORAGE_HEDGE_RATIO": "0",
    "RFORK_STORAGE_MAX_ATTEMPTS": "2",
    "RFORK_STORAGE_TIMEOUT_S": "120",
    "RFORK_STORAGE_IDLE_TIMEOUT_S": "120",
}
"""Sequential requests, each sent once if nothing fails, so that they can be counted."""
FAST_RETRY_PATCH = """
from rfork.storage.http import blob
budget = blob.RetryBudget
blob.RetryBudget = lambda min_attempts, min_retry_s, *rest: budget(min_attempts, 0.0, *rest)
"""
"""Startup patch: a process gives up after its attempts, however fast they failed."""


@pytest.fixture
def cold_group(rfork_process: StartRfork, tiny_model: Path, tmp_path: Path) -> Iterator[ColdGroup]:
    """A planner without instances."""
    made = ColdGroup(rfork_process, tiny_model, tmp_path)
    yield made
    made.client.close()


@pytest.fixture(scope="module")
def image(tiny_model: Path) -> Image:
    """The tiny model's image."""
    return capture(loaded_model(tiny_model))


@pytest.fixture
def server(image: Image, tiny_model: Path, tmp_path: Path) -> Iterator[StorageServer]:
    """A web server with its snapshot."""
    folder = tmp_path / "served"
    folder.mkdir()
    write_snapshot(image, image.manifest(), folder / NAME, version=version_of(tiny_model))
    with StorageServer(folder) as running:
        yield running


def stored_in(server: StorageServer, name: str) -> bytes:
    stored = server.get_object(name)
    assert stored is not None
    return stored.data


def verified_chunks(report: Report) -> dict[str, int]:
    """Verified chunks by source."""
    shares = cast(list[dict[str, str | int]], report["sources"])
    return {str(share["source_id"]): int(share["verified_chunks"]) for share in shares}


def reasons_text(report: Report) -> str:
    """All errors of the fork as text."""
    return "; ".join(cast(list[str], report["reasons"]))


@pytest.mark.slow  # logic: tests/simulation
def test_a_group_reads_its_http_snapshot_once(cold_group: ColdGroup, image: Image, server: StorageServer) -> None:
    """Three instances start concurrently: they read one image between them, the server sends little more, and
    all are right.
    """
    snapshot = {"RFORK_SNAPSHOT": server.url(f"{NAME}?signature=secret"), **SEQUENTIAL_READS}
    started = [cold_group.pull(environment=snapshot) for _ in range(3)]
    reports = results(started)
    size = image.layout.image_bytes
    assert [image_sha256(image)] * 3 == [report["sha256"] for report in reports]
    assert ["forked"] * 3 == [report["outcome"] for report in reports]
    assert size == storage_bytes(reports)
    # Besides manifests and headers: chunks read ahead before a plan moved them to a later instance.
    besides = server.bytes_sent - size
    assert 0 < besides < size // 2
    assert {f"snapshot:{server.url(NAME)}"} == {
        name for report in reports for name in verified_chunks(report) if ":" in name
    }
    assert not [process for process in started if "secret" in process.transcript()]


@pytest.mark.slow  # logic: tests/unit/receiver/test_machine_storage.py
def test_an_object_replaced_during_a_read(
    cold_group: ColdGroup, image: Image, server: StorageServer, tiny_model: Path
) -> None:
    """Chunks read before are kept, nothing of the new object is used, and the checkpoint supplies the rest."""
    server.script.then(*[None] * BEFORE, StallFault())
    reader = cold_group.pull(
        checkpoint=tiny_model, environment={"RFORK_SNAPSHOT": server.url(NAME), **SEQUENTIAL_READS}
    )
    server.script.wait_stalled()
    server.put(NAME, bytes(len(stored_in(server, NAME))))
    server.script.release()
    [report] = results([reader])
    assert image_sha256(image) == report["sha256"]
    assert "StorageChanged" in reasons_text(report)


def test_a_server_that_dies_during_a_read(
    cold_group: ColdGroup, image: Image, server: StorageServer, tmp_path: Path
) -> None:
    """Verified chunks are kept: an instance whose server lives reads the rest, and nothing is read twice."""
    size = image.layout.image_bytes
    with StorageServer({name: stored_in(server, name) for name in (NAME, f"{NAME}.manifest.json")}) as other:
        server.script.then(*[None] * BEFORE, StallFault())
        server.script.always(ResetFault(None))
        # The first reader waits through the stall until the other one has started, but not for the dead
        # server.
        fast_retry = {**SEQUENTIAL_READS, **startup_patch(tmp_path / "fast-retry", FAST_RETRY_PATCH)}
        unlucky_reader = cold_group.pull(environment={"RFORK_SNAPSHOT": server.url(NAME), **fast_retry})
        server.script.wait_stalled()
        lucky_reader = cold_group.pull(environment={"RFORK_SNAPSHOT": other.url(NAME), **SEQUENTIAL_READS})
        lucky_reader.wait_for('"event": "plan received"')
        server.script.release()
        reports = results([unlucky_reader, lucky_reader])
        assert [image_sha256(image)] * 2 == [report["sha256"] for report in reports]
        assert ["forked"] * 2 == [report["outcome"] for report in reports]
        assert size == storage_bytes(reports)
        assert 0 < storage_bytes(reports[:1]) < size
        assert "StorageError" in reasons_text(reports[0])


@pytest.mark.slow  # logic: tests/unit/receiver/test_storage_candidates.py
def test_wrong_credentials_are_reported_and_skipped(
    cold_group: ColdGroup, image: Image, seaweed_server: SeaweedServer, tiny_model: Path
) -> None:
    """The bucket rejects the key: the checkpoint is read, and the report states the reason."""
    wrong = {**seaweed_server.environment(WRITER), "AWS_SECRET_ACCESS_KEY": "another-secret"}
    reader = cold_group.pull(
        checkpoint=tiny_model,
        environment={"RFORK_SNAPSHOT": "s3://models/cold/", **wrong, **SEQUENTIAL_READS},
    )
    [report] = results([reader])
    assert image_sha256(image) == report["sha256"]
    assert ["checkpoint"] == [name.partition(":")[0] for name in verified_chunks(report)]
    assert "StorageAccessDenied" in reasons_text(report)
    assert "another-secret" not in reader.transcript()
