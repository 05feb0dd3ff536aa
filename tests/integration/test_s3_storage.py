"""The S3 store on a real SeaweedFS."""

from __future__ import annotations

from contextlib import closing

import pytest

from benchmarks.seaweed import SeaweedServer
from rfork.errors import StorageChanged, StorageError, StorageNotFound
from rfork.storage.blob import BlobEntry, read_range
from rfork.storage.location import Location
from rfork.storage.registry import open_blob
from tests.s3_stores import (
    MIB,
    SEVERAL_PARTS,
    OpenStore,
    StoreOperation,
    each_operation,
    get,
    open_named_blob,
    pending_uploads,
    put,
    random_bytes,
    storage_error_of,
)


@pytest.mark.parametrize("size", [0, 1, 8 * MIB, 20 * MIB])
def test_written_blobs_are_read(s3_store: OpenStore, size: int) -> None:
    """Blobs of any size are read completely, in one request or in parts."""
    store, data = s3_store(), random_bytes(size)
    put(store, "blob", data)
    assert data == get(store, "blob")
    assert [BlobEntry("blob", size)] == list(store.list())


def test_ranges_are_read(s3_store: OpenStore) -> None:
    """A read returns the bytes from its offset, in several views."""
    store, data = s3_store(), random_bytes(MIB)
    put(store, "blob", data)
    first, second = bytearray(1000), bytearray(1)
    with closing(store.open("blob")) as blob:
        blob.read(5000, [memoryview(first), memoryview(second)])
        assert data[5000:6000] == bytes(first)
        assert data[6000:6001] == bytes(second)
        assert MIB == blob.size
        with pytest.raises(StorageError, match=r"has 1048576 bytes: there are no bytes \[1048576, 1048577\)"):
            blob.read(MIB, [memoryview(second)])


def test_a_hundred_blobs_are_listed(s3_store: OpenStore) -> None:
    """In the order of their names, by prefix too; removed blobs are not listed."""
    store = s3_store()
    names = sorted([f"a/{number:02}" for number in range(60)] + [f"b.{number:02}" for number in range(40)])
    for name in reversed(names):
        put(store, name, name.encode())
    assert [BlobEntry(name, len(name)) for name in names] == list(store.list())
    assert names[10:20] == [entry.name for entry in store.list("a/1")]
    for name in names[:60]:
        store.remove(name)
    store.remove("a/00")
    assert names[60:] == [entry.name for entry in store.list()]


def test_a_prefix_matches_a_complete_directory_name(s3_store: OpenStore) -> None:
    """Blobs of a directory whose name starts with the same letters are not listed."""
    put(s3_store("s3://spare/model"), "x", b"1")
    put(s3_store("s3://spare/model-2"), "y", b"22")
    assert [BlobEntry("x", 1)] == list(s3_store("s3://spare/model").list())
    assert [BlobEntry("model-2/y", 2), BlobEntry("model/x", 1)] == list(s3_store("s3://spare/").list("model"))


@pytest.mark.parametrize("name", ["a b", "ü/日本", "a+b", "a?b=c", "a#b", "a%20b", "a&b;c", "~a'(b)*!"])
def test_names_with_special_characters(s3_store: OpenStore, name: str) -> None:
    """A key is the literal name, including characters with a meaning in URLs."""
    store = s3_store()
    put(store, name, name.encode())
    put(store, f"{name}-in-parts", bytes(SEVERAL_PARTS))
    assert name.encode() == get(store, name)
    assert [BlobEntry(name, len(name.encode())), BlobEntry(f"{name}-in-parts", SEVERAL_PARTS)] == list(store.list())
    store.remove(name)
    assert [f"{name}-in-parts"] == [entry.name for entry in store.list()]


def test_one_object_by_its_uri(s3: SeaweedServer, s3_store: OpenStore) -> None:
    """A URI can name an object with any key."""
    put(s3_store("s3://models/by uri/"), "a?b", b"abc")
    with open_blob(Location.parse("s3://models/by uri/a?b"), s3.settings()) as blob:
        assert b"bc" == read_range(blob, 1, 2)
        assert "s3://models/by uri/a?b" == blob.uri


@pytest.mark.parametrize("size", [5, SEVERAL_PARTS])
def test_an_existing_blob_is_kept(s3: SeaweedServer, s3_store: OpenStore, size: int) -> None:
    """Without `replace` the first writer's bytes remain, silently, and no parts of the second."""
    store = s3_store()
    put(store, "blob", b"a" * size, replace=False)
    put(store, "blob", b"b" * (size + 1), replace=False)
    assert b"a" * size == get(store, "blob")
    assert [] == pending_uploads(s3)
    put(store, "blob", b"b" * (size + 1))
    assert b"b" * (size + 1) == get(store, "blob")


def test_the_first_of_two_concurrent_writers_wins(s3: SeaweedServer, s3_store: OpenStore) -> None:
    """Of two multipart writers of one name, without `replace`, the first one to finish wins."""
    store = s3_store()
    with store.write("blob", replace=False) as first:
        first.write([memoryview(b"a" * SEVERAL_PARTS)])
        put(store, "blob", b"b" * 10 * MIB, replace=False)
    assert b"b" * 10 * MIB == get(store, "blob")
    assert [] == pending_uploads(s3)


@pytest.mark.parametrize("size", [5, 20 * MIB])
def test_an_exception_aborts_the_write(s3: SeaweedServer, s3_store: OpenStore, size: int) -> None:
    """Leaving the block with an exception leaves neither object nor parts."""
    store = s3_store()

    def interrupted() -> None:
        with store.write("blob") as writer:
            writer.write([memoryview(bytes(size))])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [] == list(store.list())
    assert [] == pending_uploads(s3)


@pytest.mark.parametrize("size", [1, 20 * MIB])
def test_a_replaced_blob_is_not_read_further(s3_store: OpenStore, size: int) -> None:
    """Reading a blob that was replaced or removed fails."""
    store = s3_store()
    put(store, "blob", b"a" * size)
    with closing(store.open("blob")) as blob:
        read_range(blob, 0, 1)
        put(store, "blob", b"b" * size)
        with pytest.raises(StorageChanged, match="blob was replaced during the read"):
            read_range(blob, 0, size)
        store.remove("blob")
        with pytest.raises(StorageNotFound, match="no such object"):
            read_range(blob, 0, size)


@each_operation
def test_a_missing_bucket_is_named(s3_store: OpenStore, use: StoreOperation) -> None:
    """Every operation reports that the bucket does not exist."""
    assert (StorageNotFound, "no such bucket") == storage_error_of(lambda: use(s3_store("s3://no-such-bucket/")))


def test_a_missing_key(s3_store: OpenStore) -> None:
    """Opening it fails; removing it does nothing."""
    assert (StorageNotFound, "no such object") == storage_error_of(lambda: open_named_blob(s3_store()))
    s3_store().remove("nothing")


@each_operation
def test_an_endpoint_without_a_listener(s3_store: OpenStore, free_port: int, use: StoreOperation) -> None:
    """Every operation fails after its attempts, with a line that names the endpoint."""
    unused_endpoint = f"http://127.0.0.1:{free_port}"
    error, line = storage_error_of(lambda: use(s3_store(s3_endpoint=unused_endpoint, timeout_s=1.0)))
    assert StorageError == error
    assert "127.0.0.1" in line
