"""Reading files by position."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rfork.errors import SettingsError, StorageError
from rfork.storage.files import MOST_BUFFERS, Cursor, DataFile, path_of

NEVER_S = 60.0
CONTENT = bytes(range(256)) * 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DataFile]:
    """A file of 5120 bytes, open."""
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    opened = DataFile(path)
    yield opened
    opened.close()


@pytest.mark.parametrize("sizes", [[10], [0, 3, 0, 7], [1] * (2 * MOST_BUFFERS + 3)])
def test_a_read_fills_each_view(file: DataFile, sizes: list[int]) -> None:
    """However many views there are, and of whatever sizes, they get the bytes in order."""
    views = [bytearray(size) for size in sizes]
    file.read(100, [memoryview(view) for view in views])
    assert CONTENT[100 : 100 + sum(sizes)] == b"".join(views)


def test_a_file_that_ends_too_early(file: DataFile) -> None:
    """Bytes that are not there are an error, and never zeros."""
    with pytest.raises(StorageError, match="ends at byte 5120"):
        file.part(5000, 200)


def test_a_file_that_is_written_to(file: DataFile) -> None:
    """A file that somebody changes while it is read gives nothing more."""
    with file.path.open("ab") as writing:
        writing.write(b"more")
    with pytest.raises(StorageError, match="written to"):
        file.part(0, 10)


def test_a_file_that_is_replaced_is_read_as_it_was(file: DataFile) -> None:
    """A new file under the old name does not get into the middle of a read."""
    other = file.path.with_name("other")
    other.write_bytes(b"new")
    other.replace(file.path)
    assert CONTENT[:10] == file.part(0, 10)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(StorageError, match="nothing-here"):
        DataFile(tmp_path / "nothing-here")


def test_a_cursor_cuts_views_where_it_must() -> None:
    """Bytes are taken in order, across the ends of views."""
    cursor = Cursor([memoryview(b"abc"), memoryview(b"de"), memoryview(b"f")])
    assert [[b"ab"], [b"c", b"de"], [], [b"f"]] == [
        [bytes(view) for view in cursor.take(count)] for count in (2, 3, 0, 1)
    ]


def test_a_file_uri() -> None:
    """Escapes are undone."""
    assert Path("/models/a b.safetensors") == path_of("file:///models/a%20b.safetensors")


@pytest.mark.parametrize("uri", ["/models/x", "s3://bucket/x", "file://elsewhere/x", "file:x"])
def test_other_uris_are_refused(uri: str) -> None:
    """Only files of this machine."""
    with pytest.raises(SettingsError):
        path_of(uri)


def test_a_file_stays_open_until_its_last_read_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that hangs, and is left behind, never sees another file under its descriptor."""
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    file, reads, go_on, got = DataFile(path), threading.Event(), threading.Event(), bytearray(3)
    preadv = os.preadv

    def slow(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        reads.set()
        go_on.wait(NEVER_S)
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", slow)
    thread = threading.Thread(target=file.read, args=(0, [memoryview(got)]))
    thread.start()
    reads.wait(NEVER_S)
    file.close()
    open_while_read = os.path.exists(f"/proc/self/fd/{file._descriptor}")
    go_on.set()
    thread.join()
    with pytest.raises(StorageError, match="closed"):
        file.part(0, 1)
    assert (b"abc", True) == (bytes(got), open_while_read)
