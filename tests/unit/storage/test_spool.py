"""The spool: chunks that one process wrote and the next one reads, and files that are not trusted."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rfork.errors import StorageError
from rfork.image.chunks import MIB
from rfork.image.layout import Layout, TensorSpec
from rfork.storage.direct_io import MAX_IOVECS
from rfork.storage.spool import MAX_SPOOLS, PAGE, RECORD, TTL_S, Spool, acquire_spool

NAME = "rank"
CHUNKS = 3
DIGESTS = {chunk: bytes([chunk + 1]) * 16 for chunk in range(CHUNKS)}


def layout(name: str = "a", chunks: int = CHUNKS) -> Layout:
    """Return a layout of one byte tensor of this name, in chunks of 1 MiB."""
    return Layout((TensorSpec(name, "uint8", (chunks * MIB,), (1,), 0),), chunks * MIB)


def bytes_of(chunk: int) -> bytes:
    return bytes([chunk + 65]) * MIB


def fill(spool: Spool, *chunks: int) -> None:
    """Write these chunks, each with its record."""
    for chunk in chunks:
        spool.write(chunk * MIB, [memoryview(bytes_of(chunk))])
        spool.record(chunk, DIGESTS[chunk])


def content(spool: Spool, chunk: int) -> bytes:
    """Return the bytes of a chunk's slot; empty if the file is too short."""
    found = bytearray(MIB)
    return bytes(found) if spool.read(chunk * MIB, memoryview(found)) else b""


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    """Return a new spool with chunks 0 and 2."""
    made = acquire_spool(tmp_path, NAME, layout())
    fill(made, 0, 2)
    yield made
    made.close()


def reopened(spool: Spool, of: Layout | None = None) -> Spool:
    """Return the spool that the next process with this name opens."""
    spool.close()
    return acquire_spool(spool.path.parent, NAME, of or layout())


def test_the_next_process_finds_the_chunks(spool: Spool) -> None:
    """It finds records and bytes; chunks without a record are missing."""
    found = reopened(spool)
    assert {0: DIGESTS[0], 2: DIGESTS[2]} == found.records
    assert [bytes_of(0), bytes_of(2)] == [content(found, 0), content(found, 2)]
    found.close()


def test_a_spool_is_private_to_its_user(spool: Spool) -> None:
    """No other user can read the weights."""
    assert 0o600 == spool.path.stat().st_mode & 0o777


def test_missing_chunks_use_no_space(spool: Spool) -> None:
    """Missing chunks are holes in the file."""
    status = spool.path.stat()
    assert status.st_size > CHUNKS * MIB
    assert status.st_blocks * 512 < CHUNKS * MIB


def test_an_erased_chunk_is_missing(spool: Spool) -> None:
    """Its bytes may be overwritten afterwards."""
    spool.erase(0)
    found = reopened(spool)
    assert {2: DIGESTS[2]} == found.records
    found.close()


@pytest.mark.parametrize("sizes", [[MIB], [0, 3, 0, MIB - 3], [1] * (2 * MAX_IOVECS + 3)])
def test_a_write_includes_each_view(spool: Spool, sizes: list[int]) -> None:
    """The bytes of views of any number and size are written in order."""
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
def test_a_torn_record_loses_only_its_chunk(spool: Spool, at: int) -> None:
    """Any wrong byte invalidates the record."""
    flip(spool.path, PAGE + at)
    found = reopened(spool)
    assert {2: DIGESTS[2]} == found.records
    found.close()


def test_a_record_in_another_slot_is_invalid(spool: Spool) -> None:
    """A record is valid only in the slot of its chunk."""
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
def test_the_remaining_chunks_of_a_truncated_file_count(
    spool: Spool, size: int, records: list[int], allocated_bytes: list[int]
) -> None:
    """Remaining chunks count, and missing bytes are never zeros."""
    os.truncate(spool.path, size)
    found = reopened(spool)
    assert records == sorted(found.records)
    assert allocated_bytes == [len(content(found, chunk)) for chunk in sorted(found.records)]
    found.close()


def test_a_file_truncated_while_open_is_read_up_to_its_end(spool: Spool) -> None:
    """It is read up to its end, and the process is not killed by a signal."""
    os.truncate(spool.path, 2 * PAGE + MIB)
    assert bytes_of(0) == content(spool, 0)
    assert b"" == content(spool, 2)


