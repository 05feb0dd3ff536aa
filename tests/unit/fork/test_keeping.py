"""What a fork keeps of its chunks for a process that comes back, and what it takes away again."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rfork.errors import NothingLeft
from rfork.fork.fallback import Fallback
from rfork.fork.keeper import Keeper, name_of
from rfork.image.board import ChunkBoard
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.memory import Image
from rfork.seed.seed import Identity
from rfork.storage.claim import claim
from rfork.storage.spool import Spool
from rfork.transport.memory import Faults
from rfork.wire import Plan, Rank
from tests.unit.fork.fleet import NEVER_S, Fleet, image, plan, route
from tests.unit.fork.resuming import (
    ALL,
    CHUNKS,
    IDENTITY,
    Model,
    forked,
    from_seed,
    left,
    load_zeros,
    with_folder,
)
from tests.unit.fork.sessions import planning


def kept(folder: Path, held: Image) -> list[int]:
    """The chunks that the next process finds, with the bytes of this image."""
    spool = claim(folder, name_of(IDENTITY), held.layout)
    found = [chunk for chunk, digest in spool.records.items() if digest == held.digest(chunk)]
    spool.close()
    return sorted(found)


ZEROS = Fallback("zeros", load_zeros)


def recorded(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released once for each chunk that is kept."""
    count, record = threading.Semaphore(0), Spool.record

    def recording(spool: Spool, chunk: int, digest: bytes) -> None:
        record(spool, chunk, digest)
        count.release()

    monkeypatch.setattr(Spool, "record", recording)
    return count


