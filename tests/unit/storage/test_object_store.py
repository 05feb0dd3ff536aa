"""Google's and Azure's storage through obstore, simulated by its store in memory."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

import pytest

pytest.importorskip("obstore", reason="NO obstore: gs:// AND az:// ARE NOT TESTED")

from obstore import exceptions as raised
from obstore.store import MemoryStore

from rfork.errors import (
    RforkError,
    SettingsError,
    StorageAccessDenied,
    StorageChanged,
    StorageError,
    StorageFull,
    StorageNotFound,
)
from rfork.settings import StorageSettings
from rfork.storage import object_store as cloud
from rfork.storage.blob import BlobEntry, read_range
from rfork.storage.location import Location
from rfork.storage.object_store import CloudStore, is_retryable, part_size, to_storage_error

MIB = 1 << 20
SETTINGS = StorageSettings(staging_bytes=16 * MIB)  # parts of 5 MiB


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CloudStore:
    """Return a store of gs://models/llama/ in memory."""
    memory = MemoryStore()
    monkeypatch.setattr(cloud, "_connect", lambda folder, settings, *, retries: memory)
    return CloudStore(Location.parse("gs://models/llama"), SETTINGS)


def _put(store: CloudStore, name: str, *pieces: bytes, replace: bool = True) -> None:
    with store.write(name, replace=replace) as writer:
        for piece in pieces:
            writer.write([memoryview(piece)])


def _get(store: CloudStore, name: str) -> bytes:
    with closing(store.open(name)) as blob:
        return read_range(blob, 0, blob.size)


