"""Accepts the connections of a uvicorn server within the limits of `planner.connections`.

uvicorn and asyncio limit neither the number of connections nor the time for a request head, and asyncio logs
a traceback for every backlog entry when file descriptors run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn

from planner.connections import HEAD_S, ConnectionLimits, ConnectionState, overdue, surplus
from rfork.logs import logger

CHECK_S: Final = 1.0
RETRY_S: Final = 0.1
LOG_S: Final = 60.0
"""Seconds between two log lines about connections that cannot be accepted."""


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
        self._log = logger("planner.connection_acceptor")
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
