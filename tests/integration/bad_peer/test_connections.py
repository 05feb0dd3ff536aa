"""Connections that mean harm: the seed lives, others fork from it, and nothing stays behind."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter

import pytest

from rfork.transport.http.server import MOST_OF_A_FORK
from tests.integration.bad_peer.garbage import BEGUN, GARBAGE, MANY
from tests.integration.bad_peer.scene import FORKED, SIZE, STALL_S, Scene, connected, everything, http_get


@pytest.mark.parametrize("begun", BEGUN)
def test_silent_connections(scene: Scene, begun: str) -> None:
    """Hundreds that connect to each port and say nothing, or begin and stop, keep nobody out."""
    with scene.unharmed(), contextlib.ExitStack() as held:
        for port in scene.ports:
            for _ in range(MANY):
                held.enter_context(connected(port)).sendall(BEGUN[begun])
        assert FORKED == scene.fork()


def test_slow_readers_are_cut(scene: Scene) -> None:
    """A fork that takes less than a kilobyte a second loses its connections; others read meanwhile."""
    token = scene.lease.token
    with scene.unharmed(), contextlib.ExitStack() as held:
        slow = {held.enter_context(connected(scene.http, buffer=4096)): 0 for _ in range(16)}
        for connection in slow:
            connection.sendall(http_get(token))
        began, pause = time.monotonic(), threading.Event()
        while time.monotonic() < began + 3 * STALL_S:
            for connection in slow:
                with contextlib.suppress(ConnectionResetError):
                    slow[connection] += len(connection.recv(256))
            pause.wait(0.5)
        assert FORKED == scene.fork()
        # Whoever was not cut gets all of it now.
        got = [taken + len(everything(connection)) for connection, taken in slow.items()]
        assert [True] * 16 == [0 < taken < SIZE for taken in got]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage(scene: Scene, garbage: str) -> None:
    """What is no request, and what is one too many, on each port, ends with its connection."""
    with scene.unharmed():
        for port in scene.ports:
            for _ in range(3):
                with connected(port) as connection, contextlib.suppress(OSError):
                    connection.settimeout(1.0)
                    connection.sendall(GARBAGE[garbage])
                    connection.shutdown(socket.SHUT_WR)
                    everything(connection)


RANGES = {
    "a giant list": "bytes=" + ",".join(f"{n}-{n}" for n in range(1000)),
    "negative": "bytes=-99999999999999999999999999999999",
    "beyond": f"bytes={10**18}-{10**18 + 5}",
    "backwards": "bytes=5-1",
    "not a number": "bytes=a-b",
    "many digits": "bytes=0-" + "9" * 10_000,
    "nothing": "bytes=-",
}


@pytest.mark.parametrize("asked", RANGES)
def test_ranges_of_no_sense(scene: Scene, asked: str) -> None:
    """A fork with a good lease asks for ranges that cannot be: it is refused, or gets the image itself."""
    with scene.unharmed(), connected(scene.http) as connection:
        connection.sendall(http_get(scene.lease.token, f"Range: {RANGES[asked]}\r\nConnection: close\r\n"))
        answer = everything(connection)
    status = int(answer[9:12])
    body = answer.partition(b"\r\n\r\n")[2]
    assert status in (200, 416, 431)
    assert (status == 200) == (len(body) > SIZE)


def test_a_fork_does_not_take_all_connections(scene: Scene) -> None:
    """One lease has no more than its share of the image server's places; the others are for others."""
    token = scene.lease.token
    with scene.unharmed(), contextlib.ExitStack() as held:
        said = Counter(first_status(held.enter_context(connected(scene.http)), token) for _ in range(300))
        assert scene.fork() == FORKED
    assert Counter({b"206": MOST_OF_A_FORK, b"503": 300 - MOST_OF_A_FORK}) == said


def first_status(connection: socket.socket, token: str) -> bytes:
    """Ask for one byte and stay; the status."""
    connection.sendall(http_get(token, "Range: bytes=0-0\r\n"))
    return connection.recv(1 << 16)[9:12]
