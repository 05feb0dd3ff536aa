"""A hostile server on loopback, for tests of deadlines and bounds."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

ResponseWriter = Callable[[socket.socket, threading.Event], None]
"""Responds to one request on a connection; the event is set when the server ends."""

TRICKLE_S = 0.1
BOMB_BYTES = 256 << 20


def silent(connection: socket.socket, ended: threading.Event) -> None:
    """Send nothing."""
    ended.wait()


def trickling_head(connection: socket.socket, ended: threading.Event) -> None:
    """Send the response's head one byte at a time, without end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Pad: ")
    while not ended.wait(TRICKLE_S):
        connection.sendall(b"x")


def trickling_body(connection: socket.socket, ended: threading.Event) -> None:
    """Send the response's body one byte at a time, without end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not ended.wait(TRICKLE_S):
        connection.sendall(b" ")


def trickling_chunk(connection: socket.socket, ended: threading.Event) -> None:
    """Send the head of a chunk one byte at a time, so that no part of the body ever arrives."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;")
    while not ended.wait(TRICKLE_S):
        connection.sendall(b"x")


def endless_body(connection: socket.socket, ended: threading.Event) -> None:
    """Send a body as fast as it is read, without end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    while not ended.is_set():
        connection.sendall(piece)


def gzip_bomb(connection: socket.socket, ended: threading.Event) -> None:
    """Send a small body that expands to 256 MiB."""
    body = gzip.compress(bytes(BOMB_BYTES), 1)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


HOSTILE: tuple[ResponseWriter, ...] = (
    silent, trickling_head, trickling_body, trickling_chunk, endless_body, gzip_bomb,
)  # fmt: skip


@contextmanager
def hostile_server(write_response: ResponseWriter) -> Iterator[str]:
    """Serve with `write_response` inside the block; yield the server's URL."""
    ended = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def handle(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while connection.recv(1 << 16) and not ended.is_set():
                write_response(connection, ended)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def unaccepting_address() -> Iterator[tuple[str, int]]:
    """Return an address whose packets are dropped: its accept queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting: list[socket.socket] = []
        for _ in range(4):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(listener.getsockname())
            waiting.append(connection)
        try:
            host, port = listener.getsockname()
            yield str(host), int(port)
        finally:
            for connection in waiting:
                connection.close()
