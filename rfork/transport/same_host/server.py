"""Source side of same-host transports: a Unix socket for readers of this host.

One thread per connection. Connections are bounded twice, as in `rfork.transport.http.server`: a new one is
*unauthenticated*, and gets a *slot* once the gate has authorized a token. If there are too many
unauthenticated connections, the oldest is closed, so that idle clients cannot keep readers out.

Readers send no descriptors, and the kernel is configured to reject them (Linux 6.16), because closing the
last copy of one may block, for example on a TCP socket that lingers. On older kernels a client can block a
thread like that, but no other thread waits for it, and it does not access the image.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from rfork.errors import (
    LeaseRejected,
    RforkError,
    SettingsError,
    SourceBusy,
    SourceUnavailable,
    SourceWeightsChanged,
)
from rfork.logs import logger
from rfork.thread_priority import lower_thread_priority
from rfork.transport.same_host.connection import Message, UnixSocketConnection, close_all, encode_error
from rfork.transport.same_host.host_identity import (
    boot_id,
    directory_identity,
    network_namespace,
    pid_uid_namespace,
    process_identity,
    socket_path,
)

BACKLOG: Final = 1024
PREFIX: Final = "rfork-"
SUFFIX: Final = ".socket"
_SO_PASSRIGHTS: Final = 83
MAX_UNAUTHENTICATED: Final = 128
"""Maximum number of connections without a valid token."""
MAX_CONNECTIONS: Final = 256
"""Maximum number of connections with a valid token."""
MAX_CONNECTIONS_PER_FORK: Final = 64
"""Maximum number per fork: equal to the maximum number of chunks in flight."""
MAX_PINS_PER_FORK: Final = 4
"""Maximum number of connections per fork that only pin memory, in addition to its slots: one plus recently
closed ones.
"""
IDLE_TIMEOUT_S: Final = 60.0
"""Maximum idle time in seconds of an authorized connection between two requests."""
ACCEPT_RETRY_S: Final = 0.05
CLOSE_TIMEOUT_S: Final = 5.0
"""Maximum wait of a closing server for threads blocked on closing clients' descriptors."""

log = logger(__name__)


def _serve_nothing(connection: UnixSocketConnection) -> None:
    """Serve a connection that was accepted just before its server was closed."""


