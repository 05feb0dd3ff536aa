"""Local files as blobs, and folders as stores."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rfork.errors import (
    SettingsError,
    StorageAccessDenied,
    StorageChanged,
    StorageError,
    StorageFull,
    StorageNotFound,
)
from rfork.settings import StorageSettings
from rfork.storage.blob import BlobEntry, read_range
from rfork.storage.direct_io import MAX_IOVECS
from rfork.storage.local import LocalFile, LocalStore
from rfork.storage.location import Location

NEVER_S = 60.0
CONTENT = bytes(range(256)) * 20
SETTINGS = StorageSettings()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LocalFile]:
    """Open a file of 5120 bytes."""
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    opened = LocalFile(path, SETTINGS)
    yield opened
    opened.close()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Return a folder that does not exist yet."""
    return LocalStore(Location.parse(tmp_path / "weights"), SETTINGS)


def put(store: LocalStore, name: str, content: bytes = b"abc", *, replace: bool = True) -> None:
    """Write a blob."""
    with store.write(name, replace=replace) as writer:
        writer.write([memoryview(content)])


def left_in(folder: Path) -> list[str]:
    """Return all files below a folder, temporary ones included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def open_files() -> list[Path]:
    """Return the open files of this process as a set, because garbage may be closed at any time."""
    found: list[Path] = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself
            found.append(link.readlink())
    return found


def failing(number: int) -> Callable[..., int]:
    """Return a system call that fails."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("sizes", [[10], [0, 3, 0, 7], [1] * (2 * MAX_IOVECS + 3)])
def test_a_read_fills_each_view(file: LocalFile, sizes: list[int]) -> None:
    """Views of any number and size get the bytes in order."""
    views = [bytearray(size) for size in sizes]
    file.read(100, [memoryview(view) for view in views])
    assert CONTENT[100 : 100 + sum(sizes)] == b"".join(views)


