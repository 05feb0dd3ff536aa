"""Web servers that die, trickle or drop connections, and readers that fork, over real sockets."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from rfork.errors import StorageError
from rfork.net.connect import CancelScope
from rfork.net.request import HttpRequest
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob, read_range
from rfork.storage.http.blob import RangedBlob
from rfork.storage.http.session import HttpSession
from rfork.storage.http.store import HttpStore
from rfork.storage.location import Location
from rfork.storage.registry import open_blob
from tests.storage_faults import ErrorStatus, StallFault
from tests.storage_server import StorageServer

DATA = random.Random(9).randbytes(400_000)
NAME = "model.bin"
GUARD_S = 60


@contextmanager
def blob_of(url: str, **settings: object) -> Iterator[Blob]:
    chosen = StorageSettings.model_validate({"timeout_s": 0.5, "max_attempts": 3, "hedge_ratio": 0, **settings})
    with open_blob(Location.parse(url), chosen) as blob:
        yield blob


class TricklingServer:
    """A server of one connection at a time: sends `begin` immediately, and then `rest` byte by byte."""

    def __init__(self, begin: bytes, rest: bytes) -> None:
        self._requested: list[str] = []
        self._request_received = threading.Condition()
        self._begin = begin
        self._rest = rest
        self._ended = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}/{NAME}"

    def requested_ranges(self, count: int) -> list[str]:
        """Return the requested ranges once there are this many: closed connections are handled after the
        current one.
        """
        with self._request_received:
            self._request_received.wait_for(lambda: len(self._requested) >= count, GUARD_S)
            return list(self._requested)

    def close(self) -> None:
        self._ended.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                connected = self._listening.accept()[0]
            except OSError:
                return
            with connected:
                self._respond(connected)

    def _respond(self, connected: socket.socket) -> None:
        try:
            head = connected.recv(4096).decode()
            with self._request_received:
                self._requested += [line for line in head.split("\r\n") if line.startswith("Range")]
                self._request_received.notify_all()
            connected.sendall(self._begin)
            for byte in self._rest:
                if self._ended.wait(0.1):
                    return
                connected.sendall(bytes([byte]))
        except OSError:
            return  # the reader has disconnected


HEAD = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-999/1000\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "rest"),
    [
        (b"", HEAD),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 1000\r\n\r\n", b"x" * 1000),
        (HEAD, b"x" * 1000),
    ],
    ids=["head", "text", "body"],
)
def test_a_server_that_trickles_is_given_up(begin: bytes, rest: bytes) -> None:
    """A byte now and then is no response: each attempt has a time limit, and after the last the read fails."""
    with closing(TricklingServer(begin, rest)) as server, ThreadPoolExecutor(1) as threads:
        settings = StorageSettings(timeout_s=0.5, max_attempts=2)

        def read() -> None:
            location = Location.parse(server.url)
            with closing(HttpStore(location.parent, settings)) as store:
                store.open(NAME, front=1000).close()

        with pytest.raises(StorageError, match="failed to read the first byte in 2 attempts: "):
            threads.submit(read).result(GUARD_S)
        assert ["Range: bytes=0-999"] * 2 == server.requested_ranges(2)


def test_dropped_connections_cost_one_timeout() -> None:
    """If one kept connection is silent, the others kept with it are not tried in turn."""
    settings = StorageSettings(timeout_s=0.5, max_attempts=3, hedge_ratio=0)
    session = HttpSession(settings)
    with StorageServer({NAME: DATA}) as server:
        request = HttpRequest(server.url(NAME))
        made = [session.pool.acquire(request.origin, CancelScope(), 1.0, fresh=True, extra=True) for _ in range(3)]
        for connection in made:
            session.pool.release(connection, usable=True)
        with closing(RangedBlob.open(NAME, lambda: request, session)) as blob:
            server.script.then(StallFault(after=None))
            assert DATA == read_range(blob, 0, len(DATA))
        session.pool.unregister()
        assert 4 == server.connections
        assert 3 == len(server.requests_matching())


def test_a_server_that_restarts_is_awaited() -> None:
    """More refusals than attempts are survived within the time of the settings."""
    with StorageServer({NAME: DATA}) as server, blob_of(server.url(NAME), timeout_s=30) as blob:
        server.script.then(*[ErrorStatus(503)] * 5)
        assert DATA == read_range(blob, 0, len(DATA))
        assert 7 == len(server.requests_matching())


def test_a_forked_process_opens_new_connections() -> None:
    """After a process fork, concurrent reads of both processes return the requested bytes."""
    with StorageServer({NAME: DATA}) as server, blob_of(server.url(NAME), timeout_s=10) as blob:
        wrong = []
        for at in range(0, 200_000, 10_000):
            assert DATA[:1000] == read_range(blob, 0, 1000)  # a connection is kept
            child = os.fork()
            if child == 0:
                # No code of the test's own may run here.
                try:
                    os._exit(0 if read_range(blob, at, 200_000) == DATA[at : at + 200_000] else 1)
                finally:
                    os._exit(2)
            try:
                received = read_range(blob, at + 1, 190_000)
            finally:
                status = os.waitpid(child, 0)[1]
            if (status, received) != (0, DATA[at + 1 : at + 190_001]):
                wrong.append(at)
        assert [] == wrong
        assert 21 == server.connections


def test_closing_in_a_child_process_does_not_affect_the_parent() -> None:
    """A child that closes its inherited blob ends no running read of its parent."""
    with StorageServer({NAME: DATA}) as server, blob_of(server.url(NAME), timeout_s=30) as blob:
        server.script.then(StallFault(after=1000))
        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(read_range, blob, 0, len(DATA))
            server.script.wait_stalled()
            child = os.fork()
            if child == 0:
                try:
                    blob.close()
                    os._exit(0)
                finally:
                    os._exit(2)
            assert 0 == os.waitpid(child, 0)[1]
            server.script.release()
            assert DATA == reading.result(GUARD_S)
            assert 2 == len(server.requests_matching())