class LocalServer:
    """Accepts connections from construction until `close`, and calls `serve` for each on a separate thread.

    `folder` None: an abstract socket, visible within this network namespace; otherwise a file of mode 0600 in
    that directory, visible to processes of this user that mount it. `serve` returns or raises when it has
    finished, and the server closes the connection. `nice` lowers the priority of these threads. Raises
    SettingsError if the directory cannot be used.
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
        # The name cannot be guessed. A process in this network namespace can read it from /proc/net/unix and
        # reuse it after this process has died, so readers check the listening process.
        socket_name = f"{PREFIX}{name}-{secrets.token_hex(16)}"
        parameters = {"boot": boot_id(), "namespaces": pid_uid_namespace(), "process": process_identity()}
        if folder is None:
            self._listener = _listen(f"\0{socket_name}")
            parameters |= {"socket": f"@{socket_name}", "network": network_namespace()}
        else:
            self._file = folder / f"{socket_name}{SUFFIX}"
            self._listener = _listen_in(self._file)
            parameters |= {"socket": str(self._file), "folder": directory_identity(folder)}
        self._parameters: Mapping[str, str] = parameters
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener_shut_down = threading.Event()
        self._idle = threading.Condition(self._lock)
        self._active_accesses = 0
        self._unauthenticated: dict[UnixSocketConnection, None] = {}  # oldest first
        self._slots: dict[UnixSocketConnection, str] = {}  # value: the fork
        self._pins: dict[UnixSocketConnection, str] = {}  # value: the fork
        self._threads: set[threading.Thread] = set()
        self._acceptor = threading.Thread(target=self._accept, name=f"rfork-{name}-accept", daemon=True)
        self._acceptor.start()

    @property
    def parameters(self) -> Mapping[str, str]:
        """Endpoint parameters with which `ConnectionPool` finds this server."""
        return self._parameters

    def acquire_slot(self, connection: UnixSocketConnection, fork_id: str) -> bool:
        """Assign one of the slots of this fork to an unauthenticated connection; return True if it has one now."""
        return self._promote(connection, fork_id, self._slots, MAX_CONNECTIONS_PER_FORK)

    def pin(self, connection: UnixSocketConnection, fork_id: str) -> bool:
        """Register a connection that only pins memory; like `acquire_slot`, but uses none of the fork's
        slots.
        """
        return self._promote(connection, fork_id, self._pins, MAX_PINS_PER_FORK)

    def serve_requests(
        self, connection: UnixSocketConnection, respond: Callable[[Message], bool], reply_timeout_s: float
    ) -> None:
        """Pass each request of a connection to `respond`, until it returns False or the connection closes.

        Errors of the gate that it raises are sent to the reader. `reply_timeout_s`: maximum time in which the
        reader accepts a reply, and in which a connection without a slot sends its next request.
        """
        while True:
            with self._lock:
                timeout_s = reply_timeout_s if connection in self._unauthenticated else IDLE_TIMEOUT_S
            request, descriptors = connection.receive(time.monotonic() + timeout_s)
            close_all(descriptors)
            try:
                if not respond(request):
                    return
            except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
                connection.send(encode_error(error), deadline=time.monotonic() + reply_timeout_s)

    @contextlib.contextmanager
    def memory_access(self) -> Iterator[None]:
        """Context for access to memory that may be freed after `close`; only for copies, without waiting.

        Raises SourceUnavailable once the server closes.
        """
        with self._lock:
            if self._closing.is_set():
                raise SourceUnavailable("the source stopped serving")
            self._active_accesses += 1
        try:
            yield
        finally:
            with self._lock:
                self._active_accesses -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Stop listening, close every connection, and return when no `memory_access` is active. Idempotent.

        Threads get `CLOSE_TIMEOUT_S` to end. A remaining thread is closing a client's descriptors or waits for the
        budget; it no longer accesses the image.
        """
        with self._lock:
            self._closing.set()
            connections = [*self._unauthenticated, *self._slots, *self._pins]
            threads = [self._acceptor, *self._threads]
        if not self._listener_shut_down.is_set():
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._listener_shut_down.set()
        for connection in connections:
            connection.abort()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        with self._idle:
            self._idle.wait_for(lambda: not self._active_accesses)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if running := sum(thread.is_alive() for thread in threads):
            log.warning("threads of closed connections still running; they no longer access the image", threads=running)
        self._serve = _serve_nothing  # its owner refers to this object, and to the image

    def _promote(
        self,
        connection: UnixSocketConnection,
        fork_id: str,
        registered: dict[UnixSocketConnection, str],
        max_count: int,
    ) -> bool:
        with self._lock:
            if connection in registered:
                return True
            if connection not in self._unauthenticated or len(registered) >= self._max_connections:
                return False
            if list(registered.values()).count(fork_id) >= max_count:
                return False
            del self._unauthenticated[connection]
            registered[connection] = fork_id
            return True

    def _accept(self) -> None:
        try:
            self._accept_all()
        finally:
            self._listener_shut_down.wait()
            self._listener.close()  # on this thread, because closing may block on pending messages of clients

    def _accept_all(self) -> None:
        while not self._closing.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                # Out of descriptors or memory: close idle connections and continue.
                log.warning("cannot accept a connection", reason=str(error))
                self._evict_oldest(0)
                self._closing.wait(ACCEPT_RETRY_S)
                continue
            self._evict_oldest(MAX_UNAUTHENTICATED - 1)
            self._start_thread(UnixSocketConnection(connected))

    def _start_thread(self, connection: UnixSocketConnection) -> None:
        """Start a connection's thread; under the lock, so that `close` sees it completely or not at all."""
        thread = threading.Thread(target=self._run_connection, args=(connection,), name="rfork-local", daemon=True)
        with self._lock:
            if started := not self._closing.is_set():
                try:
                    thread.start()
                except RuntimeError as error:  # the thread could not be started
                    log.warning("cannot serve a connection", reason=str(error))
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
            log.debug("connection closed", reason=str(error))
        except Exception:  # an unexpected error of one connection must be logged and must not stop the server
            log.exception("connection failed")
        finally:
            connection.close()
            with self._lock:
                self._unauthenticated.pop(connection, None)
                self._slots.pop(connection, None)
                self._pins.pop(connection, None)
                self._threads.discard(threading.current_thread())

    def _evict_oldest(self, max_count: int) -> None:
        """Close the oldest unauthenticated connections until at most `max_count` are left."""
        with self._lock:
            evicted = list(self._unauthenticated)[: max(0, len(self._unauthenticated) - max_count)]
            for connection in evicted:
                del self._unauthenticated[connection]
        for connection in evicted:
            connection.abort()


def _listen(address: str) -> socket.socket:
    """Listen on an abstract name. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
        _reject_fds(listener)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _reject_fds(listener: socket.socket) -> None:
    """Reject descriptors on this socket and on accepted ones; the sender gets EPERM."""
    with contextlib.suppress(OSError):  # not supported before Linux 6.16
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


def _listen_in(file: Path) -> socket.socket:
    """Listen on a file. It gets its final name once connections are accepted, so an unreachable file is
    stale.

    Raises SettingsError if the directory cannot be used.
    """
    temporary = file.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _remove_stale(file.parent)
        with socket_path(temporary) as path:
            listener.bind(path)
        os.chmod(temporary, 0o600)
        _reject_fds(listener)
        listener.listen(BACKLOG)
        os.rename(temporary, file)
    except OSError as error:
        listener.close()
        temporary.unlink(missing_ok=True)
        message = f"cannot create a socket in {file.parent}: {error.strerror}"
        raise SettingsError(f"RFORK_UNIX_SOCKET_DIR: {message}") from None
    return listener


def _remove_stale(folder: Path) -> None:
    """Remove sockets of dead processes."""
    for file in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            if not stat.S_ISSOCK(file.lstat().st_mode):
                continue
            probe.setblocking(False)
            try:
                with socket_path(file) as path:
                    probe.connect(path)
            except ConnectionRefusedError:
                file.unlink(missing_ok=True)
