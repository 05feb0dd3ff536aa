"""Resume with failing files, threads and sources."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from rfork.image.capture import capture
from rfork.image.chunk_state import ChunkState
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.receiver import chunk_persister as persister_module
from rfork.receiver.chunk_persister import ChunkPersister, spool_name
from rfork.receiver.fallback import Fallback
from rfork.receiver.spool_source import SpoolSource
from rfork.schema import Plan, StorageAssignment
from rfork.source.seed import Seed
from rfork.storage.spool import Spool
from rfork.storage.spool_lock import acquire_spool
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fleet import NEVER_S, Files, Fleet, Script, Target, image, plan, reads, route
from tests.unit.receiver.sessions import scripted_planner
from tests.unit.receiver.spools import (
    ALL,
    CHUNKS,
    IDENTITY,
    Model,
    attach_spool,
    load_zeros,
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
    assert source.bytes == module.bytes
    assert 0 == report.resumed_bytes
    assert CHUNKS * MIB == report.bytes_read


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
    assert source.bytes == module.bytes
    assert 0 == report.resumed_bytes


def open_spool_source(folder: Path, target: Target) -> tuple[Spool, SpoolSource]:
    """Return the spool in this folder and its source for a target's transfer, not started."""
    spool = acquire_spool(folder, spool_name(IDENTITY), target.image.layout)
    return spool, attach_spool(target, spool)


def test_a_second_source_with_the_same_weights_changes_no_reservation(fleet: Fleet, tmp_path: Path) -> None:
    """Chunks released to the sources because the disk is slow are not reserved again."""
    source = image(1)
    write_spool(tmp_path, source, [1, 2, 3, 4, 5])
    target = Target(fleet, Script([plan]))
    spool, spool_source = open_spool_source(tmp_path, target)
    transfer = target.transfer
    source_factory, peer_sources = transfer._sources._source_factory, transfer._sources._active
    for name in ("a", "b"):
        peer_sources[name] = source_factory.open_peer(route(fleet.source(name, image(1)), ALL), transfer._event_handler)
    transfer._event_handler.on_manifest(peer_sources["a"], source.manifest())
    with transfer._changed:
        spool_source._loaded = MIB
        spool_source.poll(spool_source._known_at + 4, 2 * MIB)
    before = transfer._scheduler.reserved
    transfer._event_handler.on_manifest(peer_sources["b"], source.manifest())
    spool.close()
    assert [1, 2] == before
    assert [1, 2] == transfer._scheduler.reserved
    assert 1 == spool_source._loaded // MIB