@pytest.mark.parametrize("other", [layout("b"), layout(chunks=CHUNKS + 1)], ids=["names", "size"])
def test_another_layout_replaces_a_spool(spool: Spool, other: Layout) -> None:
    """After a change of the model, old chunks are discarded and new ones are kept."""
    found = reopened(spool, other)
    empty, used_bytes = found.records, found.path.stat().st_blocks * 512
    fill(found, 1)
    found = reopened(found, other)
    assert {} == empty
    assert used_bytes < MIB
    assert {1: DIGESTS[1]} == found.records
    assert ["rank.0.partial"] == sorted(os.listdir(spool.path.parent))
    found.close()


def test_a_spool_in_use_is_not_opened_again(spool: Spool) -> None:
    """A second process of the rank gets another spool; each finds one again."""
    second = acquire_spool(spool.path.parent, NAME, layout())
    fill(second, 1)
    assert ["rank.0.partial", "rank.1.partial"] == sorted(os.listdir(spool.path.parent))
    assert [0, 2] == sorted(spool.records)
    assert [1] == sorted(second.records)
    found = reopened(second)
    assert second.path == found.path
    assert [1] == sorted(found.records)
    found.close()


def test_names_do_not_share_a_spool(spool: Spool) -> None:
    """Each model and rank has its own name."""
    other = acquire_spool(spool.path.parent, "other", layout())
    assert {} == other.records
    other.close()


def test_the_number_of_spools_is_limited(tmp_path: Path) -> None:
    """An error is raised if more processes use a folder than it may have spools."""
    spools = [acquire_spool(tmp_path, NAME, layout()) for _ in range(MAX_SPOOLS)]
    with pytest.raises(StorageError, match="already keep chunks of rank here"):
        acquire_spool(tmp_path, NAME, layout())
    for each in spools:
        each.close()


def test_a_removed_spool_has_no_file(spool: Spool) -> None:
    """Its name is removed immediately; removing it again has no effect."""
    spool.remove()
    spool.remove()
    assert [] == os.listdir(spool.path.parent)


def test_only_the_same_file_is_removed(spool: Spool) -> None:
    """A file that has replaced the spool stays."""
    spool.path.unlink()
    spool.path.write_text("mine")
    spool.remove()
    assert "mine" == spool.path.read_text()


@pytest.mark.parametrize(("age_s", "left"), [(TTL_S + 60, 1), (TTL_S - 60, 2)], ids=["old", "young"])
def test_abandoned_spools_are_removed(spool: Spool, age_s: float, left: int) -> None:
    """The next process with the name removes old ones; those of running processes are never touched."""
    second = acquire_spool(spool.path.parent, NAME, layout())
    second.close()
    for path in (spool.path, second.path):
        os.utime(path, (0, time.time() - age_s))
    found = reopened(spool)
    assert spool.path == found.path
    assert left == len(os.listdir(spool.path.parent))
    found.close()


def test_a_closed_spool_raises(spool: Spool) -> None:
    """It never reads another file that has reused its descriptor."""
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
    """A user with write permission for the folder cannot redirect writes or make the spool readable for
    others.
    """
    put(tmp_path / f"{NAME}.0.partial")
    with pytest.raises(StorageError, match=r"rank\.0\.partial: "):
        acquire_spool(tmp_path, NAME, layout())
    target = tmp_path / "target"
    assert b"" == target.read_bytes().replace(b"another's", b"") if target.exists() else True


def test_a_file_of_another_user_is_not_opened(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a user with permission opens it."""
    spool.close()
    monkeypatch.setattr(os, "geteuid", lambda: spool.path.stat().st_uid + 1)
    with pytest.raises(StorageError, match="not a regular file that only this user"):
        acquire_spool(spool.path.parent, NAME, layout())


@pytest.mark.parametrize("folder", ["missing", "file", "/proc"])
def test_an_unwritable_folder_is_an_error(tmp_path: Path, folder: str) -> None:
    """One line names the folder and the reason."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=folder):
        acquire_spool(tmp_path / folder, NAME, layout())


def test_a_file_that_cannot_grow_is_an_error(spool: Spool) -> None:
    """A write without space is an error and leaves no record."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE + MIB + MIB // 2, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            fill(spool, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [0, 2] == sorted(spool.records)


@pytest.mark.parametrize(("free", "expected"), [(0, False), (CHUNKS * MIB, True)], ids=["full", "free"])
def test_space_is_needed_only_for_missing_chunks(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, free: int, expected: bool
) -> None:
    """Chunks that are written already need no more space."""
    real = os.fstatvfs(0)
    statvfs = os.statvfs_result(
        [*(real[:4]), free // real.f_frsize, *real[5:]],  # f_bavail is the fifth field
    )
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: statvfs)
    assert expected == spool.has_space()
