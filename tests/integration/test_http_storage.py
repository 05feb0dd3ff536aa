"""Files on web servers, over real sockets: reads, retries, and errors."""

from __future__ import annotations

import random
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Literal

import pytest
import trustme

from rfork.errors import (
    SettingsError,
    StorageAccessDenied,
    StorageChanged,
    StorageError,
    StorageNotFound,
)
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob, read_range
from rfork.storage.http.store import HttpStore
from rfork.storage.location import Location
from rfork.storage.registry import open_blob
from tests.fault_proxy import FaultProxy
from tests.storage_faults import (
    ErrorStatus,
    Fault,
    FullObject,
    HeaderFields,
    ReplaceObject,
    ResetFault,
    StallFault,
    TruncateFault,
)
from tests.storage_server import StorageServer

DATA = random.Random(5).randbytes(3_000_000)
OTHER = random.Random(6).randbytes(3_000_000)
NAME = "model.bin"


@pytest.fixture
def server() -> Iterator[StorageServer]:
    with StorageServer({NAME: DATA, "folder with blank/é.bin": OTHER, "empty.bin": b""}) as made:
        yield made


@contextmanager
def blob_of(server: StorageServer, name: str = NAME, **settings: object) -> Iterator[Blob]:
    chosen = StorageSettings.model_validate({"max_attempts": 3, "timeout_s": 30, **settings})
    with open_blob(Location.parse(server.url(name)), chosen) as blob:
        yield blob


def read_all(blob: Blob) -> bytes:
    return read_range(blob, 0, blob.size)


def ranges(server: StorageServer) -> list[str]:
    """Ranges requested since the blob was opened."""
    return [seen.range for seen in server.requests_matching()[1:]]


def test_a_file_is_read_completely(server: StorageServer) -> None:
    """Size, tag and bytes are the server's; the first byte is requested, then all of them."""
    with blob_of(server) as blob:
        stored = server.get_object(NAME)
        assert stored is not None
        assert len(DATA) == blob.size
        assert stored.etag == blob.version
        assert server.url(NAME) == blob.uri
        assert DATA == read_all(blob)
    assert ["bytes=0-0", f"bytes=0-{len(DATA) - 1}"] == [seen.range for seen in server.requests_matching()]


def test_every_read_is_conditional_on_the_tag(server: StorageServer) -> None:
    """Each range is requested under If-Match with the tag that the file had when it was opened."""
    with blob_of(server) as blob:
        read_range(blob, 5, 10)
        assert [blob.version] == [seen.fields.get("if-match") for seen in server.requests_matching()[1:]]


def test_many_small_views_are_one_request(server: StorageServer) -> None:
    """One response fills views of any size in order, more than one system call can receive into."""
    target = bytearray(len(DATA))
    view = memoryview(target)
    sizes = [1, 0, 7, 4096, 999]
    views, at = [], 0
    for index in range(2500):
        views.append(view[at : at + sizes[index % 5]])
        at += sizes[index % 5]
    with blob_of(server) as blob:
        blob.read(100, views)
    assert DATA[100 : 100 + at] == bytes(target[:at])
    assert [f"bytes=100-{99 + at}"] == ranges(server)


def test_the_prefetched_start_needs_no_request(server: StorageServer) -> None:
    """Bytes that arrived with opening are read without a request, and only the missing ones are requested."""
    store = HttpStore(Location.parse(server.url()), StorageSettings())
    with closing(store), closing(store.open(NAME, front=1000)) as blob:
        assert DATA[10:1000] == read_range(blob, 10, 990)
        assert DATA[900:1100] == read_range(blob, 900, 200)
    assert ["bytes=0-999", "bytes=1000-1099"] == [seen.range for seen in server.requests_matching()]


def test_a_small_file_is_prefetched_completely(server: StorageServer) -> None:
    """A file no longer than the prefetched start arrives completely with opening."""
    server.put("small.json", b"{}")
    store = HttpStore(Location.parse(server.url()), StorageSettings())
    with closing(store), closing(store.open("small.json", front=1000)) as blob:
        assert b"{}" == read_all(blob)
        assert 2 == blob.size
        assert 1 == len(server.requests_matching())


def test_names_are_quoted_and_the_query_is_passed_on(server: StorageServer) -> None:
    """A name with spaces and non-ASCII letters is found; a presigned URL's query reaches the server."""
    location = Location.parse(server.url("folder with blank/é.bin?signature=secret&x=1"))
    with open_blob(location, StorageSettings()) as blob:
        assert OTHER == read_all(blob)
        assert "secret" not in blob.uri
    assert {"signature=secret&x=1"} == {seen.query for seen in server.requests_matching("é.bin")}


def test_an_empty_file_has_no_bytes(server: StorageServer) -> None:
    """An empty file is opened by the server's 416, and reading nothing from it sends no request."""
    with blob_of(server, "empty.bin") as blob:
        blob.read(0, [])
        assert 0 == blob.size
        assert b"" == read_all(blob)
        assert 1 == len(server.requests_matching())


