"""Messages, descriptors and deadlines between two endpoints."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from pathlib import Path

import pytest

from rfork.errors import SourceCorrupt, SourceTimeout, SourceUnavailable, TargetError
from rfork.transport.same_host.connection import MAX_FDS, MAX_MESSAGE_BYTES, close_all
from tests.integration.same_host.echo_server import EchoServer, exchange_message, raw_pair
from tests.transport_contract import soon


def test_messages_are_exchanged(echo: EchoServer) -> None:
    """In both directions."""
    with contextlib.closing(echo.connections()) as connections, connections.lease(soon()) as connection:
        connection.send({"text": "é", "numbers": [1, 2]}, deadline=soon())
        message, descriptors = connection.receive(soon())
    assert {"text": "é", "numbers": [1, 2], "slot": False} == message
    assert [] == descriptors


def test_descriptors_are_passed() -> None:
    """Received descriptors are close-on-exec."""
    read_end, write_end = os.pipe()
    with raw_pair() as (source, connection):
        socket.send_fds(source, [b"{}"], [write_end])
        _, (received,) = connection.receive(soon())
    os.write(received, b"x")
    assert b"x" == os.read(read_end, 5)
    assert not os.get_inheritable(received)
    close_all([read_end, write_end, received])


def test_descriptors_dropped_by_the_kernel_are_an_error() -> None:
    """The error names both possible causes: the limit of open files, or a security module."""
    with raw_pair() as (source, connection):
        socket.send_fds(source, [b"{}"], [0] * 5)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(TargetError, match="SELinux") as caught:
                connection.receive(soon())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "ulimit" in caught.value.hint


@pytest.mark.parametrize(
    "packet", [b"\xff\xfe", b"[1]", b"{", b"x" * (MAX_MESSAGE_BYTES + 1), b"[" * MAX_MESSAGE_BYTES]
)
def test_an_invalid_packet_ends_only_its_connection(echo: EchoServer, packet: bytes) -> None:
    """The server continues to serve others."""
    address = echo.server.parameters["socket"]
    with contextlib.closing(echo.connections()) as connections:
        assert exchange_message(connections, "fork-1")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw_socket:
            raw_socket.settimeout(30)
            folder = os.open(Path(address).parent if not address.startswith("@") else "/", os.O_RDONLY)
            raw_socket.connect(
                f"\0{address[1:]}" if address.startswith("@") else f"/proc/self/fd/{folder}/{Path(address).name}"
            )
            os.close(folder)
            raw_socket.send(packet)
            assert b"" == raw_socket.recv(5)
        assert exchange_message(connections, "fork-1")
    assert "SourceCorrupt" in echo.ended


def test_descriptors_of_refused_messages_are_closed() -> None:
    """This process keeps none of them, whether there are too many or the message is invalid."""
    for packet, count in ((b"{}", MAX_FDS + 1), (b"nothing", 3)):
        read_end, write_end = os.pipe2(os.O_NONBLOCK)
        with raw_pair() as (raw_socket, connection):
            socket.send_fds(raw_socket, [packet], [write_end] * count)
            os.close(write_end)
            with pytest.raises(SourceCorrupt):
                connection.receive(soon())
            # The read returns end-of-file once every copy of the other end is closed; until then it would
            # block.
            assert b"" == os.read(read_end, 1)
        os.close(read_end)


def test_deadlines_are_kept() -> None:
    """A read without data and a write without a reader both fail at the deadline."""
    with raw_pair() as (_, connection):
        with pytest.raises(SourceTimeout):
            connection.receive(soon(0.1))
        until = soon(0.3)

        def fill() -> None:
            while True:
                connection.send({"x": "x" * 60_000}, deadline=until)

        with pytest.raises(SourceTimeout):
            fill()


def test_shutdown_wakes_a_blocked_reader() -> None:
    """From another thread."""
    with raw_pair() as (_, connection):
        cutter = threading.Timer(0.05, connection.abort)
        cutter.start()
        with pytest.raises(SourceUnavailable):
            connection.receive(soon())
        cutter.join()