def test_a_fork_that_failed_leaves_what_it_had(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one goes on from there."""
    source, module = Model(1), Model()
    seed, _ = from_seed(fleet, source, Faults(dies_after=3 * MIB))
    count = recorded(monkeypatch)

    def nobody() -> Plan:
        for _ in range(3):
            count.acquire(timeout=NEVER_S)
        return plan(reason="nobody is left")

    with pytest.raises(NothingLeft):
        forked(
            fleet, Model(), planning(lambda: plan(route(seed, ALL)), nobody), with_folder(tmp_path, window=1)
        )
    alive = fleet.source("b", capture(source))
    report = forked(fleet, module, planning(lambda: plan(route(alive, ALL))), with_folder(tmp_path))
    assert (source.bytes, 3 * MIB, 3 * MIB) == (module.bytes, report.resumed_bytes, report.bytes_read)


def test_an_interrupted_fork_leaves_what_it_had(fleet: Fleet, tmp_path: Path) -> None:
    """Also what it had not yet looked at."""
    held = capture(Model(1))
    left(tmp_path, held, [0, 1])

    def interrupt() -> Plan:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forked(fleet, Model(), planning(interrupt), with_folder(tmp_path))
    assert [0, 1] == kept(tmp_path, held)


def test_a_fallback_that_worked_leaves_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """The instance has its weights: what was kept has no more use."""
    left(tmp_path, capture(Model(1)), [0, 1])
    module = Model(2)
    report = forked(fleet, module, planning(lambda: plan(reason="nobody")), with_folder(tmp_path), ZEROS)
    assert (bytes(CHUNKS * MIB), "fallback", []) == (module.bytes, report.outcome, os.listdir(tmp_path))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings about what is kept."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname in ("WARNING", "ERROR") and record.name == "rfork.fork.keeper"
    ]


@pytest.mark.parametrize(
    "folder", [Path("/nowhere/at/all"), Path("/proc"), Path("/dev/null")], ids=["missing", "refused", "file"]
)
def test_a_folder_that_cannot_be_used(fleet: Fleet, caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    """One warning, and a fork as ever."""
    source, module = Model(1), Model()
    _, planner = from_seed(fleet, source)
    report = forked(fleet, module, planner, with_folder(folder))
    assert (source.bytes, "forked", 1) == (module.bytes, report.outcome, len(lines(caplog)))


@pytest.mark.parametrize(
    ("error", "stays"),
    [(errno.ENOSPC, False), (errno.EFBIG, True), (errno.EROFS, True), (errno.EIO, True)],
    ids=["full", "too large", "read-only", "broken"],
)
def test_a_disk_that_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int, stays: bool
) -> None:
    """One warning; a full disk gets its space back, and what else there was stays for the next process."""
    held = capture(Model(1))
    write, tried = Spool.write, threading.Event()

    def failing(spool: Spool, at: int, views: Sequence[memoryview]) -> None:
        if at >= MIB:
            tried.set()
            raise OSError(error, os.strerror(error))
        write(spool, at, views)

    monkeypatch.setattr(Spool, "write", failing)
    board = ChunkBoard(held.layout.chunks)
    keeper = Keeper(tmp_path, IDENTITY, held, board).start()
    for chunk in range(3):
        board.mark(chunk, held.digest(chunk))
    tried.wait(NEVER_S)
    keeper.close(remove=False)
    assert ([0] if stays else [], 1) == (kept(tmp_path, held), len(lines(caplog)))


def test_a_writer_that_cannot_be_started_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is kept, one line says so, and the spool is let go of when the fork is over."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "rfork-keep":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    held = image(1)
    keeper = Keeper(tmp_path, IDENTITY, held, ChunkBoard.full(held.layout.chunks)).start()
    assert keeper.spool is not None
    keeper.close(remove=False)
    assert (["nothing is kept for a resume"], []) == (lines(caplog), kept(tmp_path, held))


def test_a_folder_without_room_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is begun that cannot be finished, and nothing of it stays."""
    asked = threading.Event()
    monkeypatch.setattr(Spool, "room", lambda spool: asked.set())
    held = capture(Model(1))
    keeper = Keeper(tmp_path, IDENTITY, held, ChunkBoard.full(held.layout.chunks)).start()
    asked.wait(NEVER_S)
    keeper.close(remove=False)
    assert ([], 1) == (os.listdir(tmp_path), len(lines(caplog)))


def test_nothing_is_kept_of_an_image_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`halt` waits for the write under way; what it wrote has no record, and nothing follows it."""
    held = capture(Model(1))
    writing, go_on = threading.Event(), threading.Event()
    write = Spool.write

    def slow(spool: Spool, at: int, views: Sequence[memoryview]) -> None:
        writing.set()
        go_on.wait(NEVER_S)
        write(spool, at, views)

    monkeypatch.setattr(Spool, "write", slow)
    board = ChunkBoard(held.layout.chunks)
    keeper = Keeper(tmp_path, IDENTITY, held, board).start()
    for chunk in range(2):
        board.mark(chunk, held.digest(chunk))
    writing.wait(NEVER_S)
    halted, wait_for = threading.Event(), keeper._changed.wait_for

    def waiting(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if threading.current_thread() is halting:
            halted.set()
        return wait_for(predicate, timeout)

    halting = threading.Thread(target=keeper.halt)
    monkeypatch.setattr(keeper._changed, "wait_for", waiting)
    halting.start()
    halted.wait(NEVER_S)
    waits = keeper._halted and halting.is_alive()
    go_on.set()
    halting.join()
    board.mark(2, held.digest(2))
    keeper.close(remove=False)
    assert (True, []) == (waits, kept(tmp_path, held))


def test_a_chunk_that_was_dropped_meanwhile_has_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that were written may be any; what comes in its place is kept."""
    held = capture(Model(1))
    board = ChunkBoard(held.layout.chunks)
    write, dropped = Spool.write, threading.Event()

    def dropping(spool: Spool, at: int, views: Sequence[memoryview]) -> None:
        write(spool, at, views)
        if not dropped.is_set():
            dropped.set()
            board.drop([0])

    count = recorded(monkeypatch)
    monkeypatch.setattr(Spool, "write", dropping)
    keeper = Keeper(tmp_path, IDENTITY, held, board).start()
    board.mark(0, held.digest(0))
    dropped.wait(NEVER_S)
    board.mark(1, held.digest(1))
    count.acquire(timeout=NEVER_S)
    keeper.close(remove=False)
    assert [1] == kept(tmp_path, held)


def test_a_chunk_that_changed_is_kept_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record that was there is of other bytes."""
    left(tmp_path, capture(Model(1)), [0])
    held = capture(Model(2))
    count = recorded(monkeypatch)
    board = ChunkBoard(held.layout.chunks, [])
    keeper = Keeper(tmp_path, IDENTITY, held, board).start()
    board.mark(0, held.digest(0))
    count.acquire(timeout=NEVER_S)
    keeper.close(remove=False)
    assert [0] == kept(tmp_path, held)


def test_without_a_folder_nothing_happens() -> None:
    """No thread, no file, no wait."""
    held = capture(Model(1))
    before = set(threading.enumerate())  # a spool's thread outlives the fork, to close the file
    keeper = Keeper(None, IDENTITY, held, ChunkBoard(held.layout.chunks)).start()
    spool, begun = keeper.spool, set(threading.enumerate()) - before
    keeper.halt()
    keeper.close(remove=True)
    assert (None, set()) == (spool, begun)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Identity("m"), Identity("m"), True),
        (Identity("m/a"), Identity("m-a"), False),
        (Identity("m"), Identity("m", Rank(tp=1, tp_size=2)), False),
        (Identity("m"), Identity("m", Rank(role="draft")), False),
        (Identity("m"), Identity("m", Rank(dp=1)), False),
        (Identity("../../etc/x"), Identity("../../etc/x"), True),
    ],
)
def test_each_rank_of_each_model_has_its_name(one: Identity, other: Identity, same: bool) -> None:
    """The same in each process that comes back, and always the name of a file in the folder."""
    assert (same, one.instance_id == other.instance_id, False) == (
        name_of(one) == name_of(other),
        False,
        "/" in name_of(one) or name_of(one).startswith("."),
    )
