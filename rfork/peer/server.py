"""gRPC server of an instance's peer service. Runs on the source.

An asyncio server on a separate thread: a waiting progress stream needs no thread, so many readers or
unauthenticated clients do not starve the engine.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import grpc
import grpc.aio

from rfork.addresses import host_port
from rfork.errors import PortInUse, SettingsError, reason_of
from rfork.net.grpc_credentials import server_credentials
from rfork.peer import call_guard
from rfork.peer.control_stream import MAX_CONTROL_STREAMS, MAX_MESSAGE_BYTES
from rfork.peer.servicer import MAX_PROGRESS_STREAMS, PeerBackend, handlers
from rfork.settings import InstanceSettings

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES + 1024
MAX_CONNECTIONS = 4096
"""Limit, further restricted to half of this process's descriptors: the engine needs some too."""
HANDSHAKE_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 60.0
"""A connection without calls is closed after this time; clients reconnect on demand."""
STOP_GRACE_S = 0.5


class PeerService(Protocol):
    """Makes one `PeerBackend` reachable for other instances."""

    @property
    def address(self) -> str:
        """Address for other instances."""
        ...

    def start(self) -> None:
        """Start to serve."""
        ...

    def stop(self) -> None:
        """End all calls."""
        ...


ServePeer = Callable[[PeerBackend, InstanceSettings], PeerService]
"""Create the (not yet started) service of a seed; `PeerServer` is the gRPC implementation."""


class PeerServer:
    """Serves one `PeerBackend` at `settings.bind`, on the first free port from `peer_port` on."""

    def __init__(self, backend: PeerBackend, settings: InstanceSettings) -> None:
        self._backend = backend
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_on_loop_error)
        self._server: grpc.aio.Server | None = None
        self._thread = threading.Thread(target=self._run, name="rfork-peer", daemon=True)
        self._port = 0

    @property
    def address(self) -> str:
        """host:port for other instances."""
        return host_port(self._settings.advertised_host, self._port)

    def start(self) -> None:
        """Start to listen. Raises PortInUse, or SettingsError if the advertised address is unknown."""
        _ = self.address
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def stop(self) -> None:
        """End all calls and join the thread."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _start(self) -> None:
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # otherwise two processes could share one port unnoticed
                ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
                ("grpc.max_send_message_length", -1),  # an address map of 100,000 segments has several MB
                ("grpc.max_allowed_incoming_connections", max_connections()),
                ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_TIMEOUT_S * 1000)),
                ("grpc.max_connection_idle_ms", round(IDLE_TIMEOUT_S * 1000)),
                (
                    "grpc.max_concurrent_streams",
                    MAX_PROGRESS_STREAMS + MAX_CONTROL_STREAMS + 3 * call_guard.MAX_CALLS_PER_FORK,
                ),
            ],
        )
        server.add_generic_rpc_handlers(tuple(handlers(self._backend)))
        self._port = self._open_port(server)
        await server.start()
        self._server = server

    def _open_port(self, server: grpc.aio.Server) -> int:
        settings, credentials = self._settings, server_credentials(self._settings.tls)
        ports = settings.ports_from(settings.peer_port)
        for port in ports:
            if (problem := _bind_problem(settings.bind, port)) is not None:
                if problem.errno == errno.EADDRINUSE:
                    continue
                raise SettingsError(
                    f"cannot listen on {host_port(settings.bind, port)}: {reason_of(problem)}",
                    hint="set RFORK_BIND to an address of this machine",
                )
            address = host_port(settings.bind, port)
            with suppress(RuntimeError):  # binding also listens, so the second process fails here
                if credentials is None:
                    return server.add_insecure_port(address)
                return server.add_secure_port(address, credentials)
        raise PortInUse(settings.bind, ports[0], last=ports[-1], setting="RFORK_PEER_PORT")

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        # Cancelled calls still have to release their slots: stop the loop after them.
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls, timeout=STOP_GRACE_S)


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an exception that no task receives."""
    # Before grpcio 1.80, all event loops of a process poll one socket, and all but one find it empty.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


def max_connections() -> int:
    """Return the maximum number of connections, authenticated or not."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = descriptors == resource.RLIM_INFINITY
    return MAX_CONNECTIONS if unlimited else min(MAX_CONNECTIONS, descriptors // 2)


def _bind_problem(bind: str, port: int) -> OSError | None:
    """Return why this process cannot listen on an address; None if it can.

    gRPC hides the reason, and writes to stderr by itself. The socket does not listen: servers that start at the same
    time do not see each other's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None
