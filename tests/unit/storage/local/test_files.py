"""Files of this machine as blobs, and a folder as their store."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
from rfork.storage.local.files import LocalFile, LocalStore
from rfork.storage.local.linux import MAX_IOVECS
from rfork.storage.location import Location

NEVER_S = 60.0
CONTENT = bytes(range(256)) * 20
SETTINGS = StorageSettings()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LocalFile]:
    """A file of 5120 bytes, open."""
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    opened = LocalFile(path, SETTINGS)
    yield opened
    opened.close()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A folder that is not there yet."""
    return LocalStore(Location.parse(tmp_path / "weights"), SETTINGS)


def put(store: LocalStore, name: str, content: bytes = b"abc", *, replace: bool = True) -> None:
    """Write a whole blob."""
    with store.write(name, replace=replace) as writer:
        writer.write([memoryview(content)])


def left_in(folder: Path) -> list[str]:
    """Every file below a folder, temporary ones too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def open_files() -> list[Path]:
    """What this process has open; not counted, as what is garbage is closed at any time."""
    found: list[Path] = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that the folder itself was listed by
            found.append(link.readlink())
    return found


def failing(number: int) -> Callable[..., int]:
    """A call to the operating system that fails."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("sizes", [[10], [0, 3, 0, 7], [1] * (2 * MAX_IOVECS + 3)])
def test_a_read_fills_each_view(file: LocalFile, sizes: list[int]) -> None:
    """However many views there are, and of whatever sizes, they get the bytes in order."""
    views = [bytearray(size) for size in sizes]
    file.read(100, [memoryview(view) for view in views])
    assert CONTENT[100 : 100 + sum(sizes)] == b"".join(views)