@pytest.mark.parametrize("max_bytes", [1, 7, 100])
def test_a_short_read_is_continued(file: LocalFile, max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file system returns fewer bytes than requested, the rest is requested again."""
    preadv = os.preadv

    def short(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        return preadv(descriptor, [views[0][:max_bytes]], offset)

    monkeypatch.setattr(os, "preadv", short)
    views = [bytearray(5), bytearray(30), bytearray(200)]
    file.read(3, [memoryview(view) for view in views])
    assert CONTENT[3:238] == b"".join(views)


def test_a_truncated_file_is_an_error(file: LocalFile) -> None:
    """Missing bytes are an error, never zeros."""
    with pytest.raises(StorageError, match="ends at byte 5120"):
        read_range(file, 5000, 200)


@pytest.mark.parametrize("length", [0, 5000, 5121])
def test_a_modified_file_is_detected(file: LocalFile, length: int) -> None:
    """A file that is changed, truncated or extended while it is open cannot be read any more."""
    os.truncate(file.path, length)
    with pytest.raises(StorageChanged, match="was modified"):
        read_range(file, 0, 10)


def test_a_replaced_file_is_read_from_the_old_inode(file: LocalFile) -> None:
    """A new file under the old name does not affect a running read."""
    other = file.path.with_name("other")
    other.write_bytes(b"new")
    other.replace(file.path)
    assert CONTENT[:10] == read_range(file, 0, 10)


def test_different_files_have_different_versions(file: LocalFile) -> None:
    """Two files have the same version only if they are the same file."""
    file.path.with_name("other").write_bytes(CONTENT)
    with closing(LocalFile(file.path, SETTINGS)) as again:
        assert file.version == again.version
    with closing(LocalFile(file.path.with_name("other"), SETTINGS)) as other:
        assert file.version != other.version
    assert file.path.as_uri() == file.uri
    assert 5120 == file.size


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOENT, StorageNotFound),
        (errno.EACCES, StorageAccessDenied),
        (errno.EPERM, StorageAccessDenied),
        (errno.EIO, StorageError),
    ],
)
def test_a_file_that_cannot_be_opened_is_named(
    tmp_path: Path, number: int, expected: type[StorageError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file, and its type states the cause."""
    monkeypatch.setattr(os, "open", failing(number))
    with pytest.raises(StorageError, match="some-file") as raised:
        LocalFile(tmp_path / "some-file", SETTINGS)
    assert expected is raised.type


@pytest.mark.parametrize("file_type", ["folder", "pipe"])
def test_only_regular_files_can_be_opened(tmp_path: Path, file_type: str) -> None:
    """A folder or a pipe without a writer is refused immediately, and no descriptor stays open."""
    path = tmp_path / "thing"
    path.mkdir() if file_type == "folder" else os.mkfifo(path)
    with pytest.raises(StorageError, match="thing is not a regular file"):
        LocalFile(path, SETTINGS)
    assert path not in open_files()


def test_a_disk_error_names_the_file(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error during a read names the file."""
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    with pytest.raises(StorageError, match=r"data: Input/output error"):
        read_range(file, 0, 10)


@pytest.mark.parametrize("call", ["preadv", "fstat"])
def test_a_file_removed_by_its_server_is_a_change(file: LocalFile, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system, any call may fail because the file was replaced: that is a change."""
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(errno.ESTALE))
        with pytest.raises(StorageChanged, match="data"):
            read_range(file, 0, 10)


def test_a_file_stays_open_until_its_last_read_ends(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abandoned read that hangs never reads another file under its descriptor."""
    reads, resumed, got = threading.Event(), threading.Event(), bytearray(3)
    preadv = os.preadv

    def slow(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        reads.set()
        resumed.wait(NEVER_S)
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", slow)
    thread = threading.Thread(target=file.read, args=(1, [memoryview(got)]))
    thread.start()
    reads.wait(NEVER_S)
    file.close()
    open_while_read = file.path in open_files()
    resumed.set()
    thread.join()
    with pytest.raises(StorageError, match="closed"):
        read_range(file, 0, 1)
    assert b"\1\2\3" == bytes(got)
    assert open_while_read
    assert file.path not in open_files()


def test_a_written_blob_can_be_read(store: LocalStore, tmp_path: Path) -> None:
    """A blob is written in pieces of any size, missing folders are created, and no other file is left."""
    with store.write("a/b/data") as writer:
        writer.write([memoryview(b"ab"), memoryview(b""), memoryview(b"c")])
        writer.write([memoryview(b"d")] * (2 * MAX_IOVECS + 1))
        unseen = list(store.list())
    blob = store.open("a/b/data")
    content = read_range(blob, 0, blob.size)
    blob.close()
    assert [] == unseen
    assert b"abc" + b"d" * (2 * MAX_IOVECS + 1) == content
    assert ["weights/a/b/data"] == left_in(tmp_path)


@pytest.mark.parametrize("error", [ValueError("mine"), OSError("mine"), KeyboardInterrupt("mine")])
def test_an_aborted_write_leaves_nothing(store: LocalStore, tmp_path: Path, error: BaseException) -> None:
    """An exception in the block is raised unchanged; the previous blob stays, and no file is left."""
    put(store, "data", b"old")

    def write_and_fail() -> None:
        with store.write("data") as writer:
            writer.write([memoryview(b"new")])
            raise error

    with pytest.raises(type(error), match="mine"):
        write_and_fail()
    assert b"old" == (tmp_path / "weights/data").read_bytes()
    assert ["weights/data"] == left_in(tmp_path)


def test_an_interrupt_while_the_file_is_created_leaves_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt right after the file was created, before its descriptor is stored, leaves no file."""
    make = os.open

    def interrupted(path: Path, flags: int, mode: int = 0o777) -> int:
        os.close(make(path, flags, mode))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(store, "data")
    assert [] == left_in(tmp_path)


@pytest.mark.parametrize("call", ["writev", "fsync", "replace"])
@pytest.mark.parametrize(("number", "expected"), [(errno.ENOSPC, StorageFull), (errno.EDQUOT, StorageFull)])
def test_a_full_disk_names_the_blob_and_leaves_nothing(
    store: LocalStore,
    tmp_path: Path,
    call: str,
    number: int,
    expected: type[StorageError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever step finds the disk full, the error names the blob, and no file is left."""
    # pathlib binds os.replace when it is imported in Python 3.10.
    monkeypatch.setattr(Path if call == "replace" else os, call, failing(number))
    with pytest.raises(expected, match="weights/data"):
        put(store, "data")
    assert [] == left_in(tmp_path)


def test_a_file_system_that_cannot_sync_folders_is_accepted(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob is written even if its folder cannot be synced, as on some network file systems."""
    fsync = os.fsync

    def only_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    put(store, "data")
    assert [BlobEntry("data", 3)] == list(store.list())


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize(("replace", "expected"), [(True, b"new"), (False, b"old")])
def test_an_existing_blob_stays_without_replace(
    store: LocalStore,
    tmp_path: Path,
    links: bool,
    replace: bool,
    expected: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `replace` False an existing blob stays, also on file systems without links; a free name is used."""
    if not links:
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
    put(store, "taken", b"old", replace=replace)
    put(store, "taken", b"new", replace=replace)
    assert expected == (tmp_path / "weights/taken").read_bytes()
    assert ["weights/taken"] == left_in(tmp_path)


def test_a_list_is_in_the_order_of_names(store: LocalStore, tmp_path: Path) -> None:
    """All folders below are listed in the order of object stores, without temporary files, pipes and broken
    links.
    """
    for name in ("b", "a/z", "a-b", "a.b", "a/deep/er", ".hidden"):
        put(store, name)
    folder = tmp_path / "weights"
    (folder / f".b.{'0' * 32}.tmp").write_bytes(b"half")
    (folder / "nothing").symlink_to("nowhere")
    (folder / "linked").symlink_to("b")
    (folder / "round").symlink_to("round")
    os.mkfifo(folder / "pipe")
    names = [entry.name for entry in store.list()]
    assert [".hidden", "a-b", "a.b", "a/deep/er", "a/z", "b", "linked"] == names


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("a", ["a/x", "ab"]),
        ("a/", ["a/x"]),
        ("a/x", ["a/x"]),
        ("c", []),
        ("none/", []),
        ("b/y/none", []),
        ("/a", []),
        ("/", []),
    ],
)
def test_names_that_begin_with_the_prefix_are_listed(store: LocalStore, prefix: str, expected: list[str]) -> None:
    """Names that begin with the prefix are listed, at folder boundaries or not; no match is no error."""
    for name in ("a/x", "ab", "b/y"):
        put(store, name)
    assert [BlobEntry(name, 3) for name in expected] == list(store.list(prefix))


def test_listing_a_missing_folder_is_an_error(store: LocalStore) -> None:
    """A missing folder cannot be listed."""
    with pytest.raises(StorageNotFound, match="weights"):
        list(store.list())


def test_a_removed_blob_no_longer_exists(store: LocalStore, tmp_path: Path) -> None:
    """A removed blob no longer exists; removing it again, or one that never existed, is no error."""
    put(store, "a/data")
    for name in ("a/data", "a/data", "none/data", "none"):
        store.remove(name)
    with pytest.raises(StorageNotFound, match="a/data"):
        store.open("a/data")
    assert [] == left_in(tmp_path)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../outside", "a/../../outside", "a\0b"])
def test_names_outside_the_folder_are_refused(store: LocalStore, name: str) -> None:
    """Names, for example from an index file, never lead out of the folder."""
    with pytest.raises(SettingsError, match="is not a valid file name within"):
        store.open(name)
    with pytest.raises(SettingsError, match="is not a valid file name within"):
        put(store, name)


def test_a_folder_with_a_null_byte_is_refused(tmp_path: Path) -> None:
    """A name with a null byte is refused like any invalid name."""
    with pytest.raises(SettingsError, match="is not a valid file name"):
        LocalStore(Location("file", "", f"{tmp_path}/a\0b/"), SETTINGS)


def test_the_uri_of_a_store_ends_with_a_slash(store: LocalStore, tmp_path: Path) -> None:
    """Its URI ends with a slash, whether it was written with one or not."""
    assert f"{(tmp_path / 'weights').as_uri()}/" == store.uri
