"""Target side of same-host transports: pool of connections to a source's Unix socket."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from rfork.errors import NotSameHost, SourceCorrupt, SourceTimeout, SourceUnavailable, TargetError
from rfork.transport.same_host.connection import UnixSocketConnection
from rfork.transport.same_host.host_identity import (
    boot_id,
    directory_identity,
    network_namespace,
    peer_identity,
    pid_uid_namespace,
    socket_path,
)

RECONNECT_S: Final = 0.02
_OWN_LIMITS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_FORBIDDEN: Final = (errno.EACCES, errno.EPERM)
_SAME_USER: Final = (
    "run both as the same user with the same SELinux label (one pod, or the same seLinuxOptions.level; docker: "
    "--security-opt label=level:…)"
)
_SHARE: Final = "share a network namespace, or set RFORK_UNIX_SOCKET_DIR to the same host directory on both sides"


class ConnectionPool:
    """Pool of connections; each concurrent read uses a separate one. Thread-safe.

    `parameters` are those of `LocalServer`. `folder`: path of the socket directory on this side; None: the
    source's path. `idle_timeout_s`: seconds without a message after which a source counts as stalled.
    """

    def __init__(self, parameters: Mapping[str, str], idle_timeout_s: float, *, folder: Path | None = None) -> None:
        self._parameters = parameters
        self._idle_timeout_s = idle_timeout_s
        self._folder = folder
        # Read early: without a free descriptor later, every source would appear to be on another host.
        self._boot = boot_id()
        self._lock = threading.Lock()
        self._closed = False
        self._has_connected = False
        self._idle: list[UnixSocketConnection] = []
        self._connections: set[UnixSocketConnection] = set()

    def open(self, deadline: float) -> None:
        """Open the first connection, to detect early if both sides can connect.

        Raises NotSameHost, SourceUnavailable, SourceTimeout or TargetError.
        """
        self._release(self._connect(deadline))

    @contextlib.contextmanager
    def lease(self, deadline: float) -> Iterator[UnixSocketConnection]:
        """Return a connection for one exchange. It is closed after an exception, because its state is then
        unknown.

        Raises as `open`, but never NotSameHost once the source has been reached.
        """
        connection = self._acquire() or self._connect(deadline)
        succeeded = False
        try:
            yield connection
            succeeded = True
        finally:
            if succeeded:
                self._release(connection)
            else:
                self._discard(connection)

    def reply_deadline(self, deadline: float) -> float:
        """Return the time until which to wait for the source's next message within a read's deadline."""
        return min(deadline, time.monotonic() + self._idle_timeout_s)

    def close(self) -> None:
        """Close all connections; exchanges in progress raise SourceUnavailable. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            connections = list(self._connections)
        for connection in connections:
            connection.abort()
        for connection in idle:
            self._discard(connection)

    def _acquire(self) -> UnixSocketConnection | None:
        while True:
            with self._lock:
                self._check_open()
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_idle:
                return connection
            self._discard(connection)  # closed by the source

    def _release(self, connection: UnixSocketConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        self._discard(connection)

    def _discard(self, connection: UnixSocketConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SourceUnavailable("the reader was closed")

    def _connect(self, deadline: float) -> UnixSocketConnection:
        with self._lock:
            self._check_open()
        if not self._has_connected and self._parameters.get("boot", "") != (self._boot or None):
            raise NotSameHost("the source runs on another host")
        connection = UnixSocketConnection(self._connect_socket(deadline))
        with self._lock:
            self._has_connected = True
            if not self._closed:
                self._connections.add(connection)
                return connection
        connection.close()
        raise SourceUnavailable("the reader was closed")

    def _connect_socket(self, deadline: float) -> socket.socket:
        expires_at = self.reply_deadline(deadline)
        try:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise TargetError(f"cannot create a socket: {error.strerror}") from None
        try:
            client.setblocking(False)
            while True:
                if time.monotonic() >= expires_at:
                    raise SourceTimeout("the source did not accept a connection in time")
                try:
                    with self._address() as address:
                        client.connect(address)
                    self._check_peer(client)
                    return client
                except BlockingIOError:  # its backlog is full: it is stopped or very busy
                    time.sleep(RECONNECT_S)
        except OSError as error:
            client.close()
            if error.errno in _OWN_LIMITS:
                raise TargetError(f"cannot connect to the source: {error.strerror}") from None
            raise self._unreachable(error) from None
        except ValueError as error:
            client.close()
            raise SourceCorrupt(f"the source reported an invalid socket address: {error}") from None
        except BaseException:
            client.close()
            raise

    def _check_peer(self, connected: socket.socket) -> None:
        """Check the listening process: another process can reuse the name after the source has died.

        Skipped if the two sides do not share their PID and user namespaces.
        """
        parameters = self._parameters
        if parameters.get("namespaces", "") != (pid_uid_namespace() or None):
            return
        if peer_identity(connected) != parameters.get("process", ""):
            raise SourceUnavailable("the socket belongs to another process than the source")

    def _address(self) -> contextlib.AbstractContextManager[str]:
        address_text = self._parameters.get("socket", "")
        if address_text.startswith("@"):
            return contextlib.nullcontext(f"\0{address_text[1:]}")
        file = Path(address_text)
        return socket_path(self._folder / file.name if self._folder is not None else file)

    def _unreachable(self, error: OSError) -> NotSameHost | SourceUnavailable:
        """Return the error: the source closed the socket, this side cannot see it, or has no permission."""
        reason = error.strerror or str(error)
        if error.errno in _FORBIDDEN:
            return NotSameHost(f"no permission to connect to the source's socket: {reason}", hint=_SAME_USER)
        if self._has_connected or self._is_same_namespace():
            return SourceUnavailable(f"the source no longer listens on its socket: {reason}")
        return NotSameHost(f"the source's socket is not reachable from this process: {reason}", hint=_SHARE)

    def _is_same_namespace(self) -> bool:
        address_text = self._parameters.get("socket", "")
        if address_text.startswith("@"):
            local, remote = network_namespace(), self._parameters.get("network", "")
        else:
            local = directory_identity(self._folder if self._folder is not None else Path(address_text).parent)
            remote = self._parameters.get("folder", "")
        return local == remote != ""
