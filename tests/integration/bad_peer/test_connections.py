"""Malicious connections: the seed survives, serves other forks, and leaks nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter

import pytest

from rfork.transport.http.server import MAX_CONNECTIONS_PER_FORK
from tests.integration.bad_peer.attacked_seed import (
    FORKED,
    SIZE,
    STALL_S,
    AttackedSeed,
    http_get,
    open_connection,
    receive_all,
)
from tests.integration.bad_peer.garbage_input import CONNECTIONS, GARBAGE, PARTIAL_REQUESTS


@pytest.mark.parametrize("begun", PARTIAL_REQUESTS)
def test_silent_connections(attacked_seed: AttackedSeed, begun: str) -> None:
    """Hundreds of connections to each port that are silent, or start a request and stop, lock no reader out."""
    with attacked_seed.assert_unharmed(), contextlib.ExitStack() as stack:
        for port in attacked_seed.ports:
            for _ in range(CONNECTIONS):
                stack.enter_context(open_connection(port)).sendall(PARTIAL_REQUESTS[begun])
        assert FORKED == attacked_seed.fork()


@pytest.mark.slow  # also: tests/integration/http_transport/test_bad_clients.py
def test_slow_readers_are_cut(attacked_seed: AttackedSeed) -> None:
    """A fork that reads less than a kilobyte a second loses its connections; meanwhile others can read."""
    token = attacked_seed.lease.token
    with attacked_seed.assert_unharmed(), contextlib.ExitStack() as stack:
        slow = {stack.enter_context(open_connection(attacked_seed.http_port, buffer=4096)): 0 for _ in range(16)}
        for connection in slow:
            connection.sendall(http_get(token))
        began, pause = time.monotonic(), threading.Event()
        while time.monotonic() < began + 3 * STALL_S:
            for connection in slow:
                with contextlib.suppress(ConnectionResetError):
                    slow[connection] += len(connection.recv(256))
            pause.wait(0.5)
        assert FORKED == attacked_seed.fork()
        # Connections that were not cut get the remaining bytes now.
        byte_counts = [bytes_received + len(receive_all(connection)) for connection, bytes_received in slow.items()]
        assert [True] * 16 == [0 < bytes_received < SIZE for bytes_received in byte_counts]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage(attacked_seed: AttackedSeed, garbage: str) -> None:
    """A malformed or oversized request on any port only ends its own connection."""
    with attacked_seed.assert_unharmed():
        for port in attacked_seed.ports:
            for _ in range(3):
                with open_connection(port) as connection, contextlib.suppress(OSError):
                    connection.settimeout(1.0)
                    connection.sendall(GARBAGE[garbage])
                    connection.shutdown(socket.SHUT_WR)
                    receive_all(connection)


RANGES = {
    "a giant list": "bytes=" + ",".join(f"{n}-{n}" for n in range(1000)),
    "negative": "bytes=-99999999999999999999999999999999",
    "beyond": f"bytes={10**18}-{10**18 + 5}",
    "backwards": "bytes=5-1",
    "not a number": "bytes=a-b",
    "many digits": "bytes=0-" + "9" * 10_000,
    "nothing": "bytes=-",
}


@pytest.mark.parametrize("range_header", RANGES)
def test_invalid_ranges(attacked_seed: AttackedSeed, range_header: str) -> None:
    """A fork with a valid lease that requests an impossible range is refused, or gets the image itself."""
    with attacked_seed.assert_unharmed(), open_connection(attacked_seed.http_port) as connection:
        connection.sendall(
            http_get(attacked_seed.lease.token, f"Range: {RANGES[range_header]}\r\nConnection: close\r\n")
        )
        response = receive_all(connection)
    status = int(response[9:12])
    body = response.partition(b"\r\n\r\n")[2]
    assert status in (200, 416, 431)
    assert (status == 200) == (len(body) == SIZE)


def test_a_fork_does_not_use_all_connections(attacked_seed: AttackedSeed) -> None:
    """One lease uses at most its share of the image server's connections; the rest stays free for others."""
    token = attacked_seed.lease.token
    with attacked_seed.assert_unharmed(), contextlib.ExitStack() as stack:
        status_counts = Counter(
            first_status(stack.enter_context(open_connection(attacked_seed.http_port)), token) for _ in range(300)
        )
        assert attacked_seed.fork() == FORKED
    assert Counter({b"206": MAX_CONNECTIONS_PER_FORK, b"503": 300 - MAX_CONNECTIONS_PER_FORK}) == status_counts


def first_status(connection: socket.socket, token: str) -> bytes:
    """Request one byte and keep the connection open; return the status."""
    connection.sendall(http_get(token, "Range: bytes=0-0\r\n"))
    return connection.recv(1 << 16)[9:12]
