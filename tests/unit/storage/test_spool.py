"""The spool: what one process wrote and the next reads, and what is never trusted."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rfork.errors import StorageError
from rfork.image.chunks import MIB
from rfork.image.layout import Layout
from rfork.image.tensor_specs import TensorSpec
from rfork.storage.local.linux import MAX_IOVECS
from rfork.storage.spool import PAGE, RECORD, Spool
from rfork.storage.spool_lock import MAX_SPOOLS, TTL_S, acquire_spool

NAME = "rank"
CHUNKS = 3
DIGESTS = {chunk: bytes([chunk + 1]) * 16 for chunk in range(CHUNKS)}


def layout(name: str = "a", chunks: int = CHUNKS) -> Layout:
    """One tensor of bytes of this name: chunks of 1 MiB."""
    return Layout((TensorSpec(name, "uint8", (chunks * MIB,), (1,), 0),), chunks * MIB)


def bytes_of(chunk: int) -> bytes:
    return bytes([chunk + 65]) * MIB


def fill(spool: Spool, *chunks: int) -> None:
    """Write these chunks, each with its record."""
    for chunk in chunks:
        spool.write(chunk * MIB, [memoryview(bytes_of(chunk))])
        spool.record(chunk, DIGESTS[chunk])


def content(spool: Spool, chunk: int) -> bytes:
    """What is in the place of a chunk; empty where the file does not have it all."""
    found = bytearray(MIB)
    return bytes(found) if spool.read(chunk * MIB, memoryview(found)) else b""


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    """A new spool with chunks 0 and 2."""
    made = acquire_spool(tmp_path, NAME, layout())
    fill(made, 0, 2)
    yield made
    made.close()


def reopened(spool: Spool, of: Layout | None = None) -> Spool:
    """The spool that the next process of the name finds."""
    spool.close()
    return acquire_spool(spool.path.parent, NAME, of or layout())


def test_the_next_process_finds_what_the_last_one_wrote(spool: Spool) -> None:
    """Records and bytes; chunks without a record are not there."""
    found = reopened(spool)
    assert ({0: DIGESTS[0], 2: DIGESTS[2]}, [bytes_of(0), bytes_of(2)]) == (
        found.records,
        [content(found, 0), content(found, 2)],
    )
    found.close()


def test_a_spool_is_its_user_s_alone(spool: Spool) -> None:
    """Weights are nobody else's business."""
    assert 0o600 == spool.path.stat().st_mode & 0o777


def test_what_is_missing_costs_no_space(spool: Spool) -> None:
    """Chunks that are not there are holes."""
    status = spool.path.stat()
    assert (True, True) == (status.st_size > CHUNKS * MIB, status.st_blocks * 512 < CHUNKS * MIB)


def test_an_erased_chunk_is_not_there(spool: Spool) -> None:
    """Its bytes may be overwritten from then on."""
    spool.erase(0)
    found = reopened(spool)
    assert {2: DIGESTS[2]} == found.records
    found.close()


@pytest.mark.parametrize("sizes", [[MIB], [0, 3, 0, MIB - 3], [1] * (2 * MAX_IOVECS + 3)])
def test_a_write_takes_each_view(spool: Spool, sizes: list[int]) -> None:
    """However many views there are, and of whatever sizes, their bytes are put in order."""
    data = os.urandom(sum(sizes))
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    spool.write(MIB, [memoryview(data)[end - size : end] for size, end in zip(sizes, ends, strict=True)])
    assert data == content(spool, 1)[: len(data)]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 255]))


@pytest.mark.parametrize("at", range(0, RECORD.size, 5))
def test_a_torn_record_costs_its_chunk_alone(spool: Spool, at: int) -> None:
    """Whatever byte of it is wrong."""
    flip(spool.path, PAGE + at)
    found = reopened(spool)
    assert {2: DIGESTS[2]} == found.records
    found.close()


def test_a_record_in_another_s_place_says_nothing(spool: Spool) -> None:
    """A record is of the chunk whose place it has."""
    with spool.path.open("r+b") as file:
        file.seek(PAGE)
        record = file.read(RECORD.size)
        file.seek(PAGE + RECORD.size)
        file.write(record)
    found = reopened(spool)
    assert {0: DIGESTS[0], 2: DIGESTS[2]} == found.records
    found.close()


@pytest.mark.parametrize(
    ("size", "records", "allocated_bytes"),
    [(0, [], []), (PAGE + 40, [0], [0]), (2 * PAGE + MIB + 5, [0, 2], [MIB, 0])],
    ids=["empty", "within the records", "within the data"],
)
def test_a_file_that_was_cut_short(spool: Spool, size: int, records: list[int], allocated_bytes: list[int]) -> None:
    """What is left counts, and bytes that are not there are never zeros."""
    os.truncate(spool.path, size)
    found = reopened(spool)
    assert (records, allocated_bytes) == (
        sorted(found.records),
        [len(content(found, chunk)) for chunk in sorted(found.records)],
    )
    found.close()


def test_a_file_that_is_cut_short_while_it_is_open(spool: Spool) -> None:
    """It is read as far as it goes: nobody's process ends of it."""
    os.truncate(spool.path, 2 * PAGE + MIB)
    assert (bytes_of(0), b"") == (content(spool, 0), content(spool, 2))


