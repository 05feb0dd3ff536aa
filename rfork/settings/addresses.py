"""Addresses: this host's own, and how they are written."""

from __future__ import annotations

import re
import socket

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def own_address() -> str:
    """This host's address on the interface of its default route; loopback where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # A connected UDP socket sends nothing: the kernel only picks the source address.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def redacted(text: str) -> str:
    """The text, without the user names and passwords of URLs in it."""
    # Up to the last @: a password that was not quoted may hold any other character.
    return re.sub(r"(?<=://)\S*@", "***@", text)


def host_port(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
