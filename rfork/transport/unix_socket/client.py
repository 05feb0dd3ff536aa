"""The target side of same-host transports: connections to a source's Unix socket, kept for the next read."""

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
from rfork.transport.unix_socket.connection import UnixSocketConnection
from rfork.transport.unix_socket.host_identity import (
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
    "run both as one user, with one SELinux label (one pod, or the same seLinuxOptions.level; docker: "
    "--security-opt label=level:…)"
)
_SHARE: Final = "let both share a network namespace, or a folder on this host that RFORK_UNIX_SOCKET_DIR names in both"


class ConnectionPool:
    """Thread-safe; each read under way has a connection of its own.

    `parameters` are those of `LocalServer`. `folder`: where this side sees the folder of sockets; None:
    where the source does. `source_idle_timeout_s`: seconds that connecting may take.
    """

    def __init__(self, parameters: Mapping[str, str], stall_s: float, *, folder: Path | None = None) -> None:
        self._parameters = parameters
        self._stall_s = stall_s
        self._folder = folder
        # Now: without a descriptor to read it by, every source would be one of another host.
        self._boot = boot_id()
        self._lock = threading.Lock()
        self._closed = False
        self._reached = False
        self._idle: list[UnixSocketConnection] = []
        self._connections: set[UnixSocketConnection] = set()

    def open(self, deadline: float) -> None:
        """Make the first connection, to learn at once whether both sides can meet.

        Raises NotSameHost, SourceUnavailable, SourceTimeout or TargetError.
        """
        self._release(self._connect(deadline))

    @contextlib.contextmanager
    def lease(self, deadline: float) -> Iterator[UnixSocketConnection]:
        """A connection for one exchange; after an exception it is closed: who knows what comes next on it.

        Raises as `open`, but once the source was reached never NotSameHost.
        """
        connection = self._acquire() or self._connect(deadline)
        good = False
        try:
            yield connection
            good = True
        finally:
            if good:
                self._release(connection)
            else:
                self._discard(connection)

    def close(self) -> None:
        """Cut all connections; exchanges under way raise SourceUnavailable. Safe to call twice."""
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
            self._discard(connection)  # the source let it go

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
            raise SourceUnavailable("this reader was closed")

    def _connect(self, deadline: float) -> UnixSocketConnection:
        with self._lock:
            self._check_open()
        if not self._reached and self._parameters.get("boot", "") != (self._boot or None):
            raise NotSameHost("the source runs on another host")
        connection = UnixSocketConnection(self._connected(deadline))
        with self._lock:
            self._reached = True
            if not self._closed:
                self._connections.add(connection)
                return connection
        connection.close()
        raise SourceUnavailable("this reader was closed")

    def _connected(self, deadline: float) -> socket.socket:
        until = min(deadline, time.monotonic() + self._stall_s)
        try:
            connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise TargetError(f"cannot make a socket: {error.strerror}") from None
        try:
            connecting.setblocking(False)
            while True:
                if time.monotonic() >= until:
                    raise SourceTimeout("the source did not accept a connection in time")
                try:
                    with self._address() as address:
                        connecting.connect(address)
                    self._check_peer(connecting)
                    return connecting
                except BlockingIOError:  # its queue is full: it stands still, or is very busy
                    time.sleep(RECONNECT_S)
        except OSError as error:
            connecting.close()
            if error.errno in _OWN_LIMITS:
                raise TargetError(f"cannot connect to the source: {error.strerror}") from None
            raise self._unreachable(error) from None
        except ValueError as error:
            connecting.close()
            raise SourceCorrupt(f"the source names a socket that cannot be: {error}") from None
        except BaseException:
            connecting.close()
            raise

    def _check_peer(self, connected: socket.socket) -> None:
        """Whoever sees a socket's name can take it once its owner has died; not where both have one count."""
        parameters = self._parameters
        if parameters.get("numbering", "") != (pid_uid_namespace() or None):
            return
        if peer_identity(connected) != parameters.get("process", ""):
            raise SourceUnavailable("another process than the source listens on its socket")

    def _address(self) -> contextlib.AbstractContextManager[str]:
        socket_path_text = self._parameters.get("socket", "")
        if socket_path_text.startswith("@"):
            return contextlib.nullcontext(f"\0{socket_path_text[1:]}")
        file = Path(socket_path_text)
        return socket_path(self._folder / file.name if self._folder is not None else file)

    def _unreachable(self, error: OSError) -> NotSameHost | SourceUnavailable:
        """Whether nobody listens there any more, or this side looks in another place, or may not look."""
        because = error.strerror or str(error)
        if error.errno in _FORBIDDEN:
            return NotSameHost(f"this side may not connect to the source's socket: {because}", hint=_SAME_USER)
        if self._reached or self._is_same_namespace():
            return SourceUnavailable(f"nobody listens on the source's socket any more: {because}")
        return NotSameHost(f"the source's socket cannot be reached from here: {because}", hint=_SHARE)

    def _is_same_namespace(self) -> bool:
        socket_path_text = self._parameters.get("socket", "")
        if socket_path_text.startswith("@"):
            here, there = network_namespace(), self._parameters.get("network", "")
        else:
            here = directory_identity(self._folder if self._folder is not None else Path(socket_path_text).parent)
            there = self._parameters.get("folder", "")
        return here == there != ""