def test_a_manifest_that_changes_during_a_spool_read(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk belongs to the old weights and is rejected; unchanged chunks are still used."""
    before, after = image(1), image(1)
    with after.writable(0, 1) as (view,):
        view[0] ^= 0xFF
    write_spool(tmp_path, before, [0, 1])
    target = Target(fleet, Script([plan]))
    spool, spool_source = open_spool_source(tmp_path, target)
    transfer, read = target.transfer, Spool.read

    def set_manifest(manifest: Manifest) -> None:
        with transfer._changed:
            transfer._verifier.set_manifest(manifest)
            spool_source.set_manifest(manifest)

    def read_with_update(spool: Spool, at: int, into: memoryview) -> bool:
        if at == 0:
            set_manifest(after.manifest())
        return read(spool, at, into)

    monkeypatch.setattr(Spool, "read", read_with_update)
    marked = threading.Event()
    target.chunk_state.subscribe(lambda: marked.set() if len(target.chunk_state) else None)
    set_manifest(before.manifest())
    spool_source.start()
    marked.wait(NEVER_S)
    with transfer._changed:
        remaining = (transfer._scheduler.reserved, transfer._scheduler.in_flight)
    spool_source.stop()
    records = spool.records
    spool.close()
    assert ([], 0) == remaining
    assert ((1, 2),) == target.chunk_state.verified
    assert [1] == sorted(records)


def test_a_failing_spool_thread_releases_its_chunks(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any exception, the sources serve all reserved chunks."""
    source, module = Model(1), Model()
    write_spool(tmp_path, capture(source), [0, 1])
    _, planner = seed_and_planner(fleet, source)
    mark = ChunkState.mark_verified

    def failing_mark(chunk_state: ChunkState, index: int, digest: bytes | None = None) -> None:
        if threading.current_thread().name == "rfork-spool-read":
            raise KeyError(index)
        mark(chunk_state, index, digest)

    monkeypatch.setattr(ChunkState, "mark_verified", failing_mark)
    report = run_fork(fleet, module, planner, settings_with_resume_dir(tmp_path))
    assert source.bytes == module.bytes
    assert 0 == report.resumed_bytes
    assert CHUNKS * MIB == report.bytes_read


def test_a_spool_closed_after_the_fork_logs_no_warning(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read that returns after the fork finds the file closed."""
    source = image(1)
    write_spool(tmp_path, source, [0])
    target = Target(fleet, Script([plan]))
    spool, spool_source = open_spool_source(tmp_path, target)
    read, read_started, proceed = Spool.read, threading.Event(), threading.Event()

    def delayed_read(spool: Spool, at: int, into: memoryview) -> bool:
        read_started.set()
        proceed.wait(NEVER_S)
        return read(spool, at, into)

    monkeypatch.setattr(Spool, "read", delayed_read)
    with target.transfer._changed:
        target.transfer._verifier.set_manifest(source.manifest())
        spool_source.set_manifest(source.manifest())
    spool_source.start()
    read_started.wait(NEVER_S)
    with target.transfer._changed:
        spool_source._abandon()
    spool.close()
    proceed.set()
    spool_source._thread.join()
    assert [] == [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


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
    monkeypatch.setattr(persister_module, "FLUSH_TIMEOUT_S", 0.0)  # there is no thread to wait for
    planner = scripted_planner(plan)
    with pytest.raises(RuntimeError, match="new thread"):
        run_fork(fleet, Model(), planner, settings_with_resume_dir(tmp_path))
    assert ["target"] == closed
    assert ["failed"] == [finish.outcome for _, finish in planner.finishes]


def test_without_a_manifest_no_spooled_chunk_is_used(fleet: Fleet, tmp_path: Path) -> None:
    """In a cold start from files, the expected content is unknown until all files have been read."""
    source = image(1)
    write_spool(tmp_path, source, [0, 1, 2])
    files = Files(source)
    target = Target(fleet, Script([lambda: plan(storage=[reads(files, ALL)])]), files=[files])
    spool = acquire_spool(tmp_path, spool_name(IDENTITY), target.image.layout)
    attach_spool(target, spool)
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
    assert loader_elected.is_set()
    assert bytes(CHUNKS * MIB) == module.bytes
    assert "forked" == report.outcome
    assert [] == os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "fetched", "loaded", "expected"),
    [
        (0.5, 1, 0, [1, 2, 3, 4, 5]),
        (2.0, 0, 0, [1, 2, 3, 4, 5]),
        (2.0, 1, 1, [1, 2, 3, 4, 5]),
        (4.0, 2, 1, [1, 2]),
        (2.0, 1, 0, []),
        (20.0, 1, 1, [1, 2, 3, 4, 5]),
        (12.5, 6, 5, []),
    ],
    ids=["too early", "no source to compare with", "as fast", "slower", "nothing", "both slow", "too late"],
)
def test_a_slow_disk_shares_chunks_with_the_sources(
    fleet: Fleet, tmp_path: Path, seconds: float, fetched: int, loaded: int, expected: list[int]
) -> None:
    """Of five chunks, some stay reserved for the disk.

    They are those that it delivers before the sources would have served all six.
    """
    source = image(1)
    write_spool(tmp_path, source, [1, 2, 3, 4, 5])
    spool = acquire_spool(tmp_path, spool_name(IDENTITY), source.layout)
    target = Target(fleet, Script([plan]))
    spool_source = attach_spool(target, spool)
    with target.transfer._changed:
        target.transfer._verifier.set_manifest(source.manifest())
        spool_source.set_manifest(source.manifest())
        spool_source._loaded = loaded * MIB
        spool_source.poll(spool_source._known_at + seconds, fetched * MIB)
        reserved = target.transfer._scheduler.reserved
    spool.close()
    assert expected == reserved
