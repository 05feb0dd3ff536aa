"""An echo server, and functions to connect to it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from rfork.errors import RforkError
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.connection import UnixSocketConnection, close_all
from rfork.transport.same_host.host_identity import socket_path
from rfork.transport.same_host.server import LocalServer
from tests.transport_contract import soon


class EchoServer:
    """A server that echoes each message with its descriptors, and reserves a slot for a client that names a
    fork.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.ended: list[str] = []
        self.server = LocalServer("echo", folder, self._serve, nice=0)

    def _serve(self, connection: UnixSocketConnection) -> None:
        try:
            while True:
                message, descriptors = connection.receive(soon())
                fork = message.get("fork")
                slot = isinstance(fork, str) and self.server.acquire_slot(connection, fork)
                connection.send({**message, "slot": slot}, descriptors, deadline=soon())
                close_all(descriptors)
        except RforkError as error:
            self.ended.append(error.kind)
            raise

    def connections(self) -> ConnectionPool:
        return ConnectionPool(self.server.parameters, 30)


def exchange_message(connections: ConnectionPool, fork: str = "") -> bool:
    """Exchange one message and return whether the connection has a slot now."""
    with connections.lease(soon()) as connection:
        connection.send({"fork": fork} if fork else {}, deadline=soon())
        return bool(connection.receive(soon())[0]["slot"])


@contextlib.contextmanager
def raw_pair() -> Iterator[tuple[socket.socket, UnixSocketConnection]]:
    """Return a raw socket and the connection at its other end."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = UnixSocketConnection(other)
    with one, contextlib.closing(connection):
        yield one, connection


def connect_raw(echo: EchoServer) -> socket.socket:
    """Return a raw socket that is connected to the server and has sent nothing."""
    address = echo.server.parameters["socket"]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(30)
    if address.startswith("@"):
        connection.connect(f"\0{address[1:]}")
    else:
        with socket_path(Path(address)) as path:
            connection.connect(path)
    return connection
