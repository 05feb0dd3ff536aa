"""Clients that send garbage, stop reading, or use all connections."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from rfork.errors import SourceBusy
from rfork.net import stream
from rfork.settings import InstanceSettings
from rfork.transport.http import HttpTransport
from rfork.transport.http.responses import ImageResource
from rfork.transport.http.server import MAX_UNAUTHENTICATED, HttpExporter
from tests.integration.http_transport.pairs import (
    AUTHORIZATION,
    LARGE,
    SIZES,
    connection_threads,
    open_connection,
    pair,
    request,
)
from tests.transport_contract import TOKEN, FakeGate, content, image_of, soon

STALL_S = 3.0
"""Idle timeout for readers that must be admitted before they stop: the machine may be busy."""


def received_from(connection: socket.socket) -> bytes:
    """Return all bytes received until the other side closes the connection."""
    received = bytearray()
    try:
        while data := connection.recv(1 << 20):
            received += data
    except ConnectionResetError:
        pass
    return bytes(received)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x00\xff" + os.urandom(200), b"400"),
        (b"\x00" * 5000, b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * 5000, b"431"),
        (b"GET /v1/image HTTP/2.0\r\nHost: a\r\n\r\n", b"505"),
        (request(**{"Content-Length": "5"}) + b"hello", b"400"),
        (request(**{"Transfer-Encoding": "chunked"}), b"400"),
    ],
)
def test_garbage_is_answered_and_closed(sent: bytes, status: bytes) -> None:
    """A malformed request gets its status and ends the connection; the next reader is served."""
    with pair() as made:
        with open_connection(made.exporter.endpoint()) as connection:
            connection.sendall(sent)
            assert b"HTTP/1.1 " + status == received_from(connection)[:12]
        made.connect().read(0, 1000, soon())
        assert content(made.source, 0, 1000) == content(made.target, 0, 1000)


@pytest.mark.parametrize("sent", [b"", b"GET /v1/im", request(**AUTHORIZATION)[:-2]])
def test_an_incomplete_request_is_cut(sent: bytes) -> None:
    """A connection that is silent or sends half a head is closed without a response after
    `source_idle_timeout_s`.
    """
    with pair(source_idle_timeout_s=0.2) as made, open_connection(made.exporter.endpoint()) as connection:
        connection.sendall(sent)
        assert b"" == received_from(connection)


def test_a_client_that_does_not_read_is_cut() -> None:
    """A reader that receives no byte for `source_idle_timeout_s` loses its connection, and its thread ends."""
    with (
        pair(sizes=LARGE, source_idle_timeout_s=STALL_S) as made,
        open_connection(made.exporter.endpoint()) as connection,
    ):
        connection.sendall(request(**AUTHORIZATION))
        assert b"HTTP/1.1 200 OK" == connection.recv(15)
        for thread in connection_threads():
            if thread.name == "rfork-http":
                thread.join(30)
        assert ["rfork-http-accept"] == [thread.name for thread in connection_threads()]
        assert len(received_from(connection)) < sum(LARGE)


@pytest.mark.slow  # also: the test above
def test_a_stalled_reader_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An admitted reader that stalls is logged; an unauthenticated client is not."""
    caplog.set_level(logging.INFO, logger="rfork.transport.http.server")
    for sent, stall_s in ((b"GET", 0.2), (request(**AUTHORIZATION), STALL_S)):
        with (
            pair(sizes=LARGE, source_idle_timeout_s=stall_s) as made,
            open_connection(made.exporter.endpoint()) as reader,
        ):
            reader.sendall(sent)
            reader.recv(15)
            for thread in connection_threads():
                if thread.name == "rfork-http":
                    thread.join(30)
    messages = [record.getMessage().partition(" reason=")[0] for record in caplog.records]
    assert ["connection timed out"] == messages


def test_sending_continues_after_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """No system call lasts longer than SEND_TIMEOUT_S; what one cannot send, the next one does."""
    full, sendmsg = threading.Semaphore(0), socket.socket.sendmsg

    def recording_sendmsg(connected: socket.socket, views: Sequence[memoryview]) -> int:
        try:
            return sendmsg(connected, views)
        except BlockingIOError:
            full.release()
            raise

    monkeypatch.setattr(stream, "SEND_TIMEOUT_S", 0.01)
    monkeypatch.setattr(socket.socket, "sendmsg", recording_sendmsg)
    sent = bytes(range(256)) * (LARGE[0] // 256)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        sending = stream.PlainStream(listener.accept()[0])

    def send() -> None:
        sending.send([sent], 30)
        sending.close()

    thread = threading.Thread(target=send)
    thread.start()
    for _ in range(3):
        full.acquire(timeout=30)
    received = received_from(here)
    thread.join()
    here.close()
    assert sent == received


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_silent_connections_lock_no_reader_out(secure: bool, request: pytest.FixtureRequest) -> None:
    """With 300 silent connections open, a valid reader gets the complete image."""
    if secure:
        request.getfixturevalue("authority")
    with pair() as made, ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(open_connection(made.exporter.endpoint()))
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        deadline = soon()
        # Threads of closed connections may still be ending.
        while len(connection_threads()) > MAX_UNAUTHENTICATED + 2 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert len(connection_threads()) <= MAX_UNAUTHENTICATED + 2


def test_readers_beyond_the_connection_limit_get_busy() -> None:
    """One connection above the limit gets 503, which a reader raises as SourceBusy."""
    source = image_of(SIZES, seed=1)
    file = ImageResource(source, bytes, FakeGate())
    exporter = HttpExporter(
        file, bind="127.0.0.1", ports=[0], advertise="127.0.0.1", tls=None, idle_timeout_s=10, max_connections=1
    )
    transport = HttpTransport(InstanceSettings())
    first = transport.connect(exporter.endpoint(), image_of(SIZES), lambda: TOKEN, soon())
    first.read(0, 10, soon())
    second = transport.connect(exporter.endpoint(), image_of(SIZES), lambda: TOKEN, soon())
    with pytest.raises(SourceBusy):
        second.read(0, 10, soon())
    first.read(10, 20, soon())
    first.close()
    second.close()
    exporter.close()
