"""Connections to web storage: concurrency, TLS, redirects, hedged requests, and closing during reads."""

from __future__ import annotations

import itertools
import random
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from rfork.errors import SettingsError, StorageAccessDenied, StorageError, StorageNotFound
from rfork.net.connect import Cancelled, CancelScope, open_connection
from rfork.net.request import HttpOrigin, HttpRequest
from rfork.net.stream import TlsStream
from rfork.net.tls import verifying_context
from rfork.settings import StorageSettings
from rfork.storage.blob import read_range
from rfork.storage.http.blob import RangedBlob
from rfork.storage.http.hedging import MIN_SAMPLES
from rfork.storage.http.session import HttpSession
from tests.storage_faults import ErrorStatus, Fault, StallFault
from tests.storage_server import StorageServer

DATA = random.Random(7).randbytes(3_000_000)
NAME = "model.bin"
GUARD_S = 20
"""Far less than the timeouts in these tests: a call that ends by then was ended."""


@pytest.fixture
def server() -> Iterator[StorageServer]:
    with StorageServer({NAME: DATA}) as made:
        yield made


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca(authority: trustme.CA, tmp_path: Path) -> Path:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem"


@contextmanager
def tls_server(authority: trustme.CA, token: str | None = None) -> Iterator[StorageServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with StorageServer({NAME: DATA}, tls=context, token=token) as made:
        yield made


@contextmanager
def pooled(server: StorageServer, **settings: object) -> Iterator[tuple[RangedBlob, HttpSession]]:
    chosen = StorageSettings.model_validate({"timeout_s": 60, **settings})
    session = HttpSession(chosen)
    url = server.url(NAME)
    blob = RangedBlob.open(url, lambda: HttpRequest(url), session)
    try:
        yield blob, session
    finally:
        blob.close()
        session.pool.unregister()


def read_all(blob: RangedBlob) -> bytes:
    return read_range(blob, 0, blob.size)


def test_sequential_reads_share_one_connection(server: StorageServer) -> None:
    """A connection whose response was read is used for the next request, also after a refusal."""
    with pooled(server) as (blob, _):
        server.script.then(None, ErrorStatus(503, text=b"busy", chunked=True), ErrorStatus(500, text=b"oh"))
        assert DATA[:10] == read_range(blob, 0, 10)
        assert DATA[5:50] == read_range(blob, 5, 45)
    assert 5 == len(server.requests_matching())
    assert 1 == server.connections


def test_sixteen_threads_share_the_streams_of_the_settings(server: StorageServer) -> None:
    """Concurrent threads get the right bytes over no more connections than the settings allow."""
    with pooled(server, concurrency=4, hedge_ratio=0) as (blob, _), ThreadPoolExecutor(16) as threads:
        begins = [at * 7919 for at in range(200)]
        read = list(threads.map(lambda begin: read_range(blob, begin, 60_000), begins))
    assert [DATA[begin : begin + 60_000] for begin in begins] == read
    assert 201 == len(server.requests_matching())
    assert server.connections <= 4


def test_a_blob_outlives_its_store(server: StorageServer) -> None:
    """A closed session keeps its connections while a blob is still open, and no longer."""
    with pooled(server) as (blob, session):
        session.pool.unregister()
        assert DATA == read_all(blob)
        assert DATA[:5] == read_range(blob, 0, 5)
        assert 1 == server.connections


def test_each_attempt_gets_a_new_signature(server: StorageServer) -> None:
    """A URL that may expire is created for each request."""
    count = itertools.count()
    chosen = StorageSettings()
    session = HttpSession(chosen)
    blob = RangedBlob.open(NAME, lambda: HttpRequest(f"{server.url(NAME)}?n={next(count)}"), session)
    server.script.then(ErrorStatus(503), ErrorStatus(503))
    assert DATA == read_all(blob)
    blob.close()
    session.pool.unregister()
    assert ["n=0", "n=1", "n=2", "n=3"] == [seen.query for seen in server.requests_matching()]


def test_refusals_may_be_explained(server: StorageServer) -> None:
    """A server-specific explanation of a refusal replaces the general meaning of its status."""
    chosen = StorageSettings()
    session = HttpSession(chosen)

    def explain(status: int, text: bytes) -> StorageError | None:
        return StorageNotFound("no such bucket") if b"NoSuchBucket" in text else None

    def opening() -> RangedBlob:
        return RangedBlob.open(NAME, lambda: HttpRequest(server.url(NAME)), session, explain)

    server.script.then(ErrorStatus(403, text=b"<Code>NoSuchBucket</Code>", chunked=True), ErrorStatus(403, text=b"no"))
    with pytest.raises(StorageNotFound, match=r"^no such bucket$"):
        opening()
    with pytest.raises(StorageAccessDenied, match="access denied"):
        opening()
    session.pool.unregister()


@pytest.mark.parametrize(
    "fault",
    [StallFault(after=1000), StallFault(after=None), ErrorStatus(503, {"Retry-After": "30"})],
    ids=str,
)
def test_closing_ends_running_reads(server: StorageServer, fault: Fault) -> None:
    """A read that waits for bytes, a response or its next attempt ends immediately when the blob is closed."""
    with pooled(server) as (blob, _), ThreadPoolExecutor(1) as threads:
        server.script.then(fault)
        reading = threads.submit(read_all, blob)
        if isinstance(fault, StallFault):
            server.script.wait_stalled()
        blob.close()
        with pytest.raises(StorageError, match=f"{NAME} is closed"):
            reading.result(GUARD_S)
        with pytest.raises(StorageError, match=f"{NAME} is closed"):
            read_all(blob)


def test_closing_ends_reads_that_wait_for_a_connection(server: StorageServer) -> None:
    """A read that waits while another one uses the only stream ends immediately too."""
    with pooled(server, concurrency=1) as (first, session), ThreadPoolExecutor(2) as threads:
        second = RangedBlob.open(NAME, lambda: HttpRequest(server.url(NAME)), session)
        server.script.then(StallFault())
        slow_read = threads.submit(read_all, first)
        server.script.wait_stalled()
        waiting = threads.submit(read_all, second)
        second.close()
        with pytest.raises(StorageError, match="is closed"):
            waiting.result(GUARD_S)
        server.script.release()
        assert DATA == slow_read.result(GUARD_S)


def test_a_connection_attempt_can_be_cancelled() -> None:
    """A server that accepts no more connections is not awaited once the scope is cancelled."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        scope = CancelScope()
        origin = HttpOrigin(False, "127.0.0.1", full.getsockname()[1])
        with ThreadPoolExecutor(1) as threads:
            pending = threads.submit(open_connection, origin, None, 60.0, scope)
            scope.abort()
            with pytest.raises((Cancelled, OSError)):
                pending.result(GUARD_S)
        for client in waiting:
            client.close()


def test_a_connection_cancelled_at_its_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reports a socket as connected if it was shut down before."""
    scope = CancelScope()
    connect = socket.socket.connect

    def late(connecting: socket.socket, address: tuple[str, int]) -> None:
        scope.abort()
        connect(connecting, address)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr(socket.socket, "connect", late)
        with pytest.raises(Cancelled):
            open_connection(HttpOrigin(False, "127.0.0.1", listening.getsockname()[1]), None, GUARD_S, scope)


def test_a_failed_tls_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If TLS cannot even start, the server sees the connection end."""

    def broken(connected: ssl.SSLSocket) -> TlsStream:
        raise OSError("not connected any more")

    monkeypatch.setattr("rfork.net.connect.TlsStream", broken)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        origin = HttpOrigin(True, "127.0.0.1", listening.getsockname()[1])
        with pytest.raises(OSError, match="not connected") as raised:
            open_connection(origin, verifying_context(None, "SSL_CERT_FILE"), GUARD_S, CancelScope())
        with listening.accept()[0] as connected:
            connected.settimeout(GUARD_S)
            assert b"" == connected.recv(1)
            assert raised.tb is not None


def warm_up(blob: RangedBlob) -> None:
    """Let the session measure how long requests take."""
    for _ in range(MIN_SAMPLES):
        read_range(blob, 0, 300_000)


def test_a_slow_response_is_requested_again(server: StorageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request for the missing bytes overtakes a stalled response, long before its timeout."""
    with pooled(server) as (blob, session):
        reserve = session.hedges.reserve

        def reserve_when_stalled(missing_bytes: int) -> bool:
            return missing_bytes <= len(DATA) - 1_000_000 and reserve(missing_bytes)

        monkeypatch.setattr(session.hedges, "reserve", reserve_when_stalled)
        warm_up(blob)
        server.script.then(StallFault(after=1_000_000))
        target = bytearray(len(DATA))
        view = memoryview(target)
        blob.read(0, [view[at : at + 70_000] for at in range(0, len(view), 70_000)])
        requested_ranges = [seen.range for seen in server.requests_matching()[-2:]]
        assert DATA == bytes(target)
        assert 1 == session.hedges.started
        assert 0 == session.hedges.inflight_bytes
        assert [f"bytes=0-{len(DATA) - 1}", f"bytes=1000000-{len(DATA) - 1}"] == requested_ranges


def test_a_second_request_that_fails_leaves_the_first_alone(server: StorageServer) -> None:
    """The first continues if the second is refused."""
    with pooled(server) as (blob, session), ThreadPoolExecutor(1) as threads:
        warm_up(blob)
        server.script.then(StallFault(after=1000), ErrorStatus(403))
        reading = threads.submit(read_all, blob)
        server.wait_requests(MIN_SAMPLES + 3)
        server.script.release()
        assert DATA == reading.result(GUARD_S)
        assert 1 == session.hedges.started


def test_nothing_writes_into_views_after_the_read(server: StorageServer) -> None:
    """Whichever of two requests loses, its later bytes do not reach the caller's memory."""
    with pooled(server) as (blob, _), ThreadPoolExecutor(1) as threads:
        warm_up(blob)
        target = bytearray(len(DATA))
        server.script.then(StallFault(after=1000), StallFault(after=10))
        reading = threads.submit(blob.read, 0, [memoryview(target)])
        server.script.wait_stalled()
        server.script.wait_stalled()
        server.script.release()
        reading.result(GUARD_S)
        assert DATA == bytes(target)
        target[:] = bytes(len(DATA))
        for thread in threading.enumerate():
            if thread.name == "rfork-hedge":
                thread.join(GUARD_S)
        server.close()
        assert bytes(len(DATA)) == bytes(target)


def test_tls_is_checked_by_the_authorities_of_the_settings(authority: trustme.CA, ca: Path) -> None:
    """With `ca`, a server with a certificate of this authority is read, into many views."""
    with tls_server(authority) as server, pooled(server, ca=ca) as (blob, _):
        target = bytearray(len(DATA))
        view = memoryview(target)
        blob.read(0, [view[at : at + 50_000] for at in range(0, len(view), 50_000)])
        assert DATA == bytes(target)
        assert 1 == server.connections


def test_a_certificate_that_is_not_trusted_is_final(authority: trustme.CA) -> None:
    """A server without a trusted certificate gets one request, and the error names the setting."""
    with tls_server(authority) as server:
        message = r"the certificate of 127\.0\.0\.1 is not trusted"
        with pytest.raises(StorageError, match=message) as raised, pooled(server):
            pass
        assert 1 == server.connections
        assert "set SSL_CERT_FILE" == " ".join(raised.value.hint.split()[:2])


def test_unreadable_authorities_are_a_settings_error(authority: trustme.CA, tmp_path: Path) -> None:
    """The error names a `ca` that is no file."""
    with (
        tls_server(authority) as server,
        pytest.raises(SettingsError, match="SSL_CERT_FILE: cannot use"),
        pooled(server, ca=tmp_path / "none.pem"),
    ):
        pass