@pytest.mark.parametrize("max_bytes", [1, 7, 100])
def test_a_read_that_comes_in_parts(file: LocalFile, max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may give less than it was asked for; what lacks is asked for again."""
    preadv = os.preadv

    def short(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        return preadv(descriptor, [views[0][:max_bytes]], offset)

    monkeypatch.setattr(os, "preadv", short)
    views = [bytearray(5), bytearray(30), bytearray(200)]
    file.read(3, [memoryview(view) for view in views])
    assert CONTENT[3:238] == b"".join(views)


def test_a_file_that_ends_too_early(file: LocalFile) -> None:
    """Bytes that are not there are an error, and never zeros."""
    with pytest.raises(StorageError, match="ends at byte 5120"):
        read_range(file, 5000, 200)


@pytest.mark.parametrize("length", [0, 5000, 5121])
def test_a_file_that_is_written_to(file: LocalFile, length: int) -> None:
    """A file that somebody changes, cuts short or makes longer while it is read gives nothing more."""
    os.truncate(file.path, length)
    with pytest.raises(StorageChanged, match="was modified"):
        read_range(file, 0, 10)


def test_a_file_that_is_replaced_is_read_as_it_was(file: LocalFile) -> None:
    """A new file under the old name does not get into the middle of a read."""
    other = file.path.with_name("other")
    other.write_bytes(b"new")
    other.replace(file.path)
    assert CONTENT[:10] == read_range(file, 0, 10)


def test_what_is_known_of_a_file(file: LocalFile) -> None:
    """Its URI, its size, and a version that is another file's only if that is the same one."""
    again = LocalFile(file.path, SETTINGS)
    file.path.with_name("other").write_bytes(CONTENT)
    other = LocalFile(file.path.with_name("other"), SETTINGS)
    known = (file.uri, file.size, file.version == again.version, file.version == other.version)
    again.close()
    other.close()
    assert (file.path.as_uri(), 5120, True, False) == known


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOENT, StorageNotFound),
        (errno.EACCES, StorageAccessDenied),
        (errno.EPERM, StorageAccessDenied),
        (errno.EIO, StorageError),
    ],
)
def test_a_file_that_cannot_be_opened(
    tmp_path: Path, number: int, expected: type[StorageError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file, and its kind says what is wrong."""
    monkeypatch.setattr(os, "open", failing(number))
    with pytest.raises(StorageError, match="some-file") as raised:
        LocalFile(tmp_path / "some-file", SETTINGS)
    assert expected is raised.type


@pytest.mark.parametrize("file_type", ["folder", "pipe"])
def test_what_is_no_file(tmp_path: Path, file_type: str) -> None:
    """A folder, or a pipe that nobody writes to, is told at once, and stays closed."""
    path = tmp_path / "thing"
    path.mkdir() if file_type == "folder" else os.mkfifo(path)
    with pytest.raises(StorageError, match="thing is not a regular file"):
        LocalFile(path, SETTINGS)
    assert path not in open_files()


def test_a_disk_that_fails(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in mid-read names the file."""
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    with pytest.raises(StorageError, match=r"data: Input/output error"):
        read_range(file, 0, 10)


@pytest.mark.parametrize("call", ["preadv", "fstat"])
def test_a_file_that_its_server_no_longer_has(file: LocalFile, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system one that was replaced may be gone at any call: that is a change."""
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(errno.ESTALE))
        with pytest.raises(StorageChanged, match="data"):
            read_range(file, 0, 10)


def test_a_file_stays_open_until_its_last_read_is_over(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that hangs, and is left behind, never sees another file under its descriptor."""
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
    assert (b"\1\2\3", True, False) == (bytes(got), open_while_read, file.path in open_files())


def test_what_is_written_is_there(store: LocalStore, tmp_path: Path) -> None:
    """A blob in folders that had to be made, in as many pieces as it likes, and nothing beside it."""
    with store.write("a/b/data") as writer:
        writer.write([memoryview(b"ab"), memoryview(b""), memoryview(b"c")])
        writer.write([memoryview(b"d")] * (2 * MAX_IOVECS + 1))
        unseen = list(store.list())
    blob = store.open("a/b/data")
    content = read_range(blob, 0, blob.size)
    blob.close()
    assert ([], b"abc" + b"d" * (2 * MAX_IOVECS + 1)) == (unseen, content)
    assert ["weights/a/b/data"] == left_in(tmp_path)


@pytest.mark.parametrize("error", [ValueError("mine"), OSError("mine"), KeyboardInterrupt("mine")])
def test_a_writer_that_gives_up(store: LocalStore, tmp_path: Path, error: BaseException) -> None:
    """An exception in the block is raised as it is; what was there stays, and nothing is left behind."""
    put(store, "data", b"old")

    def write_and_fail() -> None:
        with store.write("data") as writer:
            writer.write([memoryview(b"new")])
            raise error

    with pytest.raises(type(error), match="mine"):
        write_and_fail()
    assert (b"old", ["weights/data"]) == ((tmp_path / "weights/data").read_bytes(), left_in(tmp_path))


def test_an_interruption_as_the_file_is_made(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left: it is raised right after the call that makes the file, before its answer is kept."""
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
def test_no_room_is_left(
    store: LocalStore,
    tmp_path: Path,
    call: str,
    number: int,
    expected: type[StorageError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever step finds the disk full, the error says so by the blob's name, and nothing is left."""
    monkeypatch.setattr(os, call, failing(number))
    with pytest.raises(expected, match="weights/data"):
        put(store, "data")
    assert [] == left_in(tmp_path)


def test_a_file_system_that_settles_no_folders(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a folder cannot be synced, as on some network file systems, what was written is there."""
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
def test_a_name_that_is_taken(
    store: LocalStore,
    tmp_path: Path,
    links: bool,
    replace: bool,
    expected: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `replace` False what is there stays, on file systems without links too; a free name is taken."""
    if not links:
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
    put(store, "taken", b"old", replace=replace)
    put(store, "taken", b"new", replace=replace)
    assert (expected, ["weights/taken"]) == ((tmp_path / "weights/taken").read_bytes(), left_in(tmp_path))


def test_a_list_is_in_the_order_of_names(store: LocalStore, tmp_path: Path) -> None:
    """All folders below, as object stores order them; no temporary files, pipes and links to nothing."""
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
def test_a_list_of_a_prefix(store: LocalStore, prefix: str, expected: list[str]) -> None:
    """Names that begin so, whether a folder ends there or not; none at all is no error."""
    for name in ("a/x", "ab", "b/y"):
        put(store, name)
    assert [BlobEntry(name, 3) for name in expected] == list(store.list(prefix))


def test_a_list_of_a_folder_that_is_missing(store: LocalStore) -> None:
    """There is no folder to list, and that is said."""
    with pytest.raises(StorageNotFound, match="weights"):
        list(store.list())


def test_a_blob_that_is_removed(store: LocalStore, tmp_path: Path) -> None:
    """It is gone, and removing it again is no error, nor what never was."""
    put(store, "a/data")
    for name in ("a/data", "a/data", "none/data", "none"):
        store.remove(name)
    with pytest.raises(StorageNotFound, match="a/data"):
        store.open("a/data")
    assert [] == left_in(tmp_path)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../outside", "a/../../outside", "a\0b"])
def test_names_outside_the_folder(store: LocalStore, name: str) -> None:
    """A name, which an index file may have given, never leads out of the folder."""
    with pytest.raises(SettingsError, match="is not a valid file name within"):
        store.open(name)
    with pytest.raises(SettingsError, match="is not a valid file name within"):
        put(store, name)


def test_a_folder_that_no_system_can_have(tmp_path: Path) -> None:
    """A name with a NUL is refused as any other that cannot be."""
    with pytest.raises(SettingsError, match="is not a valid file name"):
        LocalStore(Location("file", "", f"{tmp_path}/a\0b/"), SETTINGS)


def test_where_a_store_is(store: LocalStore, tmp_path: Path) -> None:
    """Its URI ends with a slash, however it was written."""
    assert f"{(tmp_path / 'weights').as_uri()}/" == store.uri
