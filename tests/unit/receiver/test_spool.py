"""Chunks that a fork spools for a restarted process, and their removal."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rfork.errors import AllSourcesFailed
from rfork.image.capture import capture
from rfork.image.chunks import MIB, ChunkState
from rfork.image.memory import Image
from rfork.receiver.fallback import Fallback
from rfork.receiver.spool import ChunkPersister, spool_name
from rfork.schema import Plan, Rank
from rfork.source.seed import InstanceIdentity
from rfork.storage.spool import Spool, acquire_spool
from rfork.testing.transport import FaultInjection
from tests.unit.receiver.fleet import NEVER_S, Fleet, image, plan, route
from tests.unit.receiver.sessions import scripted_planner
from tests.unit.receiver.spools import (
    ALL,
    CHUNKS,
    IDENTITY,
    Model,
    count_records,
    load_zeros,
    run_fork,
    seed_and_planner,
    settings_with_resume_dir,
    write_spool,
)


def spooled_chunks(folder: Path, target_image: Image) -> list[int]:
    """Return the chunks of this image that the next process would find."""
    spool = acquire_spool(folder, spool_name(IDENTITY), target_image.layout)
    found = [chunk for chunk, digest in spool.records.items() if digest == target_image.digest(chunk)]
    spool.close()
    return sorted(found)


ZEROS = Fallback("zeros", load_zeros)


def test_a_failed_fork_leaves_its_spool(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process resumes from it."""
    source, module = Model(1), Model()
    seed, _ = seed_and_planner(fleet, source, FaultInjection(dies_after_bytes=3 * MIB))
    count = count_records(monkeypatch)

    def no_source_plan() -> Plan:
        for _ in range(3):
            count.acquire(timeout=NEVER_S)
        return plan(reason="no source left")

    with pytest.raises(AllSourcesFailed):
        run_fork(
            fleet,
            Model(),
            scripted_planner(lambda: plan(route(seed, ALL)), no_source_plan),
            settings_with_resume_dir(tmp_path, max_inflight_chunks=1),
        )
    second_source = fleet.source("b", capture(source))
    report = run_fork(
        fleet,
        module,
        scripted_planner(lambda: plan(route(second_source, ALL))),
        settings_with_resume_dir(tmp_path),
    )
    assert source.bytes == module.bytes
    assert 3 * MIB == report.resumed_bytes
    assert 3 * MIB == report.bytes_read


def test_an_interrupted_fork_leaves_its_spool(fleet: Fleet, tmp_path: Path) -> None:
    """This includes chunks that the fork had not examined yet."""
    target_image = capture(Model(1))
    write_spool(tmp_path, target_image, [0, 1])

    def interrupt() -> Plan:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fork(fleet, Model(), scripted_planner(interrupt), settings_with_resume_dir(tmp_path))
    assert [0, 1] == spooled_chunks(tmp_path, target_image)


def test_a_successful_fallback_removes_the_spool(fleet: Fleet, tmp_path: Path) -> None:
    """The instance has its weights, so the spooled chunks are of no further use."""
    write_spool(tmp_path, capture(Model(1)), [0, 1])
    module = Model(2)
    report = run_fork(
        fleet,
        module,
        scripted_planner(lambda: plan(reason="no source")),
        settings_with_resume_dir(tmp_path),
        ZEROS,
    )
    assert bytes(CHUNKS * MIB) == module.bytes
    assert "fallback" == report.outcome
    assert [] == os.listdir(tmp_path)


def persister_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about the spool."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname in ("WARNING", "ERROR") and record.name == "rfork.receiver.spool"
    ]


