"""A process that comes back: files, threads and sources that go wrong while kept chunks are taken."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from rfork.fork import keeper as keeper_module
from rfork.fork.fallback import Fallback
from rfork.fork.keeper import Keeper, name_of
from rfork.fork.resume import Resume
from rfork.image.board import ChunkBoard
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.seed.seed import Seed
from rfork.storage.claim import claim
from rfork.storage.spool import Spool
from rfork.transport.memory import Faults
from rfork.wire import Plan, StorageRead
from tests.unit.fork.fleet import NEVER_S, Files, Fleet, Script, Target, image, plan, reads, route
from tests.unit.fork.resuming import (
    ALL,
    CHUNKS,
    IDENTITY,
    Model,
    forked,
    from_seed,
    left,
    load_zeros,
    resume,
    with_folder,
)
from tests.unit.fork.sessions import planning


def test_a_file_that_hangs_is_left(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources give all; what comes of the hung read later reaches the image no more."""
    source, module = Model(1), Model()
    left(tmp_path, capture(source), [0, 1])
    _, planner = from_seed(fleet, source)
    go_on, over = threading.Event(), threading.Event()

    def hanging(spool: Spool, at: int, into: memoryview) -> bool:
        go_on.wait(NEVER_S)
        into[:] = bytes(into.nbytes)
        over.set()
        return True

    monkeypatch.setattr(Spool, "read", hanging)
    report = forked(fleet, module, planner, with_folder(tmp_path, stall_s=0.3))
    go_on.set()
    over.wait(NEVER_S)
    for thread in threading.enumerate():
        if thread.name == "rfork-resume":
            thread.join()
    assert (source.bytes, 0, CHUNKS * MIB) == (module.bytes, report.resumed_bytes, report.bytes_read)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), MemoryError()], ids=["disk", "memory"])
