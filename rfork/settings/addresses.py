"""Addresses: this host's own, and how they are written."""

from __future__ import annotations

import re
import socket

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


WILDCARDS = frozenset({"0.0.0.0", "::"})
PROBES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses for documentation, which the default route of each family leads to."""


def own_address(bind: str = "::") -> str:
    """This host's address towards its default route, IPv4 before IPv6; loopback where there is none.

    `bind`: what is listened on. ``0.0.0.0`` takes no IPv6.
    """
    for family, beyond in PROBES:
        if family == socket.AF_INET6 and bind == "0.0.0.0":
            continue
        if (address := _source_of(family, beyond)) is not None:
            return address
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether the address, or name, leads to this host alone."""
    return address in LOOPBACK or address.startswith("127.")


def _source_of(family: socket.AddressFamily, beyond: str) -> str | None:
    """The address that packets to `beyond` are sent from; None where there is no way."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # A connected UDP socket sends nothing: the kernel only picks the source address.
            probe.connect((beyond, 9))
            found = str(probe.getsockname()[0])
    except OSError:
        return None
    # An address of the link alone is no good without the name of the interface, which others do not know.
    return None if is_loopback(found) or found.startswith("fe80:") else found


def redacted(text: str) -> str:
    """The text, without the user names and passwords of URLs in it."""
    # Up to the last @: a password that was not quoted may hold any other character.
    return re.sub(r"(?<=://)\S*@", "***@", text)


def host_port(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
