"""Resume: a restarted process reuses the chunks that it spooled."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rfork.image.capture import capture
from rfork.image.chunk_state import ChunkState
from rfork.image.chunks import MIB
from rfork.receiver import machine
from rfork.storage.spool import PAGE, RECORD, Spool
from tests.unit.receiver.fleet import NEVER_S, Fleet, Script, Target, content_hash, image, plan, route
from tests.unit.receiver.spools import (
    ALL,
    CHUNKS,
    Model,
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
