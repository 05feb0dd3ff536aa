"""Connections to the addresses of a host."""

from __future__ import annotations

import socket
import time

import pytest

from rfork.net.connect import CancelScope, open_connection
from rfork.net.request import HttpOrigin

UNSUPPORTED_FAMILY = 255


def test_an_address_of_an_unsupported_family_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without IPv6 cannot create a socket for an IPv6 address; the host may have others."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = [
            (family, socket.SOCK_STREAM, 0, "", listener.getsockname())
            for family in (UNSUPPORTED_FAMILY, socket.AF_INET)
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        stream = open_connection(HttpOrigin(False, "seed", 80), None, 30.0, CancelScope())
        accepted, _ = listener.accept()
        stream.send([b"x"], 30.0)
        assert b"x" == accepted.recv(1)
        stream.close()
        accepted.close()


def test_a_host_without_usable_address_has_the_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the socket if none could be created."""
    found = [(UNSUPPORTED_FAMILY, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    began = time.monotonic()
    with pytest.raises(OSError, match="family"):
        open_connection(HttpOrigin(False, "seed", 80), None, 30.0, CancelScope())
    assert time.monotonic() - began < 30.0