@pytest.mark.parametrize("size", [0, 1, 5 * MIB, 5 * MIB + 1, 13 * MIB])
def test_a_written_blob_can_be_read(store: CloudStore, size: int) -> None:
    """Blobs of any size, in one request or in parts, are complete even if the caller reuses the memory."""
    memory = bytearray(b"abc" * (size // 3) + b"abc"[: size % 3])
    data = bytes(memory)
    with store.write("blob") as writer:
        writer.write([memoryview(memory)])
        memory[:] = bytes(size)
    assert data == _get(store, "blob")
    assert [BlobEntry("blob", size)] == list(store.list())


@pytest.mark.parametrize(("memory", "expected"), [(16 * MIB, 5 * MIB), (128 * MIB, 16 * MIB)])
def test_parts_have_the_minimum_size(memory: int, expected: int) -> None:
    """However little memory there is, parts are not smaller: the service would refuse the complete upload."""
    assert expected == part_size(StorageSettings(staging_bytes=memory))


def test_a_read_of_a_range_fills_its_views(store: CloudStore) -> None:
    """A read fills its views from its offset; a range past the end is an error."""
    _put(store, "blob", b"0123456789")
    first, second = bytearray(3), bytearray(2)
    with closing(store.open("blob")) as blob:
        blob.read(4, [memoryview(first), memoryview(second)])
        with pytest.raises(StorageError, match=r"blob has 10 bytes: there are no bytes \[9, 11\)"):
            read_range(blob, 9, 2)
    assert b"456" == bytes(first)
    assert b"78" == bytes(second)
    with pytest.raises(StorageError, match="blob is closed"):
        read_range(blob, 0, 1)


def test_a_listing_is_limited_to_the_folder(store: CloudStore) -> None:
    """A listing has the names below the folder with a prefix, in order."""
    for name in ("b", "a/2", "a/1", "ab"):
        _put(store, name, name.encode())
    assert ["a/1", "a/2", "ab", "b"] == [entry.name for entry in store.list()]
    assert ["a/1", "a/2", "ab"] == [entry.name for entry in store.list("a")]
    store.remove("a/1")
    store.remove("a/1")
    assert ["a/2"] == [entry.name for entry in store.list("a/")]


@pytest.mark.parametrize("size", [3, 6 * MIB])
def test_an_existing_blob_stays_without_replace(store: CloudStore, size: int) -> None:
    """Without `replace` the first writer's bytes stay, silently; with it the last one's do."""
    _put(store, "blob", b"a" * size, replace=False)
    _put(store, "blob", b"b" * (size + 1), replace=False)
    kept = _get(store, "blob")
    _put(store, "blob", b"b" * (size + 1))
    assert b"a" * size == kept
    assert b"b" * (size + 1) == _get(store, "blob")


@pytest.mark.parametrize("size", [3, 9 * MIB])
def test_an_exception_leaves_nothing(store: CloudStore, size: int) -> None:
    """Leaving the block with an exception creates no blob and raises that exception."""

    def interrupted() -> None:
        with store.write("blob") as writer:
            writer.write([memoryview(bytes(size))])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [] == list(store.list())


def test_a_replaced_blob_is_detected(store: CloudStore) -> None:
    """A blob that was replaced is not read further."""
    _put(store, "blob", b"abc")
    with closing(store.open("blob")) as blob:
        _put(store, "blob", b"xyz")
        with pytest.raises(StorageChanged, match="gs://models/llama/blob was replaced during the read"):
            read_range(blob, 0, 3)


def test_a_missing_blob_is_a_one_line_error(store: CloudStore) -> None:
    """Opening a missing blob raises an error of one line."""
    with pytest.raises(StorageNotFound, match=r"^gs://models/llama/nothing: no such object$"):
        store.open("nothing")


def test_a_failed_removal_is_a_storage_error(store: CloudStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure below obstore is a storage error too."""

    def delete(*args: object) -> None:
        raise OSError("the connection broke")

    monkeypatch.setattr("rfork.storage.object_store.obstore.delete", delete)
    with pytest.raises(StorageError, match=r"^gs://models/llama/blob: the connection broke$"):
        store.remove("blob")


class Panic(BaseException):
    """Simulates a panic of obstore, which is no Exception."""


def test_a_panic_of_obstore_commits_nothing(store: CloudStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload whose thread ends unexpectedly raises an error and creates nothing."""

    def put(*args: object, **named: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr("rfork.storage.object_store.obstore.put", put)
    with pytest.raises(StorageError, match=r"^gs://models/llama/blob: index out of bounds$"):
        _put(store, "blob", bytes(9 * MIB))
    assert [] == list(store.list())


def test_only_rfork_retries_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore's client for reads makes one request for each, limited by the maximum time of its bytes."""
    made: list[tuple[int, float]] = []

    def from_url(url: str, client_options: dict[str, timedelta], retry_config: dict[str, int]) -> MemoryStore:
        made.append((retry_config["max_retries"], client_options["timeout"].total_seconds()))
        return memory

    memory = MemoryStore()
    monkeypatch.setattr(cloud, "from_url", from_url)
    store = CloudStore(
        Location.parse("gs://models"), StorageSettings(staging_bytes=1 << 30, timeout_s=7, max_attempts=4)
    )
    _put(store, "blob", b"abc")
    with closing(store.open("blob")) as blob:
        assert b"abc" == read_range(blob, 0, 3)
    assert [(3, 7 + 128 * 4.0), (0, 7 + 128 * 4.0)] == made


def test_a_large_read_is_several_requests(store: CloudStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is larger than its time limit allows."""
    monkeypatch.setattr(cloud, "REQUEST_BYTES", 4)
    _put(store, "blob", b"0123456789")
    with closing(store.open("blob")) as blob:
        assert b"123456789" == read_range(blob, 1, 9)


URL = "https://account.blob.core.windows.net/models/a?sv=1&sig=secret"


@pytest.mark.parametrize(
    ("error", "expected_type", "line", "again"),
    [
        (FileNotFoundError("a"), StorageNotFound, "u: no such object", False),
        (
            FileNotFoundError("404: <Error><Code>ContainerNotFound</Code></Error>"),
            StorageNotFound,
            "u: no such bucket",
            False,
        ),
        (raised.PreconditionError("x"), StorageChanged, "u was replaced during the read", False),
        (
            raised.PermissionDeniedError(f"GET {URL}: 403\n\nDebug source:\nmore"),
            StorageAccessDenied,
            "u: access denied: GET https://account.blob.core.windows.net/models/a 403",
            False,
        ),
        (
            raised.GenericError(f"GET {URL} - Server returned non-2xx status code: 503 Busy"),
            StorageError,
            "u: GET https://account.blob.core.windows.net/models/a - Server returned non-2xx status code: 503 Busy",
            True,
        ),
        (
            raised.GenericError("Server returned non-2xx status code: 429"),
            StorageError,
            "u: Server returned non-2xx status code: 429",
            True,
        ),
        (
            raised.GenericError("Server returned non-2xx status code: 507"),
            StorageFull,
            "u: no space left: Server returned non-2xx status code: 507",
            True,
        ),
        (
            raised.GenericError("GET http://169.254.169.254/metadata: no route"),
            StorageAccessDenied,
            "u: no usable credentials found: GET http://169.254.169.254/metadata: no route",
            True,
        ),
        (ValueError("no account"), SettingsError, "u cannot be used: no account", False),
    ],
)
def test_errors_of_obstore_are_mapped_to_rfork_errors(
    error: Exception, expected_type: type[RforkError], line: str, again: bool
) -> None:
    """Each is mapped to its rfork error, in one line without signatures, and is retried or not."""
    found = to_storage_error("u", error)
    assert expected_type is type(found)
    assert line == str(found)
    assert again == is_retryable(error)
