"""Reader slots: admission, eviction, unauthenticated clients, and what `close` waits for."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import pytest

from rfork.errors import SourceUnavailable
from rfork.transport.same_host import server
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.connection import UnixSocketConnection, close_all
from rfork.transport.same_host.server import (
    MAX_CONNECTIONS_PER_FORK,
    MAX_PINS_PER_FORK,
    MAX_UNAUTHENTICATED,
    LocalServer,
)
from tests.integration.same_host.echo_server import EchoServer, connect_raw, exchange_message
from tests.transport_contract import soon

LINGER_S = 10
"""Seconds that an unauthenticated client's socket takes to close."""


def _kernel_can_refuse() -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, 83, 0)
        except OSError:
            return False
    return True


PASSRIGHTS = _kernel_can_refuse()


def lingering_socket(linger_s: int) -> tuple[socket.socket, list[socket.socket]]:
    """Return a TCP socket whose last close takes `linger_s`, and the socket that keeps it lingering."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(bytes(1 << 16))
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, linger_s))
    return sender, [listener, listener.accept()[0]]


@pytest.mark.skipif(not PASSRIGHTS, reason="needs Linux 6.16")
def test_the_kernel_refuses_descriptors_of_unauthenticated_clients(echo: EchoServer) -> None:
    """Both before and after the server accepts the connection; a client that sends none is served."""
    with connect_raw(echo) as raw_socket, contextlib.closing(echo.connections()) as connections:
        for _ in range(2):
            with pytest.raises(PermissionError):
                socket.send_fds(raw_socket, [b"{}"], [0])
            assert not exchange_message(connections)


@pytest.mark.parametrize("packets", [1, 3], ids=["received", "not received"])
def test_a_descriptor_that_is_slow_to_close_does_not_delay_close(packets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a kernel that delivers a client's lingering socket, the last close of it lingers; `close` returns
    anyway.
    """
    monkeypatch.setattr(server, "_SO_PASSRIGHTS", -1)
    monkeypatch.setattr(server, "CLOSE_TIMEOUT_S", 0.1)
    sent, got = threading.Event(), threading.Event()

    def serve(connection: UnixSocketConnection) -> None:
        assert sent.wait(30)
        _, descriptors = connection.receive(soon())
        got.set()
        close_all(descriptors)
        connection.receive(soon())

    slow, others = lingering_socket(LINGER_S)
    echo = EchoServer()
    echo.server.close()
    echo.server = LocalServer("slow", None, serve, nice=0)
    with connect_raw(echo) as raw_socket:
        for _ in range(packets):
            socket.send_fds(raw_socket, [b"{}"], [slow.fileno()])
        sent.set()
        # The message now has the last copy: this side's copy was not the last one, so its close does not
        # linger.
        slow.close()
        assert got.wait(30)
        closing = threading.Thread(target=echo.server.close, daemon=True)
        closing.start()
        closing.join(LINGER_S / 2)
        assert not closing.is_alive()
    for other in others:
        other.close()


def test_close_waits_for_memory_access() -> None:
    """It waits for as long as memory is in use, and no access starts afterwards."""
    begun, release = threading.Event(), threading.Event()
    late: list[str] = []

    def serve(connection: UnixSocketConnection) -> None:
        with made.memory_access():
            begun.set()
            release.wait(30)
        try:
            with made.memory_access():
                late.append("touched")
        except SourceUnavailable as error:
            late.append(error.kind)

    made = LocalServer("touch", None, serve, nice=0)
    with contextlib.closing(ConnectionPool(made.parameters, 30)) as connections:
        connections.open(soon())
        assert begun.wait(30)
        closing = threading.Thread(target=made.close, daemon=True)
        closing.start()
        assert made._closing.wait(30)
        closing.join(0.1)
        waited = closing.is_alive()
        release.set()
        closing.join()
    assert waited
    assert ["SourceUnavailable"] == late


def test_pins_use_no_slots() -> None:
    """A fork with pins still has all of its slots, and the number of pins is bounded."""
    made = LocalServer("pin", None, lambda connection: None, nice=0)
    crowd = [UnixSocketConnection(socket.socket()) for _ in range(MAX_CONNECTIONS_PER_FORK + MAX_PINS_PER_FORK + 2)]
    made._unauthenticated |= dict.fromkeys(crowd)
    pin_results = [made.pin(connection, "fork-1") for connection in crowd[: MAX_PINS_PER_FORK + 1]]
    slot_results = [made.acquire_slot(connection, "fork-1") for connection in crowd[MAX_PINS_PER_FORK + 1 :]]
    made.close()
    for connection in crowd:
        connection.close()
    assert MAX_PINS_PER_FORK == pin_results.count(True)
    assert not pin_results[-1]
    assert MAX_CONNECTIONS_PER_FORK == slot_results.count(True)
    assert not slot_results[-1]


def test_a_connection_is_reused_for_the_next_read(echo: EchoServer) -> None:
    """Unless something failed on it."""
    with contextlib.closing(echo.connections()) as connections:
        with connections.lease(soon()) as first:
            pass
        with pytest.raises(KeyError), connections.lease(soon()) as second:
            raise KeyError
        with connections.lease(soon()) as third:
            assert first is second
            assert second is not third


def test_unauthenticated_clients_do_not_block_readers(echo: EchoServer) -> None:
    """The oldest waiting connection is dropped; readers with a slot stay, and new readers are served."""
    with contextlib.closing(echo.connections()) as connections, contextlib.ExitStack() as crowd:
        assert exchange_message(connections, "fork-1")
        idle_connections = [
            crowd.enter_context(contextlib.closing(echo.connections())) for _ in range(MAX_UNAUTHENTICATED + 20)
        ]
        for idle_connection in idle_connections:
            idle_connection.open(soon())
        newest = crowd.enter_context(contextlib.closing(echo.connections()))
        assert exchange_message(connections, "fork-1")
        assert exchange_message(newest, "fork-2")


def test_one_fork_has_a_bounded_number_of_slots(echo: EchoServer) -> None:
    """However many connections it opens; other forks still get one."""
    with contextlib.ExitStack() as crowd:
        fork_connections = [
            crowd.enter_context(contextlib.closing(echo.connections())) for _ in range(MAX_CONNECTIONS_PER_FORK + 2)
        ]
        slot_results = [exchange_message(connections, "fork-1") for connections in fork_connections]
        other = crowd.enter_context(contextlib.closing(echo.connections()))
        assert MAX_CONNECTIONS_PER_FORK == slot_results.count(True)
        assert exchange_message(other, "fork-2")
