"""Servers that respond wrongly, drop connections, or were replaced."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from rfork.errors import (
    LeaseRejected,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
)
from rfork.settings import InstanceSettings
from rfork.transport.base import Endpoint
from rfork.transport.http import HttpTransport
from tests.integration.http_transport.pairs import SIZES, url_of
from tests.transport_contract import TransportPair, content, image_of, soon


@contextmanager
def server(*responses: bytes | None) -> Iterator[Endpoint]:
    """Server that sends each connection the next response once a request arrived, then closes it; None: stays
    silent.
    """
    with ExitStack() as open_sockets, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            for response in responses:
                try:
                    connection = open_sockets.enter_context(listener.accept()[0])
                except OSError:
                    return
                # The target may have closed the connection at the first bytes.
                with suppress(OSError):
                    connection.recv(4096)
                    if response is not None:
                        connection.sendall(response)
                        connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Endpoint("http", {"url": f"http://127.0.0.1:{port}/file"})
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def partial(first: int, last: int, body: bytes, *fields: str) -> bytes:
    length = f"Content-Length: {last - first + 1}"
    lines = ["HTTP/1.1 206 Partial Content", f"Content-Range: bytes {first}-{last}/*", length, *fields]
    return "\r\n".join([*lines, "", ""]).encode() + body


CUT = partial(0, 999, b"x" * 10)


@pytest.mark.parametrize(
    ("responses", "error"),
    [
        ((CUT, partial(10, 999, b"y" * 20)), SourceUnavailable),
        ((b"", b""), SourceUnavailable),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000,), SourceCorrupt),
        ((partial(1, 1000, b"x" * 1000),), SourceCorrupt),
        ((partial(0, 998, b"x" * 999),), SourceCorrupt),
        ((partial(0, 999, b"x" * 1001),), SourceCorrupt),
        ((partial(0, 999, b"x" * 1000, "Content-Encoding: gzip"),), SourceCorrupt),
        ((partial(0, 999, b"x" * 1000, "Transfer-Encoding: chunked"),), SourceCorrupt),
        ((b"SSH-2.0-OpenSSH_9.2\r\n",), SourceCorrupt),
        ((b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",), SourceCorrupt),
        ((b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\n\r\n",), SourceCorrupt),
        ((b"HTTP/1.1 401 Unauthorized\r\n\r\n",), LeaseRejected),
        ((b"HTTP/1.1 409 Conflict\r\n\r\n",), SourceBusy),
        ((b"HTTP/1.1 410 Gone\r\n\r\n",), SourceWeightsChanged),
        ((b"HTTP/1.1 412 Precondition Failed\r\n\r\n",), SourceWeightsChanged),
        ((b"HTTP/1.1 429 Too Many Requests\r\n\r\n",), SourceBusy),
        ((b"HTTP/1.1 500 Internal Server Error\r\n\r\n",), SourceUnavailable),
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n",), SourceBusy),
        ((None,), SourceTimeout),
    ],
)
def test_a_bad_response_has_its_error(responses: tuple[bytes | None, ...], error: type[RforkError]) -> None:
    """Each wrong response is blamed on the right party."""
    target = image_of((1000,))
    with server(*responses) as endpoint:
        settings = InstanceSettings(source_idle_timeout_s=0.3) if None in responses else InstanceSettings()
        reader = HttpTransport(settings).connect(endpoint, target, lambda: "", soon())
        with pytest.raises(error):
            reader.read(0, 1000, soon())
        reader.close()


def test_a_read_continues_after_a_dropped_connection() -> None:
    """A body that is cut once is continued from the byte it reached."""
    target = image_of((1000,))
    with server(CUT, partial(10, 999, b"y" * 990)) as endpoint:
        reader = HttpTransport(InstanceSettings()).connect(endpoint, target, lambda: "", soon())
        reader.read(0, 1000, soon())
        reader.close()
    assert b"x" * 10 + b"y" * 990 == content(target)


def test_a_replaced_connection_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the source, the reason, and the number of missing bytes."""
    caplog.set_level(logging.INFO, logger="rfork.transport.http.client")
    with server(CUT, partial(10, 999, b"y" * 990)) as endpoint:
        reader = HttpTransport(InstanceSettings()).connect(endpoint, image_of((1000,)), lambda: "", soon())
        reader.read(0, 1000, soon())
        reader.close()
        location = urlsplit(url_of(endpoint)).netloc
    messages = [record.getMessage().rpartition(" seconds=")[0] for record in caplog.records]
    because = "connection closed with 990 bytes missing"
    assert [f"connection replaced source={location} reason={because} missing=990"] == messages


def test_a_file_that_changes_between_reads_is_noticed() -> None:
    """If the endpoint has no etag, all responses must have the etag of the first."""
    first = partial(0, 499, b"x" * 500, 'ETag: "a"')
    second = partial(500, 999, b"y" * 500, 'ETag: "b"')
    with server(first, second, second) as endpoint:
        reader = HttpTransport(InstanceSettings()).connect(endpoint, image_of((1000,)), lambda: "", soon())
        reader.read(0, 500, soon())
        with pytest.raises(SourceWeightsChanged):
            reader.read(500, 1000, soon())
        reader.close()


def test_a_reason_is_passed_on() -> None:
    """The error contains the server's own line of text."""
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nContent-Length: 11\r\n\r\nnot for you"
    with server(refusal) as endpoint:
        reader = HttpTransport(InstanceSettings()).connect(endpoint, image_of((1000,)), lambda: "", soon())
        with pytest.raises(LeaseRejected, match="not for you"):
            reader.read(0, 1000, soon())
        reader.close()


def test_a_refused_connection_is_source_unavailable(free_port: int) -> None:
    """Connecting raises SourceUnavailable immediately."""
    endpoint = Endpoint("http", {"url": f"http://127.0.0.1:{free_port}/v1/image"})
    with pytest.raises(SourceUnavailable):
        HttpTransport(InstanceSettings()).connect(endpoint, image_of((10,)), lambda: "", soon())


def test_a_source_that_reuses_the_port_is_different(free_port: int) -> None:
    """For readers of the previous source, a source that restarted on its port raises SourceWeightsChanged."""
    transport = HttpTransport(InstanceSettings(http_port=free_port))
    before = TransportPair.create(transport, SIZES)
    reader = before.connect()
    reader.read(0, 10, soon())
    before.exporter.close()
    after = TransportPair.create(transport, SIZES)
    with pytest.raises(SourceWeightsChanged):
        reader.read(10, 20, soon())
    before.close()
    after.close()
