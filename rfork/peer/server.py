"""The peer service of one instance. Runs on the source.

An asyncio gRPC server on a thread of its own: a progress stream that waits costs no thread, so many
readers, or many strangers, do not starve the engine.
"""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import grpc
import grpc.aio

from rfork.errors import PortInUse
from rfork.grpc_credentials import server_credentials
from rfork.peer import call_guard
from rfork.peer.control_stream import MAX_CONTROL_STREAMS, MAX_MESSAGE_BYTES
from rfork.peer.servicer import MAX_STREAMS, PeerBackend, handlers
from rfork.settings import InstanceSettings, host_port

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES + 1024
MAX_CONNECTIONS = 4096
"""At most, and at most half of the descriptors that this process may have: the engine needs some too."""
HANDSHAKE_S = 10.0
IDLE_S = 60.0
"""A connection without a call is closed after so long; who needs it again connects again."""
STOP_GRACE_S = 0.5


class PeerService(Protocol):
    """What makes one `PeerBackend` reachable."""

    @property
    def address(self) -> str:
        """Where others reach it."""
        ...

    def start(self) -> None:
        """Begin to answer."""
        ...

    def stop(self) -> None:
        """End all calls."""
        ...


ServePeer = Callable[[PeerBackend, InstanceSettings], PeerService]
"""Makes the (not yet started) service of a host; `PeerServer` is the one over gRPC."""


class PeerServer:
    """Serves one `PeerBackend` at `settings.bind`, on the first port from `peer_port` on that is free."""

    def __init__(self, host: PeerBackend, settings: InstanceSettings) -> None:
        self._host = host
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._server: grpc.aio.Server | None = None
        self._thread = threading.Thread(target=self._run, name="rfork-peer", daemon=True)
        self._port = 0

    @property
    def address(self) -> str:
        """host:port that others are told."""
        return host_port(self._settings.advertised_host, self._port)

    def start(self) -> None:
        """Listen. Raises PortInUse, or SettingsError where no address is known that others could be told."""
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
                ("grpc.so_reuseport", 0),  # or two processes could share one port unnoticed
                ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
                ("grpc.max_send_message_length", -1),  # an address map of 100,000 segments is some MB
                ("grpc.max_allowed_incoming_connections", max_connections()),
                ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
                ("grpc.max_connection_idle_ms", round(IDLE_S * 1000)),
                (
                    "grpc.max_concurrent_streams",
                    MAX_STREAMS + MAX_CONTROL_STREAMS + 3 * call_guard.MAX_CALLS_PER_FORK,
                ),
            ],
        )
        server.add_generic_rpc_handlers(tuple(handlers(self._host)))
        self._port = self._open_port(server)
        await server.start()
        self._server = server

    def _open_port(self, server: grpc.aio.Server) -> int:
        settings, credentials = self._settings, server_credentials(self._settings.tls)
        ports = settings.ports_from(settings.peer_port)
        for port in ports:
            where = host_port(settings.bind, port)
            with suppress(RuntimeError):  # it binds and listens at once, so whoever comes second fails here
                if credentials is None:
                    return server.add_insecure_port(where)
                return server.add_secure_port(where, credentials)
        raise PortInUse(settings.bind, ports[0], last=ports[-1], setting="RFORK_PEER_PORT")

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        # Calls that were cut off still have to give their places back: the loop ends after them.
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls, timeout=STOP_GRACE_S)


def max_connections() -> int:
    """How many connections the peer service takes, strangers' and others'."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = descriptors == resource.RLIM_INFINITY
    return MAX_CONNECTIONS if unlimited else min(MAX_CONNECTIONS, descriptors // 2)
