"""Google's and Azure's storage through obstore, whose store in memory stands for theirs."""

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
from rfork.storage.blob import BlobEntry, read_range
from rfork.storage.location import Location
from rfork.storage.object_store import store as cloud
from rfork.storage.object_store.errors import is_retryable, to_storage_error
from rfork.storage.object_store.store import CloudStore
from rfork.storage.object_store.upload import part_size

MIB = 1 << 20
SETTINGS = StorageSettings(staging_bytes=16 * MIB)  # parts of 5 MiB


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CloudStore:
    """A store of gs://models/llama/, in memory."""
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
def test_what_is_written_is_read(store: CloudStore, size: int) -> None:
    """Blobs of any size come back whole, by one request or in parts, whatever becomes of the memory."""
    memory = bytearray(b"abc" * (size // 3) + b"abc"[: size % 3])
    data = bytes(memory)
    with store.write("blob") as writer:
        writer.write([memoryview(memory)])
        memory[:] = bytes(size)
    assert (data, [BlobEntry("blob", size)]) == (_get(store, "blob"), list(store.list()))


@pytest.mark.parametrize(("memory", "expected"), [(16 * MIB, 5 * MIB), (128 * MIB, 16 * MIB)])
def test_no_part_is_smaller_than_google_takes(memory: int, expected: int) -> None:
    """However little memory there may be: an upload of smaller parts is refused once all are there."""
    assert expected == part_size(StorageSettings(staging_bytes=memory))


def test_reads_of_a_range(store: CloudStore) -> None:
    """A read fills its views from its offset on; beyond the end there is nothing."""
    _put(store, "blob", b"0123456789")
    first, second = bytearray(3), bytearray(2)
    with closing(store.open("blob")) as blob:
        blob.read(4, [memoryview(first), memoryview(second)])
        with pytest.raises(StorageError, match=r"blob has 10 bytes, not \[9, 11\)"):
            read_range(blob, 9, 2)
    assert (b"456", b"78") == (bytes(first), bytes(second))
    with pytest.raises(StorageError, match="blob is closed"):
        read_range(blob, 0, 1)


def test_names_are_of_the_folder(store: CloudStore) -> None:
    """A list holds what is below the folder, by any prefix, in the order of names."""
    for name in ("b", "a/2", "a/1", "ab"):
        _put(store, name, name.encode())
    assert ["a/1", "a/2", "ab", "b"] == [entry.name for entry in store.list()]
    assert ["a/1", "a/2", "ab"] == [entry.name for entry in store.list("a")]
    store.remove("a/1")
    store.remove("a/1")
    assert ["a/2"] == [entry.name for entry in store.list("a/")]


@pytest.mark.parametrize("size", [3, 6 * MIB])
def test_what_is_there_stays(store: CloudStore, size: int) -> None:
    """Without `replace` the first writer's bytes stay, silently; with it the last one's do."""
    _put(store, "blob", b"a" * size, replace=False)
    _put(store, "blob", b"b" * (size + 1), replace=False)
    kept = _get(store, "blob")
    _put(store, "blob", b"b" * (size + 1))
    assert (b"a" * size, b"b" * (size + 1)) == (kept, _get(store, "blob"))


@pytest.mark.parametrize("size", [3, 9 * MIB])
def test_an_exception_leaves_nothing(store: CloudStore, size: int) -> None:
    """Leaving the block with an exception makes no blob, and the exception is the caller's own."""

    def interrupted() -> None:
        with store.write("blob") as writer:
            writer.write([memoryview(bytes(size))])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [] == list(store.list())


def test_a_blob_that_is_replaced(store: CloudStore) -> None:
    """A blob that another was put in the place of is not read on."""
    _put(store, "blob", b"abc")
    with closing(store.open("blob")) as blob:
        _put(store, "blob", b"xyz")
        with pytest.raises(StorageChanged, match="gs://models/llama/blob was replaced during the read"):
            read_range(blob, 0, 3)


def test_a_name_that_is_not_there(store: CloudStore) -> None:
    """To open it is an error of one line."""
    with pytest.raises(StorageNotFound, match=r"^gs://models/llama/nothing: no such object$"):
        store.open("nothing")


def test_a_removal_that_breaks_off(store: CloudStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails below obstore is an error of storage too."""

    def delete(*args: object) -> None:
        raise OSError("the connection broke")

    monkeypatch.setattr("rfork.storage.object_store.store.obstore.delete", delete)
    with pytest.raises(StorageError, match=r"^gs://models/llama/blob: the connection broke$"):
        store.remove("blob")


class Panic(BaseException):
    """As obstore's panics are: no Exception."""


def test_a_panic_of_obstores_is_no_commit(store: CloudStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload whose thread ends in whatever way before it is made is an error, and makes nothing."""

    def put(*args: object, **named: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr("rfork.storage.object_store.upload.obstore.put", put)
    with pytest.raises(StorageError, match=r"^gs://models/llama/blob: index out of bounds$"):
        _put(store, "blob", bytes(9 * MIB))
    assert [] == list(store.list())


def test_reads_are_asked_for_again_here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of reads makes one request for each, in the time that its bytes may take at most."""
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
    """No request is for more than its time is made for."""
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
def test_obstores_errors(error: Exception, expected_type: type[RforkError], line: str, again: bool) -> None:
    """Each is the error that it means, in one line without signatures, and is met again or not."""
    found = to_storage_error("u", error)
    assert (expected_type, line, again) == (type(found), str(found), is_retryable(error))
