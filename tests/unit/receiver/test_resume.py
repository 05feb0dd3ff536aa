"""Resume: a restarted process reuses the chunks that it spooled, or reads from the sources."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rfork.image.capture import capture
from rfork.image.chunks import MIB, ChunkState
from rfork.image.memory import Image
from rfork.receiver import machine
from rfork.receiver import spool as spool_module
from rfork.receiver.events import Event, ReadSpool, SpoolChunkRead, SpoolFailed
from rfork.receiver.fallback import Fallback
from rfork.receiver.spool import ChunkPersister, SpoolReader
from rfork.schema import Plan, StorageAssignment
from rfork.source.seed import Seed
from rfork.storage.spool import PAGE, RECORD, Spool
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


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the comparison of disk and source speed, which varies on a busy machine."""
    monkeypatch.setattr(machine, "SPOOL_WARMUP_S", NEVER_S)


@pytest.mark.parametrize("spooled_chunks", [[0, 1, 2], [1, 4], list(range(CHUNKS)), []], ids=str)
def test_only_missing_chunks_are_fetched(fleet: Fleet, tmp_path: Path, spooled_chunks: list[int]) -> None:
    """The other chunks come from the spool; the report lists both amounts, and the spool is removed."""
    source, module = Model(1), Model()
    write_spool(tmp_path, capture(source), spooled_chunks)
    _, planner = seed_and_planner(fleet, source)
    report = run_fork(fleet, module, planner, settings_with_resume_dir(tmp_path))
    here, missing = len(spooled_chunks) * MIB, (CHUNKS - len(spooled_chunks)) * MIB
    assert source.bytes == module.bytes
    assert ("forked", missing, here, 0, CHUNKS, []) == (
        report.outcome,
        report.bytes_read,
        report.resumed_bytes,
        report.bytes_repeated,
        report.chunks_verified,
        os.listdir(tmp_path),
    )
    expected = {("a", "node", "memory", missing), ("resume", "node", "file", here)}
    assert {share for share in expected if share[3]} == {
        (share.source_id, share.host, share.transport, share.verified_bytes) for share in report.sources
    }
    assert (bool(spooled_chunks), bool(spooled_chunks)) == (
        "resume" in report.phases,
        "resumed" in report.line(),
    )


def test_resumed_chunks_are_not_reported_to_the_planner(fleet: Fleet, tmp_path: Path) -> None:
    """They come neither from a peer nor from storage."""
    source = Model(1)
    write_spool(tmp_path, capture(source), [0, 1, 2])
    _, planner = seed_and_planner(fleet, source)
    run_fork(fleet, Model(), planner, settings_with_resume_dir(tmp_path))
    assert [({"a": 3 * MIB}, 3 * MIB)] == [(finish.sources, finish.bytes_read) for _, finish in planner.finishes]
    assert {"a"} >= {name for progress in planner.progress for name in progress.sources}


def test_changed_weights_are_fetched(fleet: Fleet, tmp_path: Path) -> None:
    """Chunks of other weights are not even read from the spool; unchanged chunks are still used."""
    before, source, module = Model(1), Model(1), Model()
    source.get_buffer("weights")[2 * MIB : 4 * MIB].add_(1)
    write_spool(tmp_path, capture(before), [0, 1, 2, 3])
    _, planner = seed_and_planner(fleet, source)
    report = run_fork(fleet, module, planner, settings_with_resume_dir(tmp_path))
    assert (source.bytes, 2 * MIB, 4 * MIB) == (module.bytes, report.resumed_bytes, report.bytes_read)


def flip_byte(path: Path) -> None:
    """Flip one bit of chunk 1."""
    with path.open("r+b") as file:
        file.seek(2 * PAGE + MIB + 77)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def truncate_file(path: Path) -> None:
    """Truncate the file within chunk 1."""
    os.truncate(path, 2 * PAGE + MIB + 77)


def tear_record(path: Path) -> None:
    """Erase half of the record of chunk 1."""
    with path.open("r+b") as file:
        file.seek(PAGE + RECORD.size + 10)
        file.write(bytes(22))