def test_a_file_that_cannot_be_read_is_left(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The sources give all."""

    def broken(spool: Spool, at: int, into: memoryview) -> bool:
        raise error

    source, module = Model(1), Model()
    left(tmp_path, capture(source), [0, 1])
    _, planner = from_seed(fleet, source)
    monkeypatch.setattr(Spool, "read", broken)
    report = forked(fleet, module, planner, with_folder(tmp_path))
    assert (source.bytes, 0) == (module.bytes, report.resumed_bytes)


def claimed_by(folder: Path, target: Target) -> tuple[Spool, Resume]:
    """The spool in this folder, and what takes from it for a target's pull; not started."""
    spool = claim(folder, name_of(IDENTITY), target.image.layout)
    return spool, resume(target, spool)


def test_a_second_source_of_the_same_weights_is_no_news(fleet: Fleet, tmp_path: Path) -> None:
    """What was left to the sources, as the disk is slow, is not claimed again."""
    source = image(1)
    left(tmp_path, source, [1, 2, 3, 4, 5])
    target = Target(fleet, Script([plan]))
    spool, taken = claimed_by(tmp_path, target)
    puller = target.puller
    opening, feeds = puller._sources._opening, puller._sources._feeds
    for name in ("a", "b"):
        feeds[name] = opening.peer(route(fleet.source(name, image(1)), ALL), puller._intake)
    puller._intake.on_manifest(feeds["a"], source.manifest())
    with puller._changed:
        taken._loaded = MIB
        taken.look(taken._known_at + 4, 2 * MIB)
    before = puller._schedule.claimed
    puller._intake.on_manifest(feeds["b"], source.manifest())
    spool.close()
    assert ([1, 2], [1, 2], 1) == (before, puller._schedule.claimed, taken._loaded // MIB)


def test_a_manifest_that_changes_while_a_chunk_is_filled(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk is of the weights before, so it is not taken; those that are the same still are."""
    before, after = image(1), image(1)
    with after.writable(0, 1) as (view,):
        view[0] ^= 0xFF
    left(tmp_path, before, [0, 1])
    target = Target(fleet, Script([plan]))
    spool, taken = claimed_by(tmp_path, target)
    puller, read = target.puller, Spool.read

    def know(manifest: Manifest) -> None:
        with puller._changed:
            puller._digests.learn(manifest)
            taken.know(manifest)

    def reading(spool: Spool, at: int, into: memoryview) -> bool:
        if at == 0:
            know(after.manifest())
        return read(spool, at, into)

    monkeypatch.setattr(Spool, "read", reading)
    marked = threading.Event()
    target.board.subscribe(lambda: marked.set() if len(target.board) else None)
    know(before.manifest())
    taken.start()
    marked.wait(NEVER_S)
    with puller._changed:
        left_over = (puller._schedule.claimed, puller._schedule.in_flight)
    taken.stop()
    records = spool.records
    spool.close()
    assert (([], 0), ((1, 2),), [1]) == (left_over, target.board.verified, sorted(records))


def test_a_thread_that_fails_gives_its_chunk_up(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: the sources give all that was claimed."""
    source, module = Model(1), Model()
    left(tmp_path, capture(source), [0, 1])
    _, planner = from_seed(fleet, source)
    mark = ChunkBoard.mark

    def failing(board: ChunkBoard, index: int, digest: bytes | None = None) -> None:
        if threading.current_thread().name == "rfork-resume":
            raise KeyError(index)
        mark(board, index, digest)

    monkeypatch.setattr(ChunkBoard, "mark", failing)
    report = forked(fleet, module, planner, with_folder(tmp_path))
    assert (source.bytes, 0, CHUNKS * MIB) == (module.bytes, report.resumed_bytes, report.bytes_read)


def test_a_spool_that_closed_when_all_was_over_is_no_news(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read that comes back after the fork finds the file closed: nobody is warned of it."""
    source = image(1)
    left(tmp_path, source, [0])
    target = Target(fleet, Script([plan]))
    spool, taken = claimed_by(tmp_path, target)
    read, reading, go_on = Spool.read, threading.Event(), threading.Event()

    def late(spool: Spool, at: int, into: memoryview) -> bool:
        reading.set()
        go_on.wait(NEVER_S)
        return read(spool, at, into)

    monkeypatch.setattr(Spool, "read", late)
    with target.puller._changed:
        target.puller._digests.learn(source.manifest())
        taken.know(source.manifest())
    taken.start()
    reading.wait(NEVER_S)
    with target.puller._changed:
        taken._give_up()
    spool.close()
    go_on.set()
    taken._thread.join()
    assert [] == [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_keeper_that_cannot_start_leaves_no_seed(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork fails, the planner hears of it, and the giving side is closed."""
    closed: list[str] = []
    close = Seed.close

    def noted(seed: Seed, *, leave_s: float) -> None:
        closed.append(seed.identity.instance_id)
        close(seed, leave_s=leave_s)

    def refuse(keeper: Keeper) -> Keeper:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Seed, "close", noted)
    monkeypatch.setattr(Keeper, "start", refuse)
    monkeypatch.setattr(keeper_module, "PATIENCE_S", 0.0)  # there is no thread to wait for
    planner = planning(plan)
    with pytest.raises(RuntimeError, match="new thread"):
        forked(fleet, Model(), planner, with_folder(tmp_path))
    assert (["target"], ["failed"]) == (closed, [finish.outcome for _, finish in planner.finishes])


def test_without_a_manifest_nothing_is_taken(fleet: Fleet, tmp_path: Path) -> None:
    """In a cold start from files nobody can say what the image must hold until all of it is read."""
    source = image(1)
    left(tmp_path, source, [0, 1, 2])
    files = Files(source)
    target = Target(fleet, Script([lambda: plan(storage=[reads(files, ALL)])]), files=[files])
    spool = claim(tmp_path, name_of(IDENTITY), target.image.layout)
    resume(target, spool)
    pulled = target.run()
    spool.close()
    assert (CHUNKS * MIB, [files.name]) == (
        pulled.bytes_read,
        [share.source_id for share in pulled.sources],
    )


def test_a_loader_ends_it(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader writes every byte: nothing of what was here is written over it, however late it comes."""
    source, module = Model(1), Model()
    left(tmp_path, capture(source), [0, 1])
    seed = fleet.source("a", capture(source), Faults(dies_after=2 * MIB))
    asked, loaded = threading.Event(), threading.Event()
    read = Spool.read

    def late(spool: Spool, at: int, into: memoryview) -> bool:
        loaded.wait(NEVER_S)
        return read(spool, at, into)

    def load(module: torch.nn.Module) -> None:
        load_zeros(module)
        loaded.set()

    def elected() -> Plan:
        asked.set()
        return plan(storage=[StorageRead(kind="loader", chunks=(ALL,))])

    monkeypatch.setattr(Spool, "read", late)
    planner = planning(lambda: plan(route(seed, ALL)), elected)
    report = forked(fleet, module, planner, with_folder(tmp_path), Fallback("zeros", load))
    assert (True, bytes(CHUNKS * MIB), "forked", []) == (
        asked.is_set(),
        module.bytes,
        report.outcome,
        os.listdir(tmp_path),
    )


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
def test_a_slow_disk_shares_with_the_sources(
    fleet: Fleet, tmp_path: Path, seconds: float, fetched: int, loaded: int, expected: list[int]
) -> None:
    """Of five chunks those stay claimed that the disk gives before the sources had given all six."""
    source = image(1)
    left(tmp_path, source, [1, 2, 3, 4, 5])
    spool = claim(tmp_path, name_of(IDENTITY), source.layout)
    target = Target(fleet, Script([plan]))
    taken = resume(target, spool)
    with target.puller._changed:
        target.puller._digests.learn(source.manifest())
        taken.know(source.manifest())
        taken._loaded = loaded * MIB
        taken.look(taken._known_at + seconds, fetched * MIB)
        claimed = target.puller._schedule.claimed
    spool.close()
    assert expected == claimed
