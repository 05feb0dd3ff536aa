"""Sockets and servers of the planner's processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from planner.connection_acceptor import BoundedServer
from rfork.addresses import host_port
from rfork.errors import PortInUse, SettingsError, reason_of

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
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    config.load()
    config.ssl = context
    server = _EmbeddedServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="rfork-serving")
    started = asyncio.create_task(server.startup_done.wait())
    try:
        await asyncio.wait((task, started), return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        started.cancel()
        server.should_exit = True
        await task