@pytest.mark.parametrize(
    "folder", [Path("/nowhere/at/all"), Path("/proc"), Path("/dev/null")], ids=["missing", "refused", "file"]
)
def test_an_unusable_folder_does_not_fail_the_fork(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    """It costs one warning."""
    source, module = Model(1), Model()
    _, planner = seed_and_planner(fleet, source)
    report = run_fork(fleet, module, planner, settings_with_resume_dir(folder))
    assert source.bytes == module.bytes
    assert "forked" == report.outcome
    assert 1 == len(persister_warnings(caplog))


@pytest.mark.parametrize(
    ("error", "keeps_spool"),
    [(errno.ENOSPC, False), (errno.EFBIG, True), (errno.EROFS, True), (errno.EIO, True)],
    ids=["full", "too large", "read-only", "broken"],
)
def test_a_failed_write_stops_spooling(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
    keeps_spool: bool,
) -> None:
    """One warning is logged. A spool on a full disk is removed; otherwise the next process can use it."""
    target_image = capture(Model(1))
    write, tried = Spool.write, threading.Event()

    def failing(spool: Spool, at: int, views: Sequence[memoryview]) -> None:
        if at >= MIB:
            tried.set()
            raise OSError(error, os.strerror(error))
        write(spool, at, views)

    monkeypatch.setattr(Spool, "write", failing)
    chunk_state = ChunkState(target_image.layout.chunks)
    persister = ChunkPersister(tmp_path, IDENTITY, target_image, chunk_state).start()
    for chunk in range(3):
        chunk_state.mark_verified(chunk, target_image.digest(chunk))
    tried.wait(NEVER_S)
    persister.close(remove=False)
    assert ([0] if keeps_spool else []) == spooled_chunks(tmp_path, target_image)
    assert 1 == len(persister_warnings(caplog))


def test_close_does_not_wait_for_a_writer_that_failed_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No chunk is spooled, one warning is logged, and the spool is released at the end of the fork."""
    start = threading.Thread.start

    def fail_to_start(thread: threading.Thread) -> None:
        if thread.name == "rfork-spool-write":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    target_image = image(1)
    persister = ChunkPersister(tmp_path, IDENTITY, target_image, ChunkState.full(target_image.layout.chunks)).start()
    assert persister.spool is not None
    persister.close(remove=False)
    assert [f"verified chunks are not kept for a restart folder={tmp_path}"] == persister_warnings(caplog)
    assert [] == spooled_chunks(tmp_path, target_image)


def test_a_folder_without_enough_space_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No partial spool is written or left in the folder."""
    reserve_called = threading.Event()
    monkeypatch.setattr(Spool, "has_space", lambda spool: reserve_called.set())
    target_image = capture(Model(1))
    persister = ChunkPersister(tmp_path, IDENTITY, target_image, ChunkState.full(target_image.layout.chunks)).start()
    reserve_called.wait(NEVER_S)
    persister.close(remove=False)
    assert [] == os.listdir(tmp_path)
    assert 1 == len(persister_warnings(caplog))


def test_spooling_stops_when_the_image_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`halt` waits for the write in progress; that write leaves no record, and no further chunk is written."""
    target_image = capture(Model(1))
    write_started, proceed = threading.Event(), threading.Event()
    write = Spool.write

    def blocked_write(spool: Spool, at: int, views: Sequence[memoryview]) -> None:
        write_started.set()
        proceed.wait(NEVER_S)
        write(spool, at, views)

    monkeypatch.setattr(Spool, "write", blocked_write)
    chunk_state = ChunkState(target_image.layout.chunks)
    persister = ChunkPersister(tmp_path, IDENTITY, target_image, chunk_state).start()
    for chunk in range(2):
        chunk_state.mark_verified(chunk, target_image.digest(chunk))
    write_started.wait(NEVER_S)
    pause_waiting, wait_for = threading.Event(), persister._changed.wait_for

    def signal_and_wait(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if threading.current_thread() is pausing:
            pause_waiting.set()
        return wait_for(predicate, timeout)

    pausing = threading.Thread(target=persister.pause)
    monkeypatch.setattr(persister._changed, "wait_for", signal_and_wait)
    pausing.start()
    pause_waiting.wait(NEVER_S)
    is_waiting = persister._halted and pausing.is_alive()
    proceed.set()
    pausing.join()
    chunk_state.mark_verified(2, target_image.digest(2))
    persister.close(remove=False)
    assert is_waiting
    assert [] == spooled_chunks(tmp_path, target_image)


def test_nothing_reads_the_image_after_the_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the spool is removed, `close` waits for the write in progress: an engine may unmap the memory next."""
    target_image, events = capture(Model(1)), list[str]()
    write_started, closed = threading.Event(), threading.Event()

    def write_after_removal(spool: Spool, at: int, views: Sequence[memoryview]) -> None:
        write_started.set()
        with persister._changed:
            persister._changed.wait_for(lambda: persister._ended, NEVER_S)
        closed.wait(0.2)
        events.append("read")

    monkeypatch.setattr(Spool, "write", write_after_removal)
    chunk_state = ChunkState(target_image.layout.chunks)
    persister = ChunkPersister(tmp_path, IDENTITY, target_image, chunk_state).start()
    chunk_state.mark_verified(0, target_image.digest(0))
    write_started.wait(NEVER_S)
    persister.close(remove=True)
    closed.set()
    events.append("closed")
    assert ["read", "closed"] == events


def test_a_chunk_dropped_during_its_write_has_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes written may be inconsistent; the chunk is spooled when it has been read again."""
    target_image = capture(Model(1))
    chunk_state = ChunkState(target_image.layout.chunks)
    write, invalidated = Spool.write, threading.Event()

    def write_and_invalidate(spool: Spool, at: int, views: Sequence[memoryview]) -> None:
        write(spool, at, views)
        if not invalidated.is_set():
            invalidated.set()
            chunk_state.invalidate([0])

    count = count_records(monkeypatch)
    monkeypatch.setattr(Spool, "write", write_and_invalidate)
    persister = ChunkPersister(tmp_path, IDENTITY, target_image, chunk_state).start()
    chunk_state.mark_verified(0, target_image.digest(0))
    invalidated.wait(NEVER_S)
    chunk_state.mark_verified(1, target_image.digest(1))
    count.acquire(timeout=NEVER_S)
    persister.close(remove=False)
    assert [1] == spooled_chunks(tmp_path, target_image)


def test_a_changed_chunk_is_spooled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The existing record describes the old bytes."""
    write_spool(tmp_path, capture(Model(1)), [0])
    target_image = capture(Model(2))
    count = count_records(monkeypatch)
    chunk_state = ChunkState(target_image.layout.chunks, [])
    persister = ChunkPersister(tmp_path, IDENTITY, target_image, chunk_state).start()
    chunk_state.mark_verified(0, target_image.digest(0))
    count.acquire(timeout=NEVER_S)
    persister.close(remove=False)
    assert [0] == spooled_chunks(tmp_path, target_image)


def test_without_a_folder_the_persister_does_nothing() -> None:
    """It starts no thread, writes no file and does not wait."""
    target_image = capture(Model(1))
    before = set(threading.enumerate())  # a spool's thread outlives the fork to close the file
    persister = ChunkPersister(None, IDENTITY, target_image, ChunkState(target_image.layout.chunks)).start()
    spool, new_threads = persister.spool, set(threading.enumerate()) - before
    persister.pause()
    persister.close(remove=True)
    assert spool is None
    assert set() == new_threads


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (InstanceIdentity("m"), InstanceIdentity("m"), True),
        (InstanceIdentity("m/a"), InstanceIdentity("m-a"), False),
        (InstanceIdentity("m"), InstanceIdentity("m", Rank(tp=1, tp_size=2)), False),
        (InstanceIdentity("m"), InstanceIdentity("m", Rank(role="speculative")), False),
        (InstanceIdentity("m"), InstanceIdentity("m", Rank(dp=1)), False),
        (InstanceIdentity("../../etc/x"), InstanceIdentity("../../etc/x"), True),
    ],
)
def test_each_rank_of_each_model_has_its_own_spool_file(
    one: InstanceIdentity, other: InstanceIdentity, same: bool
) -> None:
    """The name is stable across restarts and always a valid file name."""
    assert same == (spool_name(one) == spool_name(other))
    assert one.instance_id != other.instance_id
    assert "/" not in spool_name(one)
    assert not spool_name(one).startswith(".")