def test_reading_past_the_end_sends_no_request(server: StorageServer) -> None:
    """A range outside the file is refused by the client."""
    with blob_of(server) as blob:
        with pytest.raises(StorageError, match=r"has 3000000 bytes: there are no bytes \[2999999, 3000001\)"):
            read_range(blob, len(DATA) - 1, 2)
        assert [] == ranges(server)


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([ResetFault(after=None)], [0, 0]),
        ([TruncateFault(after=None)], [0, 0]),
        ([TruncateFault(after=700_000)], [0, 700_000]),
        ([ErrorStatus(503), ErrorStatus(500, text=b"oh", chunked=True)], [0, 0, 0]),
        ([ErrorStatus(429, {"Retry-After": "0"}), TruncateFault(after=1_500_000)], [0, 0, 1_500_000]),
        # An attempt that transfers a megabyte is not fruitless: four failures, where three fruitless ones end
        # the read.
        ([TruncateFault(1), TruncateFault(1_500_000), TruncateFault(1), None], [0, 1, 1_500_001, 1_500_002]),
    ],
    ids=str,
)
def test_transient_faults_are_retried(server: StorageServer, faults: list[Fault | None], expected: list[int]) -> None:
    """After each failure the rest is requested from the byte where it stopped, and all bytes are right."""
    with blob_of(server) as blob:
        server.script.then(*faults)
        assert DATA == read_all(blob)
    last = len(DATA) - 1
    # Idle kept connections may end before a response: they are replaced immediately.
    assert [f"bytes={begin}-{last}" for begin in expected] == ranges(server)


def test_a_reset_in_mid_body_continues_from_the_received_bytes(server: StorageServer) -> None:
    """A reset may lose bytes in flight; bytes that arrived before are not requested again."""
    with blob_of(server) as blob:
        server.script.then(ResetFault(after=900_000))
        assert DATA == read_all(blob)
    begins = [int(range_header.removeprefix("bytes=").partition("-")[0]) for range_header in ranges(server)]
    assert 0 == begins[0]
    assert 2 == len(begins)
    assert 0 <= begins[1] <= 900_000


def test_a_silent_server_is_retried(server: StorageServer) -> None:
    """A response that stalls is given up after the timeout, and the rest is requested."""
    with blob_of(server, timeout_s=0.5) as blob:
        server.script.then(StallFault(after=100_000), StallFault(after=None))
        assert DATA == read_all(blob)
    last = len(DATA) - 1
    assert [f"bytes={begin}-{last}" for begin in (0, 100_000, 100_000)] == ranges(server)


LONG_AGO = "Thu, 01 Jan 1970 00:00:00 GMT"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (ErrorStatus(503), "the server responded 503 Service Unavailable"),
        (TruncateFault(after=0), "connection failed: connection closed with 3000000 bytes missing"),
        (StallFault(after=0), "the server sent nothing for 0.5 s"),
        (ResetFault(after=None), "connection failed: Connection reset by peer"),
        (TruncateFault(after=None), "connection failed: connection closed before a response"),
        (ErrorStatus(408, {"Retry-After": LONG_AGO}), "the server responded 408 Request Timeout"),
    ],
    ids=str,
)
@pytest.mark.slow  # logic: tests/unit/storage/http/test_retries_and_timeouts.py
def test_retries_are_bounded(server: StorageServer, fault: Fault, cause: str) -> None:
    """After the attempts and the time of the settings a read fails; the error has the number of attempts and
    the cause.
    """
    with blob_of(server, timeout_s=0.5) as blob:
        server.script.always(fault)
        with pytest.raises(StorageError) as raised:
            read_all(blob)
    # One more if the first used a kept connection that ended before the response.
    extra = 1 if isinstance(fault, ResetFault | TruncateFault) and fault.after is None else 0
    made = len(ranges(server)) - extra
    message = f"{server.url(NAME)}: failed to read bytes [0, 3000000) in {made} attempts: {cause}"
    assert type(raised.value) is StorageError
    assert message == str(raised.value)
    assert 3 <= made <= 8


@pytest.mark.parametrize(
    ("status", "error_type", "message"),
    [
        (401, StorageAccessDenied, "access denied (401 Unauthorized)"),
        (403, StorageAccessDenied, "access denied (403 Forbidden)"),
        (404, StorageNotFound, "file not found (404 Not Found)"),
        (400, StorageError, "the server responded 400 Bad Request"),
    ],
)
def test_refusals_are_final(server: StorageServer, status: int, error_type: type[StorageError], message: str) -> None:
    """Other refusals fail immediately, on opening and on reading, with one request each."""
    server.script.then(ErrorStatus(status))
    with pytest.raises(StorageError) as raised, blob_of(server, f"{NAME}?signature=secret"):
        pass
    assert type(raised.value) is error_type
    assert f"{server.url(NAME)}: {message}" == str(raised.value)
    assert 1 == len(server.requests_matching())
    with blob_of(server) as blob:
        server.script.then(ErrorStatus(status, text=b"no", chunked=True))
        with pytest.raises(StorageError) as raised:
            read_all(blob)
    assert type(raised.value) is error_type
    assert f"{server.url(NAME)}: {message}" == str(raised.value)
    assert 3 == len(server.requests_matching())


