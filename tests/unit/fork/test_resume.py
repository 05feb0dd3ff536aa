"""A process that dies and comes back: what it takes of what it kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rfork.fork import resume as resume_module
from rfork.fork.keeper import name_of
from rfork.image.board import ChunkBoard
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.storage.claim import claim
from rfork.storage.spool import PAGE, RECORD, Spool
from tests.unit.fork.fleet import NEVER_S, Fleet, Script, Target, image, plan, route
from tests.unit.fork.resuming import (
    ALL,
    CHUNKS,
    IDENTITY,
    Model,
    forked,
    from_seed,
    left,
    resume,
    with_folder,
)


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast disk and sources are is not compared: on a busy machine that is a matter of chance."""
    monkeypatch.setattr(resume_module, "LEAST_S", NEVER_S)


@pytest.mark.parametrize("held", [[0, 1, 2], [1, 4], list(range(CHUNKS)), []], ids=str)
def test_only_what_is_missing_is_fetched(fleet: Fleet, tmp_path: Path, held: list[int]) -> None:
    """The rest is what was here; the report tells the two apart, and the file is gone."""
    source, module = Model(1), Model()
    left(tmp_path, capture(source), held)
    _, planner = from_seed(fleet, source)
    report = forked(fleet, module, planner, with_folder(tmp_path))
    here, missing = len(held) * MIB, (CHUNKS - len(held)) * MIB
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
    assert (bool(held), bool(held)) == ("resume" in report.phases, "that were here" in report.line())


def test_the_planner_hears_of_sources_only(fleet: Fleet, tmp_path: Path) -> None:
    """What was here is neither a peer's nor storage's."""
    source = Model(1)
    left(tmp_path, capture(source), [0, 1, 2])
    _, planner = from_seed(fleet, source)
    forked(fleet, Model(), planner, with_folder(tmp_path))
    assert [({"a": 3 * MIB}, 3 * MIB)] == [
        (finish.sources, finish.bytes_read) for _, finish in planner.finishes
    ]
    assert {"a"} >= {name for progress in planner.progress for name in progress.sources}


def test_weights_that_changed_are_fetched(fleet: Fleet, tmp_path: Path) -> None:
    """Chunks of other weights are not even read from the file; those that are the same still count."""
    before, source, module = Model(1), Model(1), Model()
    source.get_buffer("whole")[2 * MIB : 4 * MIB].add_(1)
    left(tmp_path, capture(before), [0, 1, 2, 3])
    _, planner = from_seed(fleet, source)
    report = forked(fleet, module, planner, with_folder(tmp_path))
    assert (source.bytes, 2 * MIB, 4 * MIB) == (module.bytes, report.resumed_bytes, report.bytes_read)


def flip(path: Path) -> None:
    """One byte of chunk 1 is another than was written."""
    with path.open("r+b") as file:
        file.seek(2 * PAGE + MIB + 77)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def cut(path: Path) -> None:
    """The file ends within chunk 1."""
    os.truncate(path, 2 * PAGE + MIB + 77)


def tear(path: Path) -> None:
    """The record of chunk 1 is half written."""
    with path.open("r+b") as file:
        file.seek(PAGE + RECORD.size + 10)
        file.write(bytes(22))


@pytest.mark.parametrize("spoil", [flip, cut, tear])
def test_what_is_wrong_is_fetched(fleet: Fleet, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """A chunk counts by its bytes: the record of a wrong one says that they are right."""
    source, module = Model(1), Model()
    spoil(left(tmp_path, capture(source), [0, 1]))
    _, planner = from_seed(fleet, source)
    report = forked(fleet, module, planner, with_folder(tmp_path))
    assert (source.bytes, MIB, 5 * MIB, "forked") == (
        module.bytes,
        report.resumed_bytes,
        report.bytes_read,
        report.outcome,
    )


def test_a_wrong_chunk_has_no_record_any_more(fleet: Fleet, tmp_path: Path) -> None:
    """So it is kept anew, once a source has given it: its record says what the right one would say."""
    source = image(1)
    flip(left(tmp_path, source, [0, 1]))
    spool = claim(tmp_path, name_of(IDENTITY), source.layout)
    target = Target(fleet, Script([plan]))
    taken, schedule = resume(target, spool), target.puller._schedule
    with target.puller._changed:
        target.puller._digests.learn(source.manifest())
        taken.know(source.manifest())
        taken.start()
        target.puller._changed.wait_for(lambda: not schedule.claimed and not schedule.in_flight, NEVER_S)
    taken.stop()
    records = spool.records
    spool.close()
    assert ([0], ((0, 1),)) == (sorted(records), target.board.verified)


def test_without_verification_a_kept_chunk_is_checked(fleet: Fleet, tmp_path: Path) -> None:
    """A file that anything may have happened to is never taken at its word."""
    source, module = Model(1), Model()
    flip(left(tmp_path, capture(source), [0, 1]))
    _, planner = from_seed(fleet, source)
    forked(fleet, module, planner, with_folder(tmp_path, verify=0))
    assert source.bytes == module.bytes


def test_a_claimed_chunk_is_asked_of_nobody(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the file is read the sources give what is missing, and nothing else."""
    source, module = Model(1), Model()
    left(tmp_path, capture(source), [0, 2, 4])
    _, planner = from_seed(fleet, source)
    others = threading.Event()
    mark, read = ChunkBoard.mark, Spool.read

    def marking(board: ChunkBoard, index: int, digest: bytes | None = None) -> None:
        mark(board, index, digest)
        if {1, 3, 5} <= board.digests.keys():
            others.set()

    def reading(spool: Spool, at: int, into: memoryview) -> bool:
        others.wait(NEVER_S)
        return read(spool, at, into)

    monkeypatch.setattr(ChunkBoard, "mark", marking)
    monkeypatch.setattr(Spool, "read", reading)
    report = forked(fleet, module, planner, with_folder(tmp_path))
    assert (source.bytes, 3 * MIB, 3 * MIB) == (module.bytes, report.bytes_read, report.resumed_bytes)


def test_a_relay_gives_what_was_here(fleet: Fleet, tmp_path: Path) -> None:
    """Before its own source has given anything, and only once the manifest is known."""
    source = capture(Model(1))
    left(tmp_path, source, [0, 1, 2])
    silent = ChunkBoard(source.layout.chunks)
    seed = fleet.source("a", source, board=silent, manifest=source.manifest())
    module = Model()
    seen: list[int] = []

    def mark(board: ChunkBoard) -> None:
        seen.append(len(board))
        if len(board) == 3:
            for chunk in range(CHUNKS):
                silent.mark(chunk)

    held = capture(module)
    board = ChunkBoard(held.layout.chunks)
    board.subscribe(lambda: mark(board))
    spool = claim(tmp_path, name_of(IDENTITY), held.layout)
    target = Target(fleet, Script([lambda: plan(route(seed, ALL))]), held=held, board=board)
    resume(target, spool)
    target.run()
    spool.close()
    assert (source.manifest().digests, [1, 2, 3, 4, 5, 6]) == (held.manifest().digests, seen)