@pytest.mark.parametrize("other", [layout("b"), layout(chunks=CHUNKS + 1)], ids=["names", "size"])
def test_another_layout_replaces_a_spool(spool: Spool, other: Layout) -> None:
    """The model was changed: nothing of the old one is of any use, and what comes of the new one is kept."""
    found = reopened(spool, other)
    empty, used_bytes = found.records, found.path.stat().st_blocks * 512
    fill(found, 1)
    found = reopened(found, other)
    assert ({}, True, {1: DIGESTS[1]}, ["rank.0.partial"]) == (
        empty,
        used_bytes < MIB,
        found.records,
        sorted(os.listdir(spool.path.parent)),
    )
    found.close()


def test_a_spool_in_use_is_left_alone(spool: Spool) -> None:
    """A second process of the rank gets one of its own; each finds one again."""
    second = acquire_spool(spool.path.parent, NAME, layout())
    fill(second, 1)
    assert (["rank.0.partial", "rank.1.partial"], [0, 2], [1]) == (
        sorted(os.listdir(spool.path.parent)),
        sorted(spool.records),
        sorted(second.records),
    )
    found = reopened(second)
    assert (second.path, [1]) == (found.path, sorted(found.records))
    found.close()


def test_two_names_never_meet(spool: Spool) -> None:
    """Models and ranks have names of their own."""
    other = acquire_spool(spool.path.parent, "other", layout())
    assert {} == other.records
    other.close()


def test_so_many_spools_and_no_more(tmp_path: Path) -> None:
    """A folder that more processes use than it may have spools for says so."""
    spools = [acquire_spool(tmp_path, NAME, layout()) for _ in range(MAX_SPOOLS)]
    with pytest.raises(StorageError, match="have a spool for rank here"):
        acquire_spool(tmp_path, NAME, layout())
    for each in spools:
        each.close()


def test_a_removed_spool_is_gone(spool: Spool) -> None:
    """Its name at once; and removing it again is harmless."""
    spool.remove()
    spool.remove()
    assert [] == os.listdir(spool.path.parent)


def test_only_the_own_file_is_removed(spool: Spool) -> None:
    """What somebody put in its place stays."""
    spool.path.unlink()
    spool.path.write_text("mine")
    spool.remove()
    assert "mine" == spool.path.read_text()


@pytest.mark.parametrize(("age_s", "left"), [(TTL_S + 60, 1), (TTL_S - 60, 2)], ids=["old", "young"])
def test_what_nobody_came_back_for_is_removed(spool: Spool, age_s: float, left: int) -> None:
    """By the next process of the name, once it is old; another process's is never touched."""
    second = acquire_spool(spool.path.parent, NAME, layout())
    second.close()
    for path in (spool.path, second.path):
        os.utime(path, (0, time.time() - age_s))
    found = reopened(spool)
    assert (spool.path, left) == (found.path, len(os.listdir(spool.path.parent)))
    found.close()


def test_a_closed_spool_gives_an_error(spool: Spool) -> None:
    """And never bytes of whatever file has its descriptor by then."""
    spool.close()
    spool.close()
    with pytest.raises(OSError, match="closed"):
        content(spool, 0)


def symlink(path: Path) -> None:
    target = path.parent / "target"
    target.write_bytes(b"another's")
    path.symlink_to(target)


def hard_link(path: Path) -> None:
    target = path.parent / "target"
    target.touch(0o600)
    os.link(target, path)


def readable(path: Path) -> None:
    path.touch(0o644)


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("put", [symlink, hard_link, readable, fifo, Path.mkdir])
def test_a_hostile_file_is_not_opened(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """Whoever may write to the folder cannot have another file written, or one that others read."""
    put(tmp_path / f"{NAME}.0.partial")
    with pytest.raises(StorageError, match=r"rank\.0\.partial: "):
        acquire_spool(tmp_path, NAME, layout())
    target = tmp_path / "target"
    assert b"" == target.read_bytes().replace(b"another's", b"") if target.exists() else True


def test_another_user_s_file_is_not_opened(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by somebody who may."""
    spool.close()
    monkeypatch.setattr(os, "geteuid", lambda: spool.path.stat().st_uid + 1)
    with pytest.raises(StorageError, match="not a regular file that only this user"):
        acquire_spool(spool.path.parent, NAME, layout())


@pytest.mark.parametrize("folder", ["missing", "file", "/proc"])
def test_a_folder_that_cannot_be_written_to(tmp_path: Path, folder: str) -> None:
    """One line says which, and why."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=folder):
        acquire_spool(tmp_path / folder, NAME, layout())


def test_a_file_that_may_not_grow(spool: Spool) -> None:
    """A write that finds no room is an error, and leaves no record."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE + MIB + MIB // 2, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            fill(spool, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [0, 2] == sorted(spool.records)


@pytest.mark.parametrize(("free", "expected"), [(0, False), (CHUNKS * MIB, True)], ids=["full", "free"])
def test_room_is_asked_for_before(spool: Spool, monkeypatch: pytest.MonkeyPatch, free: int, expected: bool) -> None:
    """What is written already needs no more."""
    real = os.fstatvfs(0)
    statvfs = os.statvfs_result(
        [*(real[:4]), free // real.f_frsize, *real[5:]],  # f_bavail is the fifth
    )
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: statvfs)
    assert expected == spool.has_space()
