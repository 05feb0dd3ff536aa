"""Resume with failing files, threads and sources."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.receiver import spool as spool_module
from rfork.receiver.events import Event, ReadSpool, SpoolChunkRead, SpoolFailed
from rfork.receiver.fallback import Fallback
from rfork.receiver.spool import ChunkPersister, SpoolReader
from rfork.schema import Plan, StorageAssignment
from rfork.source.seed import Seed
from rfork.storage.spool import Spool
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fleet import NEVER_S, Files, Fleet, Script, Target, content_hash, image, plan, reads, route
from tests.unit.receiver.sessions import scripted_planner
from tests.unit.receiver.spools import (
    ALL,
    CHUNKS,
    Model,
    load_zeros,
    open_spool,
    run_fork,
    seed_and_planner,
    settings_with_resume_dir,
    write_spool,
)


def test_a_blocked_spool_read_is_abandoned(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources serve all chunks, and the blocked read never writes to the image."""
    source, module = Model(1), Model()
    write_spool(tmp_path, capture(source), [0, 1])
    _, planner = seed_and_planner(fleet, source)
    proceed, read_finished = threading.Event(), threading.Event()

    def blocked_read(spool: Spool, at: int, into: memoryview) -> bool:
        proceed.wait(NEVER_S)
        into[:] = bytes(into.nbytes)
        read_finished.set()
        return True

    monkeypatch.setattr(Spool, "read", blocked_read)
    report = run_fork(fleet, module, planner, settings_with_resume_dir(tmp_path, source_idle_timeout_s=0.3))
    proceed.set()
    read_finished.wait(NEVER_S)
    for thread in threading.enumerate():
        if thread.name == "rfork-spool-read":
            thread.join()
    assert (source.bytes, 0, CHUNKS * MIB) == (module.bytes, report.resumed_bytes, report.bytes_read)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), MemoryError()], ids=["disk", "memory"])
def test_an_unreadable_spool_is_abandoned(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The sources serve all chunks."""

    def failing_read(spool: Spool, at: int, into: memoryview) -> bool:
        raise error

    source, module = Model(1), Model()
    write_spool(tmp_path, capture(source), [0, 1])
    _, planner = seed_and_planner(fleet, source)
    monkeypatch.setattr(Spool, "read", failing_read)
    report = run_fork(fleet, module, planner, settings_with_resume_dir(tmp_path))
    assert (source.bytes, 0) == (module.bytes, report.resumed_bytes)


def test_a_failing_spool_thread_releases_its_chunks(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any exception, the sources serve all reserved chunks."""
    source, module = Model(1), Model()
    write_spool(tmp_path, capture(source), [0, 1])
    _, planner = seed_and_planner(fleet, source)
    digest = Image.digest

    def failing_digest(image: Image, chunk: int) -> bytes:
        if threading.current_thread().name == "rfork-spool-read":
            raise KeyError(chunk)
        return digest(image, chunk)

    monkeypatch.setattr(Image, "digest", failing_digest)
    report = run_fork(fleet, module, planner, settings_with_resume_dir(tmp_path))
    assert source.bytes == module.bytes
    assert 0 == report.resumed_bytes
    assert CHUNKS * MIB == report.bytes_read


class BlockedSpool:
    """A spool with one chunk, whose reader was stopped and closed the file while a read was blocked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source_image, self.target_image = image(1), image()
        write_spool(folder, source_image, [0])
        self.events: list[Event] = []
        self._failed, self._proceed = threading.Event(), threading.Event()
        started, read = threading.Event(), Spool.read

        def blocked_read(spool: Spool, at: int, into: memoryview) -> bool:
            started.set()
            self._proceed.wait(NEVER_S)
            return read(spool, at, into)

        monkeypatch.setattr(Spool, "read", blocked_read)
        spool = open_spool(folder, self.target_image)
        reader = SpoolReader(spool, self.target_image, self._handle)
        reader.start()
        reader.read(ReadSpool(0, source_image.digest(0)))
        started.wait(NEVER_S)
        reader.stop()
        spool.close()

    def _handle(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, SpoolFailed):
            self._failed.set()

    def proceed(self) -> None:
        """Let the read return, and wait until the reader has ended."""
        self._proceed.set()
        assert self._failed.wait(NEVER_S)


def test_a_spool_closed_after_the_fork_logs_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read that returns after the fork finds the file closed."""
    BlockedSpool(tmp_path, monkeypatch).proceed()
    assert [] == [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_stopped_spool_does_not_write_to_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping it does not wait for a blocked read, which returns later."""
    spool = BlockedSpool(tmp_path, monkeypatch)
    monkeypatch.setattr(Spool, "read", lambda *_: True)
    spool.proceed()
    assert content_hash(image()) == content_hash(spool.target_image)
    assert [] == [event for event in spool.events if isinstance(event, SpoolChunkRead) and event.digest is not None]


def test_a_persister_that_fails_to_start_leaves_no_seed(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork fails, the planner is notified, and the serving side is closed."""
    closed: list[str] = []
    close = Seed.close

    def recording_close(seed: Seed, *, leave_s: float) -> None:
        closed.append(seed.identity.instance_id)
        close(seed, leave_s=leave_s)

    def fail_to_start(persister: ChunkPersister) -> ChunkPersister:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Seed, "close", recording_close)
    monkeypatch.setattr(ChunkPersister, "start", fail_to_start)
    monkeypatch.setattr(spool_module, "FLUSH_TIMEOUT_S", 0.0)  # there is no thread to wait for
    planner = scripted_planner(plan)
    with pytest.raises(RuntimeError, match="new thread"):
        run_fork(fleet, Model(), planner, settings_with_resume_dir(tmp_path))
    assert (["target"], ["failed"]) == (closed, [finish.outcome for _, finish in planner.finishes])


def test_without_a_manifest_no_spooled_chunk_is_used(fleet: Fleet, tmp_path: Path) -> None:
    """In a cold start from files, the expected content is unknown until all files have been read."""
    source = image(1)
    write_spool(tmp_path, source, [0, 1, 2])
    files = Files(source)
    spool = open_spool(tmp_path, source)
    target = Target(fleet, Script([lambda: plan(storage=[reads(files, ALL)])]), files=[files], spool=spool)
    stats = target.run()
    spool.close()
    assert CHUNKS * MIB == stats.bytes_read
    assert [files.name] == [share.source_id for share in stats.sources]


def test_a_loader_ends_the_resume(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader writes every byte, and no late spool read may overwrite it."""
    source, module = Model(1), Model()
    write_spool(tmp_path, capture(source), [0, 1])
    seed = fleet.source("a", capture(source), FaultInjection(dies_after_bytes=2 * MIB))
    loader_elected, loaded = threading.Event(), threading.Event()
    read = Spool.read

    def delayed_read(spool: Spool, at: int, into: memoryview) -> bool:
        loaded.wait(NEVER_S)
        return read(spool, at, into)

    def load(module: torch.nn.Module) -> None:
        load_zeros(module)
        loaded.set()

    def loader_plan() -> Plan:
        loader_elected.set()
        return plan(storage=[StorageAssignment(kind="loader", chunks=(ALL,))])

    monkeypatch.setattr(Spool, "read", delayed_read)
    planner = scripted_planner(lambda: plan(route(seed, ALL)), loader_plan)
    report = run_fork(fleet, module, planner, settings_with_resume_dir(tmp_path), Fallback("zeros", load))
    assert (True, bytes(CHUNKS * MIB), "forked", []) == (
        loader_elected.is_set(),
        module.bytes,
        report.outcome,
        os.listdir(tmp_path),
    )
