"""Messages, their descriptors and their deadlines, between two ends."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from pathlib import Path

import pytest

from rfork.errors import SourceCorrupt, SourceGone, SourceStalled, TargetError
from rfork.transport.same_host.connection import MOST_DESCRIPTORS, close_all
from rfork.transport.same_host.messages import LARGEST_MESSAGE
from tests.integration.same_host.echoing import Echo, exchange, raw
from tests.transport_contract import soon


def test_messages_cross(echo: Echo) -> None:
    """Both ways."""
    with contextlib.closing(echo.connections()) as connections, connections.borrowed(soon()) as connection:
        connection.send({"text": "é", "numbers": [1, 2]}, deadline=soon())
        answer, descriptors = connection.receive(soon())
    assert ({"text": "é", "numbers": [1, 2], "slot": False}, []) == (answer, descriptors)


def test_descriptors_cross() -> None:
    """What arrives is closed by an exec."""
    read_end, write_end = os.pipe()
    with raw() as (source, connection):
        socket.send_fds(source, [b"{}"], [write_end])
        _, (received,) = connection.receive(soon())
    os.write(received, b"x")
    assert (b"x", False) == (os.read(read_end, 5), os.get_inheritable(received))
    close_all([read_end, write_end, received])


def test_descriptors_that_the_kernel_keeps_back() -> None:
    """The limit of open files, or a security module: both are named."""
    with raw() as (source, connection):
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
    "packet", [b"\xff\xfe", b"[1]", b"{", b"x" * (LARGEST_MESSAGE + 1), b"[" * LARGEST_MESSAGE]
)
def test_what_is_no_message_ends_that_connection_alone(echo: Echo, packet: bytes) -> None:
    """The server goes on."""
    address = echo.server.parameters["socket"]
    with contextlib.closing(echo.connections()) as connections:
        assert exchange(connections, "fork-1")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(30)
            folder = os.open(Path(address).parent if not address.startswith("@") else "/", os.O_RDONLY)
            stranger.connect(
                f"\0{address[1:]}"
                if address.startswith("@")
                else f"/proc/self/fd/{folder}/{Path(address).name}"
            )
            os.close(folder)
            stranger.send(packet)
            assert b"" == stranger.recv(5)
        assert exchange(connections, "fork-1")
    assert "SourceCorrupt" in echo.ended


def test_descriptors_of_what_is_refused_are_closed() -> None:
    """Too many, or beside something that is no message: this process keeps none."""
    for packet, count in ((b"{}", MOST_DESCRIPTORS + 1), (b"nothing", 3)):
        read_end, write_end = os.pipe2(os.O_NONBLOCK)
        with raw() as (stranger, connection):
            socket.send_fds(stranger, [packet], [write_end] * count)
            os.close(write_end)
            with pytest.raises(SourceCorrupt):
                connection.receive(soon())
            # Its end is read once no copy of the other end is open; until then a read would have to wait.
            assert b"" == os.read(read_end, 1)
        os.close(read_end)


def test_deadlines_are_kept() -> None:
    """Who hears nothing, or is not listened to, gives up."""
    with raw() as (_, connection):
        with pytest.raises(SourceStalled):
            connection.receive(soon(0.1))
        until = soon(0.3)

        def fill() -> None:
            while True:
                connection.send({"x": "x" * 60_000}, deadline=until)

        with pytest.raises(SourceStalled):
            fill()


def test_a_cut_wakes_who_waits() -> None:
    """From another thread."""
    with raw() as (_, connection):
        cutter = threading.Timer(0.05, connection.cut)
        cutter.start()
        with pytest.raises(SourceGone):
            connection.receive(soon())
        cutter.join()
