"""One blob made of many: it reads as the plain file would."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.errors import StorageCorrupt, StorageError
from rfork.storage.blob import read_range
from rfork.storage.location import Location
from rfork.storage.snapshots.chunked_blob import MAX_OPEN, ChunkedBlob
from tests.memory_bucket import InMemoryBlobStore, InMemoryBucket

FOLDER = Location.parse("s3://bucket/chunks/")


def chunked_blob(bucket: InMemoryBucket, pieces: list[bytes]) -> ChunkedBlob:
    """The pieces, one behind the other; equal ones are one object."""
    for piece in pieces:
        bucket.objects[f"chunks/{piece.hex()}"] = piece
    parts = [(piece.hex(), len(piece)) for piece in pieces]
    return ChunkedBlob("s3://bucket/whole", InMemoryBlobStore(bucket, FOLDER), parts)


@given(st.lists(st.binary(max_size=5), max_size=8), st.data())
def test_any_range_reads_as_of_the_plain_file(pieces: list[bytes], data: st.DataObject) -> None:
    """Whatever the parts, the range, and the views that it is read into."""
    bucket = InMemoryBucket()
    blob, content = chunked_blob(bucket, pieces), b"".join(pieces)
    begin = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(begin, len(content)))
    cuts = sorted(data.draw(st.lists(st.integers(0, end - begin), max_size=3)))
    got = bytearray(end - begin)
    blob.read(begin, [memoryview(got)[low:high] for low, high in pairwise([0, *cuts, end - begin])])
    blob.close()
    assert (content[begin:end], len(content), 0) == (bytes(got), blob.size, bucket.open_blobs)


def test_only_so_many_stay_open() -> None:
    """Those read longest ago are closed, and opened again when they are wanted."""
    bucket = InMemoryBucket()
    pieces = [index.to_bytes(2, "big") for index in range(MAX_OPEN + 10)]
    blob = chunked_blob(bucket, pieces)
    assert (b"".join(pieces), MAX_OPEN) == (read_range(blob, 0, blob.size), bucket.open_blobs)
    assert pieces[0] == read_range(blob, 0, 2)
    blob.close()
    assert (0, MAX_OPEN + 11) == (bucket.open_blobs, len(bucket.paths_of("open")))


def test_two_that_open_one_object_at_once() -> None:
    """Both read it, one of the two is kept, and the other is closed at once."""
    bucket = InMemoryBucket()
    blob, together = chunked_blob(bucket, [b"aa"]), threading.Barrier(2)

    def meet(what: str, path: str) -> None:
        if what == "open":
            together.wait(10)

    bucket.fault = meet
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda offset: read_range(blob, offset, 1), (0, 1)))
    assert ([b"a", b"a"], 2, 1) == (got, len(bucket.paths_of("open")), bucket.open_blobs)
    blob.close()
    assert 0 == bucket.open_blobs


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda objects: objects.pop("chunks/6262"), ": missing object s3://bucket/chunks/6262"),
        (lambda objects: objects.update({"chunks/6262": b"b"}), "has 1 bytes instead of 2"),
    ],
    ids=["missing", "cut short"],
)
def test_an_object_that_is_not_right(corrupt: object, message: str) -> None:
    """It is damage, and the object is named; the others are read."""
    bucket = InMemoryBucket()
    blob = chunked_blob(bucket, [b"aa", b"bb"])
    assert callable(corrupt)
    corrupt(bucket.objects)
    assert b"aa" == read_range(blob, 0, 2)
    with pytest.raises(StorageCorrupt, match=message):
        read_range(blob, 1, 2)
    blob.close()
    assert 0 == bucket.open_blobs


def test_past_its_end() -> None:
    """A read that goes past the end is refused."""
    with pytest.raises(StorageCorrupt, match="ends at byte 4, before byte 5"):
        read_range(chunked_blob(InMemoryBucket(), [b"aa", b"bb"]), 1, 4)


def test_closed_means_closed() -> None:
    """Nothing is read any more, and to close it again is harmless."""
    blob = chunked_blob(InMemoryBucket(), [b"aa"])
    blob.close()
    blob.close()
    with pytest.raises(StorageError, match="is closed"):
        read_range(blob, 0, 1)


def test_what_is_opened_beforehand_is_not_opened_again() -> None:
    """`prepare` opens side by side what is read later."""
    bucket = InMemoryBucket()
    blob = chunked_blob(bucket, [b"aa", b"bb", b"cc"])
    blob.prepare([1, 2], 2)
    opened = bucket.paths_of("open")
    read_range(blob, 2, 4)
    blob.close()
    assert (["chunks/6262", "chunks/6363"], opened) == (sorted(opened), bucket.paths_of("open"))
