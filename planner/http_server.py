"""HTTP servers of the planner's processes: uvicorn on sockets that are already bound, with limits on connections.

uvicorn and asyncio limit neither the number of connections nor the time for a request head, and asyncio logs
a traceback for every backlog entry when file descriptors run out.

A connection is *busy* while a request is being answered, *waiting* until its next request head is complete
(also before the first byte, and during the TLS handshake), and otherwise *idle*: kept alive for the next
request. Busy connections are kept. If there are too many, the oldest waiting connection is closed first, then
the oldest idle one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from rfork.addresses import host_port
from rfork.errors import PortInUse, SettingsError, reason_of
from rfork.logs import logger

HEAD_S: Final = 10.0
"""Seconds for a TLS handshake, and for a request head."""
RESERVED: Final = 64
"""File descriptors reserved for everything except connections."""
MIN_CONNECTIONS: Final = 16
MAX_CONNECTIONS: Final = 65_536
MAX_WAITING: Final = 256
CHECK_S: Final = 1.0
RETRY_S: Final = 0.1
LOG_S: Final = 60.0
"""Seconds between two log lines about connections that cannot be accepted."""
KEEPALIVE_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)  # not on macOS
    ),
)
"""Accepted connections inherit these: the kernel closes one to a host that disappeared after 25 s of silence."""
BACKLOG: Final = 2048
SHUTDOWN_S: Final = 3
KEEP_ALIVE_S: Final = 120
"""Longer than the 90 s for which Go's clients (the API server, kubelets) keep idle connections; otherwise
they would send on a connection that is being closed, and fail.
"""


def listen(bind: str, port: int, *, prefix: str, port_setting: str) -> socket.socket:
    """Return a listening socket. Raises PortInUse, or SettingsError for an invalid address.

    Errors name the settings: `prefix` + ``BIND``, and `prefix` + `port_setting`.
    """
    listener: socket.socket | None = None
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(
            bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket_type, protocol)
        # A restart must not wait for the old process's connections to time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in KEEPALIVE_OPTIONS:
            listener.setsockopt(level, option, value)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(bind, port, setting=f"{prefix}{port_setting}") from None
        raise SettingsError(
            f"cannot listen on {bind}:{port}: {reason_of(error)}",
            hint=f"set {prefix}BIND to an address of this machine",
        ) from None
    return listener


def address_of(bind: str, listener: socket.socket) -> str:
    """Return host:port of the listening socket."""
    return host_port(bind, int(listener.getsockname()[1]))


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """Current state of one connection."""

    key: int
    busy: bool
    waits_since: float | None
    """When it began to wait for a request head; None if it is busy or idle."""
    active_at: float
    """When the last byte arrived."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the number of connections."""

    connections: int
    waiting: int

    @classmethod
    def from_descriptor_limit(cls, max_descriptors: int) -> ConnectionLimits:
        """Return the limits for a process that may open this many descriptors; negative means unlimited."""
        free = MAX_CONNECTIONS if max_descriptors < 0 else max_descriptors - RESERVED
        connections = max(MIN_CONNECTIONS, min(free, MAX_CONNECTIONS))
        return cls(connections, max(MIN_CONNECTIONS // 2, min(connections // 2, MAX_WAITING)))


def overdue(connections: Iterable[ConnectionState], now: float) -> list[int]:
    """Return the connections that have waited too long for a request head."""
    return [
        each.key
        for each in connections
        if not each.busy and each.waits_since is not None and now >= each.waits_since + HEAD_S
    ]


def surplus(connections: Iterable[ConnectionState], limits: ConnectionLimits) -> list[int]:
    """Return the connections to close so that one more fits, if possible."""
    by_age = list(connections)
    waiting = sorted((each.waits_since, each.key) for each in by_age if not each.busy and each.waits_since is not None)
    idle = sorted((each.active_at, each.key) for each in by_age if not each.busy and each.waits_since is None)
    too_many = max(0, len(by_age) + 1 - limits.connections)
    count = max(too_many, len(waiting) + 1 - limits.waiting, 0)
    closed = [key for _, key in waiting[:count]]
    return closed + [key for _, key in idle[: max(0, too_many - len(closed))]]


class _TrackedConnection(asyncio.Protocol):
    """Forwards a connection's events to uvicorn's protocol and tracks its state."""

    def __init__(self, inner: asyncio.Protocol) -> None:
        self._inner: Any = inner  # both of uvicorn's protocols keep the current request in `cycle`
        self._transport: asyncio.Transport | None = None
        self._waits_since: float | None = time.monotonic()
        self._active_at = self._waits_since
        self.task: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._active_at = time.monotonic()
        self._inner.data_received(data)
        if self._busy:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = self._active_at

    def eof_received(self) -> bool | None:
        return bool(self._inner.eof_received())

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._inner.connection_lost(exc)

    @property
    def _busy(self) -> bool:
        return self._inner.cycle is not None and not self._inner.cycle.response_complete

    def state(self, key: int) -> ConnectionState:
        """Return the current state of the connection."""
        return ConnectionState(key, self._busy, self._waits_since, self._active_at)

    def abort(self) -> None:
        """Close it immediately."""
        if self._transport is not None:
            self._transport.abort()
        elif self.task is not None:
            self.task.cancel()  # during its handshake


class Acceptor:
    """Accepts connections on one listening socket until it is stopped."""

    def __init__(
        self,
        listener: socket.socket,
        context: Callable[[], ssl.SSLContext | None],
        protocol_factory: Callable[[], asyncio.Protocol],
    ) -> None:
        """`context` is called for each connection; `protocol_factory` returns uvicorn's protocol for it."""
        self._listener = listener
        self._context = context
        self._protocol_factory = protocol_factory
        self._limits = ConnectionLimits.from_descriptor_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._keys = itertools.count()
        self._connections: dict[int, _TrackedConnection] = {}
        self._log = logger("planner.http_server")
        self._log_at = 0.0
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self) -> None:
        """Start accepting, on the running event loop."""
        self._listener.setblocking(False)
        self._tasks = (
            asyncio.create_task(self._accept(), name="rfork-accept"),
            asyncio.create_task(self._check(), name="rfork-connections"),
        )

    async def stop(self) -> None:
        """Stop accepting; connections with a request in progress continue."""
        for task in self._tasks:
            task.cancel()
        for connection in list(self._connections.values()):
            if not connection.state(0).busy:
                connection.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._abort(surplus(self._connection_states(), self._limits))
            if len(self._connections) >= self._limits.connections:
                await asyncio.sleep(RETRY_S)  # all are busy or already closing
                continue
            try:
                client_socket, _ = await loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._report(error)
                self._abort([option.key for option in self._connection_states() if option.waits_since is not None])
                await asyncio.sleep(RETRY_S)
                continue
            self._register(client_socket)

    def _register(self, client_socket: socket.socket) -> None:
        key, connection = next(self._keys), _TrackedConnection(self._protocol_factory())
        self._connections[key] = connection
        connection.task = asyncio.create_task(self._serve(connection, client_socket))

        def ended(_: asyncio.Task[None]) -> None:
            # Needed also for a task that was cancelled before it ran.
            client_socket.close()
            del self._connections[key]

        connection.task.add_done_callback(ended)

    async def _serve(self, connection: _TrackedConnection, client_socket: socket.socket) -> None:
        loop, context = asyncio.get_running_loop(), self._context()
        # A client that disconnects or fails its handshake is not worth a log line.
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(
                lambda: connection, client_socket, ssl=context,
                ssl_handshake_timeout=None if context is None else HEAD_S,
            )  # fmt: skip
            await connection.closed.wait()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self._abort(overdue(self._connection_states(), time.monotonic()))

    def _connection_states(self) -> Iterator[ConnectionState]:
        for key, connection in self._connections.items():
            yield connection.state(key)

    def _abort(self, keys: list[int]) -> None:
        for key in keys:
            self._connections[key].abort()

    def _report(self, error: OSError) -> None:
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + LOG_S
            self._log.warning(
                "cannot accept connections", reason=error.strerror or str(error),
                connections=len(self._connections), hint="raise the open file limit (ulimit -n)",
            )  # fmt: skip


class BoundedServer(uvicorn.Server):
    """A uvicorn server that accepts through `Acceptor`, on sockets that are already bound."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting on `sockets`."""
        await super().startup([])
        for listener in sockets or []:
            acceptor = Acceptor(listener, lambda: self.config.ssl, self._protocol)
            self._acceptors.append(acceptor)
            acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and let requests in progress finish."""
        for acceptor in self._acceptors:
            await acceptor.stop()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        protocol_factory: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = protocol_factory(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


def uvicorn_config(
    app: ASGIApp, context: ssl.SSLContext | None, headers: Sequence[tuple[str, str]] = ()
) -> uvicorn.Config:
    """Return the configuration of a server, loaded; `headers` are added to every response."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        # Otherwise a caller on this host could claim any address as its own.
        proxy_headers=False,
        headers=list(headers),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    config.load()
    config.ssl = context
    return config


class _EmbeddedServer(BoundedServer):
    """One server of several in a process: the process handles signals, not the server."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.startup_done = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.startup_done.set()


@contextlib.asynccontextmanager
async def run_server(
    app: ASGIApp, listener: socket.socket, context: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serve on this event loop for the duration of the block; requests in progress are answered before it
    ends.
    """
    server = _EmbeddedServer(uvicorn_config(app, context))
    task = asyncio.create_task(server.serve(sockets=[listener]), name="rfork-serving")
    started = asyncio.create_task(server.startup_done.wait())
    try:
        await asyncio.wait((task, started), return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        started.cancel()
        server.should_exit = True
        await task
