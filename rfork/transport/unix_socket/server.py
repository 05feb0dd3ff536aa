"""The source side of same-host transports: a Unix socket that readers of this host connect to.

One thread a connection. Who may hold a thread is bounded twice, as in `rfork.transport.http.server`: a
connection starts in the *lobby*, and has a *slot* once the gate admitted a token of it. A full lobby
loses its oldest connection to the newest, so that any number of silent strangers keeps no reader out.

Readers send no descriptors, and the kernel is told to refuse them (Linux 6.16): the last who closes one may
wait for whatever it is, such as a TCP socket that lingers. Before that kernel a stranger can have a thread
wait so, but nobody waits for that thread: it is over with the image by then, or never touched it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from rfork.errors import RforkError, SourceUnavailable
from rfork.logs import logger
from rfork.thread_priority import lower_thread_priority
from rfork.transport.unix_socket.connection import UnixSocketConnection
from rfork.transport.unix_socket.host_identity import (
    boot_id,
    directory_identity,
    network_namespace,
    pid_uid_namespace,
    process_identity,
)
from rfork.transport.unix_socket.listener import PREFIX, SUFFIX, listen, listen_in

log = logger(__name__)

MAX_UNAUTHENTICATED: Final = 128
"""Most connections that have shown no valid token yet."""
MAX_CONNECTIONS: Final = 256
"""Most connections that have."""
MAX_CONNECTIONS_PER_FORK: Final = 64
"""Most of one fork: as many as it may have chunks in flight."""
MAX_PINS_PER_FORK: Final = 4
"""Most connections of one fork that only hold on, beside its slots: one, and those it may just have left."""
ACCEPT_RETRY_S: Final = 0.05
CLOSE_S: Final = 5.0
"""Seconds that a closing server waits for threads that close what strangers sent."""


class LocalServer:
    """Accepts connections from construction until `close`, and has `serve` talk on each, on its own thread.

    `folder` None: a socket without a file, seen within this network namespace; else a file of mode 0600
    there, seen by whoever of this user mounts the folder. `serve` returns when the talk is over, or raises;
    the server closes the connection. `nice`: by how much these threads stand back for the process.
    Raises SettingsError when the folder cannot be used.
    """

    def __init__(
        self,
        name: str,
        folder: Path | None,
        serve: Callable[[UnixSocketConnection], None],
        *,
        nice: int,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._serve = serve
        self._nice = nice
        self._max_connections = max_connections
        self._file: Path | None = None
        # Nobody can wait under this name before. Who is in this network namespace can read it later, in
        # /proc/net/unix, and take it once this process has died: so readers look who listens.
        chosen = f"{PREFIX}{name}-{secrets.token_hex(16)}"
        parameters = {"boot": boot_id(), "numbering": pid_uid_namespace(), "process": process_identity()}
        if folder is None:
            self._listener = listen(f"\0{chosen}")
            parameters |= {"socket": f"@{chosen}", "network": network_namespace()}
        else:
            self._file = folder / f"{chosen}{SUFFIX}"
            self._listener = listen_in(self._file)
            parameters |= {"socket": str(self._file), "folder": directory_identity(folder)}
        self._parameters: Mapping[str, str] = parameters
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._untouched = threading.Condition(self._lock)
        self._touching = 0
        self._unauthenticated: dict[UnixSocketConnection, None] = {}  # oldest first
        self._slots: dict[UnixSocketConnection, str] = {}  # with its fork
        self._pins: dict[UnixSocketConnection, str] = {}  # as well
        self._threads: set[threading.Thread] = set()
        self._acceptor = threading.Thread(target=self._accept, name=f"rfork-{name}-accept", daemon=True)
        self._acceptor.start()

    @property
    def parameters(self) -> Mapping[str, str]:
        """What an endpoint says for `ConnectionPool` to find this server."""
        return self._parameters

    def acquire_slot(self, connection: UnixSocketConnection, fork_id: str) -> bool:
        """Give a connection of the lobby a slot, as one of this fork; whether it has one now."""
        return self._promote(connection, fork_id, self._slots, MAX_CONNECTIONS_PER_FORK)

    def pin(self, connection: UnixSocketConnection, fork_id: str) -> bool:
        """The same for one that only holds on: it takes none of the fork's slots."""
        return self._promote(connection, fork_id, self._pins, MAX_PINS_PER_FORK)

    @contextlib.contextmanager
    def memory_access(self) -> Iterator[None]:
        """What `serve` does with memory that may go once `close` has returned; copies only, no waiting.

        Raises SourceUnavailable once the server closes.
        """
        with self._lock:
            if self._closing.is_set():
                raise SourceUnavailable("the source gives no more")
            self._touching += 1
        try:
            yield
        finally:
            with self._lock:
                self._touching -= 1
                self._untouched.notify_all()

    def close(self) -> None:
        """Stop listening, cut every connection, and return once nothing is `memory_access`. Safe to call twice.

        Threads get `CLOSE_S` to end. One that is left closes what a stranger sent, or waits for a budget: it
        touches nothing any more.
        """
        with self._lock:
            self._closing.set()
            connections = [*self._unauthenticated, *self._slots, *self._pins]
            threads = [self._acceptor, *self._threads]
        if not self._woken.is_set():
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._woken.set()
        for connection in connections:
            connection.abort()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        with self._untouched:
            self._untouched.wait_for(lambda: not self._touching)
        deadline = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := sum(thread.is_alive() for thread in threads):
            log.warning("threads of closed connections have not ended: they touch nothing more", threads=left)

    def _promote(
        self,
        connection: UnixSocketConnection,
        fork_id: str,
        to: dict[UnixSocketConnection, str],
        max_count: int,
    ) -> bool:
        with self._lock:
            if connection in to:
                return True
            if connection not in self._unauthenticated or len(to) >= self._max_connections:
                return False
            if list(to.values()).count(fork_id) >= max_count:
                return False
            del self._unauthenticated[connection]
            to[connection] = fork_id
            return True

    def _accept(self) -> None:
        try:
            self._accept_all()
        finally:
            self._woken.wait()
            self._listener.close()  # here, as it may take long: strangers' messages wait in it

    def _accept_all(self) -> None:
        while not self._closing.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                # Out of descriptors or memory: make room and go on.
                log.warning("cannot accept a connection", because=str(error))
                self._evict_oldest(0)
                self._closing.wait(ACCEPT_RETRY_S)
                continue
            self._evict_oldest(MAX_UNAUTHENTICATED - 1)
            self._start_thread(UnixSocketConnection(connected))

    def _start_thread(self, connection: UnixSocketConnection) -> None:
        """Start a connection's thread; all under the lock, so that `close` sees all of it or nothing."""
        thread = threading.Thread(target=self._run_connection, args=(connection,), name="rfork-local", daemon=True)
        with self._lock:
            if started := not self._closing.is_set():
                try:
                    thread.start()
                except RuntimeError as error:  # no thread to be had
                    log.warning("cannot serve a connection", because=str(error))
                    started = False
                else:
                    self._unauthenticated[connection] = None
                    self._threads.add(thread)
        if not started:
            connection.close()

    def _run_connection(self, connection: UnixSocketConnection) -> None:
        try:
            lower_thread_priority(self._nice)
            self._serve(connection)
        except (RforkError, OSError) as error:
            log.debug("connection ended", because=str(error))
        except Exception:  # a bug that one reader runs into must not end the others' service in silence
            log.exception("connection failed")
        finally:
            connection.close()
            with self._lock:
                self._unauthenticated.pop(connection, None)
                self._slots.pop(connection, None)
                self._pins.pop(connection, None)
                self._threads.discard(threading.current_thread())

    def _evict_oldest(self, max_count: int) -> None:
        """Cut the oldest connections of the lobby until it has at most `max_count`."""
        with self._lock:
            evicted = list(self._unauthenticated)[: max(0, len(self._unauthenticated) - max_count)]
            for connection in evicted:
                del self._unauthenticated[connection]
        for connection in evicted:
            connection.abort()
