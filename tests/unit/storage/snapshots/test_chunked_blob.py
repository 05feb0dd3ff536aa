"""A blob made of many objects reads like the plain file."""

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
    """Concatenate pieces; equal ones are one object."""
    for piece in pieces:
        bucket.objects[f"chunks/{piece.hex()}"] = piece
    parts = [(piece.hex(), len(piece)) for piece in pieces]
    return ChunkedBlob("s3://bucket/blob", InMemoryBlobStore(bucket, FOLDER), parts)


@given(st.lists(st.binary(max_size=5), max_size=8), st.data())
def test_each_range_equals_that_of_the_plain_file(pieces: list[bytes], data: st.DataObject) -> None:
    """Parts, ranges and views of all sizes return the bytes of the plain file."""
    bucket = InMemoryBucket()
    blob, content = chunked_blob(bucket, pieces), b"".join(pieces)
    begin = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(begin, len(content)))
    cuts = sorted(data.draw(st.lists(st.integers(0, end - begin), max_size=3)))
    got = bytearray(end - begin)
    blob.read(begin, [memoryview(got)[low:high] for low, high in pairwise([0, *cuts, end - begin])])
    blob.close()
    assert content[begin:end] == bytes(got)
    assert len(content) == blob.size
    assert 0 == bucket.open_blobs


def test_the_number_of_open_objects_is_limited() -> None:
    """The least recently read ones are closed, and opened again when needed."""
    bucket = InMemoryBucket()
    pieces = [index.to_bytes(2, "big") for index in range(MAX_OPEN + 10)]
    blob = chunked_blob(bucket, pieces)
    assert b"".join(pieces) == read_range(blob, 0, blob.size)
    assert MAX_OPEN == bucket.open_blobs
    assert pieces[0] == read_range(blob, 0, 2)
    blob.close()
    assert 0 == bucket.open_blobs
    assert MAX_OPEN + 11 == len(bucket.paths_of("open"))


def test_concurrent_opens_of_one_object_keep_one_handle() -> None:
    """Both readers read it, one handle is kept, and the other is closed immediately."""
    bucket = InMemoryBucket()
    blob, barrier = chunked_blob(bucket, [b"aa"]), threading.Barrier(2)

    def wait_for_the_other(what: str, path: str) -> None:
        if what == "open":
            barrier.wait(10)

    bucket.fault = wait_for_the_other
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda offset: read_range(blob, offset, 1), (0, 1)))
    assert [b"a", b"a"] == got
    assert 2 == len(bucket.paths_of("open"))
    assert 1 == bucket.open_blobs
    blob.close()
    assert 0 == bucket.open_blobs


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda objects: objects.pop("chunks/6262"), ": missing object s3://bucket/chunks/6262"),
        (lambda objects: objects.update({"chunks/6262": b"b"}), "has 1 bytes instead of 2"),
    ],
    ids=["missing", "truncated"],
)
def test_a_damaged_object_is_named(corrupt: object, message: str) -> None:
    """A missing or truncated object is damage and is named; the others can be read."""
    bucket = InMemoryBucket()
    blob = chunked_blob(bucket, [b"aa", b"bb"])
    assert callable(corrupt)
    corrupt(bucket.objects)
    assert b"aa" == read_range(blob, 0, 2)
    with pytest.raises(StorageCorrupt, match=message):
        read_range(blob, 1, 2)
    blob.close()
    assert 0 == bucket.open_blobs


def test_a_read_past_the_end_is_refused() -> None:
    """The error names the end of the blob."""
    with pytest.raises(StorageCorrupt, match="ends at byte 4, before byte 5"):
        read_range(chunked_blob(InMemoryBucket(), [b"aa", b"bb"]), 1, 4)


def test_a_closed_blob_rejects_reads() -> None:
    """Closing it again has no effect."""
    blob = chunked_blob(InMemoryBucket(), [b"aa"])
    blob.close()
    blob.close()
    with pytest.raises(StorageError, match="is closed"):
        read_range(blob, 0, 1)


def test_prepared_objects_are_not_opened_again() -> None:
    """`prepare` opens the objects of later reads concurrently."""
    bucket = InMemoryBucket()
    blob = chunked_blob(bucket, [b"aa", b"bb", b"cc"])
    blob.prepare([1, 2], 2)
    opened = bucket.paths_of("open")
    read_range(blob, 2, 4)
    blob.close()
    assert ["chunks/6262", "chunks/6363"] == sorted(opened)
    assert opened == bucket.paths_of("open")
