"""A process that dies and comes back: what it kept, what it takes of it, and what goes wrong with that."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from rfork.errors import NothingLeft
from rfork.fork.fallback import Fallback
from rfork.fork.keeper import Keeper, name_of
from rfork.fork.report import ForkReport
from rfork.fork.resume import Resume
from rfork.fork.schedule import Read, Schedule
from rfork.fork.session import ForkSession
from rfork.image.board import ChunkBoard
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings
from rfork.storage.claim import claim
from rfork.storage.spool import PAGE, RECORD, Spool
from rfork.transport.memory import Faults, MemoryTransport
from rfork.wire import Plan, Rank, StorageRead
from tests.unit.fork.fleet import NEVER_S, Files, Fleet, Script, Target, image, plan, reads, route, settings
from tests.unit.fork.planner import FakePlanner

CHUNKS = 6
ALL = (0, CHUNKS)
IDENTITY = Identity("org/model", instance_id="target")


class Model(torch.nn.Module):
    """Six chunks of weights."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        whole = torch.zeros(CHUNKS * MIB, dtype=torch.uint8)
        if seed is not None:
            whole.random_(generator=torch.Generator().manual_seed(seed))
        self.register_buffer("whole", whole)

    @property
    def bytes(self) -> bytes:
        return self.get_buffer("whole").numpy().tobytes()


def with_folder(folder: Path, **changed: float | int) -> Settings:
    return settings(**changed).model_copy(update={"resume": folder})


def left(folder: Path, held: Image, chunks: Sequence[int]) -> Path:
    """What a process leaves that died when it had these chunks of an image; its path."""
    spool = claim(folder, name_of(IDENTITY), held.layout)
    for chunk in chunks:
        begin, end = held.layout.chunks[chunk]
        with held.readable(begin, end) as views:
            spool.write(begin, views)
        spool.record(chunk, held.digest(chunk))
    spool.close()
    return spool.path


def kept(folder: Path, held: Image) -> list[int]:
    """The chunks that the next process finds, with the bytes of this image."""
    spool = claim(folder, name_of(IDENTITY), held.layout)
    found = [chunk for chunk, digest in spool.records.items() if digest == held.digest(chunk)]
    spool.close()
    return sorted(found)


def planning(*answers: Callable[[], Plan]) -> FakePlanner:
    return FakePlanner(Script(answers))


def forked(
    fleet: Fleet, module: torch.nn.Module, planner: FakePlanner, chosen: Settings, *ways: Fallback
) -> ForkReport:
    """The report of one fork, its giving side closed."""
    report = ForkSession(
        module,
        IDENTITY,
        chosen,
        [MemoryTransport(fleet.network)],
        planner=planner.client(),
        dial=fleet.peers.dial,
        fallbacks=ways,
        serve_peer=fleet.peers.service,
    ).run()
    if report.seed is not None:
        report.seed.close()
    return report


def load_zeros(module: torch.nn.Module) -> None:
    module.get_buffer("whole").zero_()


ZEROS = Fallback("zeros", load_zeros)


def from_seed(fleet: Fleet, source: Model, faults: Faults | None = None) -> tuple[Seed, FakePlanner]:
    """A seed of this model, and a planner that sends everybody there."""
    seed = fleet.source("a", capture(source), faults)
    return seed, planning(lambda: plan(route(seed, ALL)))


# -- a fork that finds something --------------------------------------------------------------------


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
    know(before.manifest())
    taken.start()
    with puller._changed:
        puller._changed.wait_for(lambda: not puller._schedule.claimed and not puller._schedule.in_flight, 1)
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

    def noted(seed: Seed) -> None:
        closed.append(seed.identity.instance_id)
        close(seed)

    def refuse(keeper: Keeper) -> Keeper:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Seed, "close", noted)
    monkeypatch.setattr(Keeper, "start", refuse)
    planner = planning(plan)
    with pytest.raises(RuntimeError, match="new thread"):
        forked(fleet, Model(), planner, with_folder(tmp_path))
    assert (["target"], ["failed"]) == (closed, [finish.outcome for _, finish in planner.finishes])


def resume(target: Target, spool: Spool) -> Resume:
    """Have a target's pull take from this spool."""
    puller = target.puller
    taken = Resume(
        spool, target.image, target.board, settings(), puller._schedule, puller._digests, puller._changed
    )
    puller._resume = puller._intake._resume = taken
    return taken


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


# -- what stays and what goes -------------------------------------------------------------------------


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
    halting = threading.Thread(target=keeper.halt)
    halting.start()
    with keeper._changed:
        keeper._changed.wait_for(lambda: keeper._halted, NEVER_S)
    waits = halting.is_alive()
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
    keeper = Keeper(None, IDENTITY, held, ChunkBoard(held.layout.chunks)).start()
    spool = keeper.spool
    keeper.halt()
    keeper.close(remove=True)
    assert (None, []) == (
        spool,
        [thread.name for thread in threading.enumerate() if thread.name == "rfork-spool"],
    )


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


# -- the schedule ---------------------------------------------------------------------------------------


def scheduled(*claimed: int) -> Schedule:
    """A schedule in which one source gives everything but what is claimed."""
    schedule = Schedule(CHUNKS)
    schedule.adopt({"a": [ALL]})
    schedule.claim("here", claimed)
    schedule.offer("a", [ALL])
    return schedule


def test_a_plan_does_not_change_a_claim() -> None:
    """Claimed chunks are taken by `take_claimed` alone, in order, each once."""
    schedule = scheduled(1, 4)
    schedule.adopt({"b": [ALL]})
    schedule.offer("b", [ALL])
    others = [schedule.take() for _ in range(CHUNKS - 1)]
    taken = [schedule.take_claimed() for _ in range(3)]
    assert ([Read("here", 1), Read("here", 4), None], [0, 2, 3, 5, None]) == (
        taken,
        [read.chunk if read else None for read in others],
    )


def test_what_is_under_way_or_done_is_not_claimed() -> None:
    """Two readers never write to one chunk."""
    schedule = scheduled()
    first, second = schedule.take(), schedule.take()
    assert first is not None
    assert second is not None
    schedule.verified(first)
    schedule.claim("here", [first.chunk, second.chunk])
    assert (None, False) == (schedule.take_claimed(), schedule.unassigned)


@pytest.mark.parametrize("chunks", [None, [1]])
def test_a_chunk_that_is_disclaimed_wants_a_plan(chunks: list[int] | None) -> None:
    """Until then nobody reads it."""
    schedule = scheduled(1)
    read = schedule.take_claimed()
    assert read is not None
    schedule.dropped(read)
    schedule.disclaim(chunks)
    before = (schedule.unassigned, schedule.take_claimed(), schedule.in_flight)
    schedule.adopt({"a": [ALL]})
    schedule.offer("a", [ALL])
    taken = [schedule.take() for _ in range(CHUNKS)]
    assert ((True, None, 0), False) == (before, None in taken)


def test_claimed_chunks_complete_an_image() -> None:
    """They count like any other, and never as read again."""
    schedule = scheduled(*range(CHUNKS))
    while (read := schedule.take_claimed()) is not None:
        schedule.verified(read)
    assert (True, {}) == (schedule.complete, schedule.repeated)