@pytest.mark.parametrize("between", [True, False], ids=["between reads", "in mid-read"])
@pytest.mark.parametrize("tags", ["strong", "weak", "none"])
@pytest.mark.parametrize("honours_preconditions", [True, False])
def test_a_replaced_file_is_noticed(
    tags: Literal["strong", "weak", "none"], honours_preconditions: bool, between: bool
) -> None:
    """By tag or date, whether or not the server honours conditions: the read fails immediately."""
    with (
        StorageServer({NAME: DATA}, tags=tags, honours_preconditions=honours_preconditions) as server,
        blob_of(server) as blob,
    ):
        if between:
            server.put(NAME, OTHER)
        else:
            server.script.then(ReplaceObject(OTHER, after=1000))
        with pytest.raises(StorageChanged, match=r"model\.bin was replaced during the read"):
            read_all(blob)
        assert (1 if between else 2) == len(ranges(server))


def test_another_tag_in_a_response_is_another_file(server: StorageServer) -> None:
    """If a response has another tag than the file had, the read fails without a retry."""
    with blob_of(server) as blob:
        server.script.then(HeaderFields({"ETag": '"other"'}))
        with pytest.raises(StorageChanged, match=r'its tag is "other" instead of "[0-9a-f]{32}"'):
            read_all(blob)
        assert 1 == len(ranges(server))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (FullObject(), "the server does not support range requests: it would send the complete file"),
        (HeaderFields({"Content-Range": None}), "the server sent a malformed Content-Range ''"),
        (
            HeaderFields({"Content-Range": "bytes 1-3000000/3000000"}),
            "the server sent bytes [1, 3000001) instead of [0, 3000000)",
        ),
        (HeaderFields({"Content-Length": "12"}), "the server does not declare a body of 3000000 bytes"),
        (HeaderFields({"Content-Encoding": "gzip"}), "the server encodes the body as gzip"),
    ],
    ids=str,
)
def test_a_wrong_range_is_refused(server: StorageServer, fault: Fault, message: str) -> None:
    """A response with other bytes than requested fails the read immediately, with a one-line error."""
    with blob_of(server) as blob:
        server.script.then(fault)
        with pytest.raises(StorageError) as raised:
            read_all(blob)
    assert type(raised.value) is StorageError
    assert f"{server.url(NAME)}: {message}" == str(raised.value)
    assert 1 == len(ranges(server))


def test_a_server_without_ranges_is_refused_when_the_file_is_opened(server: StorageServer) -> None:
    """A 200 to the first request means that the server does not support ranges."""
    server.script.then(FullObject())
    with pytest.raises(StorageError, match="does not support range requests"), blob_of(server):
        pass


def test_a_server_without_http_is_retried_and_given_up(server: StorageServer) -> None:
    """A TLS port read as plain HTTP is a one-line error after the attempts."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with StorageServer({NAME: DATA}, tls=context) as secure:
        plain = secure.url(NAME).replace("https:", "http:")
        with (
            pytest.raises(StorageError, match=r"failed to read the first byte in \d+ attempts: "),
            open_blob(Location.parse(plain), StorageSettings(max_attempts=2, timeout_s=0.5)),
        ):
            pass


def test_an_unreachable_server_is_given_up(free_port: int) -> None:
    """If no server listens, a one-line error reports it after the attempts."""
    location = Location.parse(f"http://127.0.0.1:{free_port}/{NAME}?signature=secret")
    settings = StorageSettings(max_attempts=2, timeout_s=0.5)
    cause = r"cannot connect to 127\.0\.0\.1: Connection refused"
    expected = rf"^{location.uri}: failed to read the first byte in \d+ attempts: {cause}$"
    with pytest.raises(StorageError, match=expected), open_blob(location, settings):
        pass


def test_a_web_server_is_only_read() -> None:
    """Listing, writing and removing are refused without a request."""
    store = HttpStore(Location.parse("https://models.example/llama/"), StorageSettings())
    with pytest.raises(SettingsError, match=r"https://models\.example/llama/ cannot be listed"):
        store.list()
    with pytest.raises(SettingsError, match="read-only"):
        store.write(NAME)
    with pytest.raises(SettingsError, match="read-only"):
        store.remove(NAME)


@pytest.mark.parametrize(
    ("fault", "requests"),
    [
        (ErrorStatus(503), 2),
        (TruncateFault(after=1000), 2),
        (ResetFault(after=None), 2),
        (StallFault(after=1000), 2),
    ],
    ids=str,
)
def test_faults_of_a_proxy_are_survived(server: StorageServer, fault: Fault, requests: int) -> None:
    """Faults of a proxy are retried through it, and the bytes are right."""
    with FaultProxy(server.port) as proxy:
        location = Location.parse(f"{proxy.url}/{NAME}")
        with open_blob(location, StorageSettings(timeout_s=4.0 if isinstance(fault, StallFault) else 30.0)) as blob:
            proxy.script.then(fault, path=f"GET /{NAME}")
            assert DATA == read_all(blob)
        assert requests + 1 == len(proxy.requests_matching(f"GET /{NAME}"))
