"""Who is let in, who is put out, what strangers can do, and what `close` waits for."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import pytest

from rfork.errors import SourceGone
from rfork.transport.same_host import listening, server
from rfork.transport.same_host.connection import Connection, close_all
from rfork.transport.same_host.dialling import Connections
from rfork.transport.same_host.server import LOBBY, MOST_HOLDS_OF_A_FORK, MOST_OF_A_FORK, LocalServer
from tests.integration.same_host.echoing import Echo, exchange, stranger_to
from tests.transport_contract import soon

LINGER_S = 10
"""Seconds that a stranger's socket takes to close."""


def _kernel_can_refuse() -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, 83, 0)
        except OSError:
            return False
    return True


PASSRIGHTS = _kernel_can_refuse()


def lingering(patience_s: int) -> tuple[socket.socket, list[socket.socket]]:
    """A TCP socket whose last close takes so long, and what keeps it so."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(bytes(1 << 16))
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, patience_s))
    return sender, [listener, listener.accept()[0]]


@pytest.mark.skipif(not PASSRIGHTS, reason="needs Linux 6.16")
def test_the_kernel_refuses_descriptors_of_strangers(echo: Echo) -> None:
    """Before the server hears of them, and after it; who sends none is served."""
    with stranger_to(echo) as stranger, contextlib.closing(echo.connections()) as connections:
        for _ in range(2):
            with pytest.raises(PermissionError):
                socket.send_fds(stranger, [b"{}"], [0])
            assert not exchange(connections)


@pytest.mark.parametrize("packets", [1, 3], ids=["received", "not received"])
def test_a_descriptor_that_is_slow_to_close_holds_up_no_close(
    packets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's socket lingers where it is closed last, on a kernel that lets it in; `close` returns."""
    monkeypatch.setattr(listening, "_SO_PASSRIGHTS", -1)
    monkeypatch.setattr(server, "CLOSE_S", 0.1)
    sent, got = threading.Event(), threading.Event()

    def serve(connection: Connection) -> None:
        assert sent.wait(30)
        _, descriptors = connection.receive(soon())
        got.set()
        close_all(descriptors)
        connection.receive(soon())

    slow, others = lingering(LINGER_S)
    echo = Echo()
    echo.server.close()
    echo.server = LocalServer("slow", None, serve, nice=0)
    with stranger_to(echo) as stranger:
        for _ in range(packets):
            socket.send_fds(stranger, [b"{}"], [slow.fileno()])
        sent.set()
        # The message's copy is now the last: this side's is closed without lingering, as it is not.
        slow.close()
        assert got.wait(30)
        closing = threading.Thread(target=echo.server.close, daemon=True)
        closing.start()
        closing.join(LINGER_S / 2)
        assert not closing.is_alive()
    for other in others:
        other.close()


def test_close_waits_for_who_touches_memory() -> None:
    """However long that takes, and nobody begins to after it."""
    begun, release = threading.Event(), threading.Event()
    late: list[str] = []

    def serve(connection: Connection) -> None:
        with made.touching():
            begun.set()
            release.wait(30)
        try:
            with made.touching():
                late.append("touched")
        except SourceGone as error:
            late.append(error.kind)

    made = LocalServer("touch", None, serve, nice=0)
    with contextlib.closing(Connections(made.parameters, 30)) as connections:
        connections.open(soon())
        assert begun.wait(30)
        closing = threading.Thread(target=made.close, daemon=True)
        closing.start()
        assert made._closing.wait(30)
        closing.join(0.1)
        waited = closing.is_alive()
        release.set()
        closing.join()
    assert (True, ["SourceGone"]) == (waited, late)


def test_holds_take_no_places() -> None:
    """A fork that holds on still has all of its places, and no more than a few holds."""
    made = LocalServer("hold", None, lambda connection: None, nice=0)
    crowd = [Connection(socket.socket()) for _ in range(MOST_OF_A_FORK + MOST_HOLDS_OF_A_FORK + 2)]
    made._lobby |= dict.fromkeys(crowd)
    held = [made.hold(connection, "fork-1") for connection in crowd[: MOST_HOLDS_OF_A_FORK + 1]]
    given = [made.take_slot(connection, "fork-1") for connection in crowd[MOST_HOLDS_OF_A_FORK + 1 :]]
    made.close()
    for connection in crowd:
        connection.close()
    assert (MOST_HOLDS_OF_A_FORK, False) == (held.count(True), held[-1])
    assert (MOST_OF_A_FORK, False) == (given.count(True), given[-1])


def test_a_connection_is_kept_for_the_next_read(echo: Echo) -> None:
    """But not one on which something failed."""
    with contextlib.closing(echo.connections()) as connections:
        with connections.borrowed(soon()) as first:
            pass
        with pytest.raises(KeyError), connections.borrowed(soon()) as second:
            raise KeyError
        with connections.borrowed(soon()) as third:
            assert (True, False) == (first is second, second is third)


def test_strangers_keep_no_reader_out(echo: Echo) -> None:
    """The lobby loses its oldest; who has a place stays, and who comes is served."""
    with contextlib.closing(echo.connections()) as connections, contextlib.ExitStack() as crowd:
        assert exchange(connections, "fork-1")
        strangers = [crowd.enter_context(contextlib.closing(echo.connections())) for _ in range(LOBBY + 20)]
        for stranger in strangers:
            stranger.open(soon())
        newest = crowd.enter_context(contextlib.closing(echo.connections()))
        assert (True, True) == (exchange(connections, "fork-1"), exchange(newest, "fork-2"))


def test_one_fork_has_a_bounded_number_of_places(echo: Echo) -> None:
    """However many connections it opens; others still get one."""
    with contextlib.ExitStack() as crowd:
        all_of_it = [
            crowd.enter_context(contextlib.closing(echo.connections())) for _ in range(MOST_OF_A_FORK + 2)
        ]
        given = [exchange(connections, "fork-1") for connections in all_of_it]
        other = crowd.enter_context(contextlib.closing(echo.connections()))
        assert (MOST_OF_A_FORK, True) == (given.count(True), exchange(other, "fork-2"))