@pytest.mark.parametrize("damage_file", [flip_byte, truncate_file, tear_record])
def test_damaged_chunks_are_fetched(fleet: Fleet, tmp_path: Path, damage_file: Callable[[Path], None]) -> None:
    """Chunks are verified by their bytes, because the record of a damaged one is still valid."""
    source, module = Model(1), Model()
    damage_file(write_spool(tmp_path, capture(source), [0, 1]))
    _, planner = seed_and_planner(fleet, source)
    report = run_fork(fleet, module, planner, settings_with_resume_dir(tmp_path))
    assert (source.bytes, MIB, 5 * MIB, "forked") == (
        module.bytes,
        report.resumed_bytes,
        report.bytes_read,
        report.outcome,
    )


def test_the_record_of_a_damaged_chunk_is_removed(fleet: Fleet, tmp_path: Path) -> None:
    """Otherwise the correct chunk, whose record would be equal, would not be written again."""
    source_image = image(1)
    flip_byte(write_spool(tmp_path, source_image, [0, 1]))
    seed, spool = fleet.source("a", source_image), open_spool(tmp_path, source_image)
    target = Target(fleet, Script([lambda: plan(route(seed, ALL))]), spool=spool)
    stats = target.run()
    records = spool.records
    spool.close()
    assert [0] == sorted(records)
    assert MIB == stats.resumed_bytes
    assert content_hash(source_image) == content_hash(target.image)


def test_resumed_chunks_are_always_verified(fleet: Fleet, tmp_path: Path) -> None:
    """A spool file may have been damaged, so this holds even if verification is turned off."""
    source, module = Model(1), Model()
    flip_byte(write_spool(tmp_path, capture(source), [0, 1]))
    _, planner = seed_and_planner(fleet, source)
    run_fork(fleet, module, planner, settings_with_resume_dir(tmp_path, verify_chunks=0))
    assert source.bytes == module.bytes


def test_a_reserved_chunk_is_not_fetched(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the spool is read, the sources serve only the missing chunks."""
    source, module = Model(1), Model()
    write_spool(tmp_path, capture(source), [0, 2, 4])
    _, planner = seed_and_planner(fleet, source)
    missing_chunks_verified = threading.Event()
    mark, read = ChunkState.mark_verified, Spool.read

    def mark_and_signal(chunk_state: ChunkState, index: int, digest: bytes | None = None) -> None:
        mark(chunk_state, index, digest)
        if {1, 3, 5} <= chunk_state.digests.keys():
            missing_chunks_verified.set()

    def blocked_read(spool: Spool, at: int, into: memoryview) -> bool:
        missing_chunks_verified.wait(NEVER_S)
        return read(spool, at, into)

    monkeypatch.setattr(ChunkState, "mark_verified", mark_and_signal)
    monkeypatch.setattr(Spool, "read", blocked_read)
    report = run_fork(fleet, module, planner, settings_with_resume_dir(tmp_path))
    assert (source.bytes, 3 * MIB, 3 * MIB) == (module.bytes, report.bytes_read, report.resumed_bytes)


def test_a_relay_serves_resumed_chunks(fleet: Fleet, tmp_path: Path) -> None:
    """It serves them before its own source has sent anything, and only once the manifest is known."""
    source = capture(Model(1))
    write_spool(tmp_path, source, [0, 1, 2])
    seed_chunks = ChunkState(source.layout.chunks)
    seed = fleet.source("a", source, chunk_state=seed_chunks, manifest=source.manifest())
    module = Model()
    seen: list[int] = []

    def on_chunk(chunk_state: ChunkState) -> None:
        seen.append(len(chunk_state))
        if len(chunk_state) == 3:
            for chunk in range(CHUNKS):
                seed_chunks.mark_verified(chunk)

    target_image = capture(module)
    chunk_state = ChunkState(target_image.layout.chunks)
    chunk_state.subscribe(lambda: on_chunk(chunk_state))
    spool = open_spool(tmp_path, target_image)
    script = Script([lambda: plan(route(seed, ALL))])
    Target(fleet, script, target_image=target_image, chunk_state=chunk_state, spool=spool).run()
    spool.close()
    assert source.manifest().digests == target_image.manifest().digests
    assert [1, 2, 3, 4, 5, 6] == seen


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
