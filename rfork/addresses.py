"""Network addresses: those of this host, and their text form."""

from __future__ import annotations

import re
import socket

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
WILDCARDS = frozenset({"0.0.0.0", "::"})
PROBES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""One address for documentation (RFC 5737, RFC 3849) per family: packets to it follow the default route."""


def own_address(bind: str = "::") -> str:
    """Return this host's address on its default route, IPv4 before IPv6; without one, loopback.

    With `bind` ``0.0.0.0``, no IPv6 address is returned.
    """
    for family, destination in PROBES:
        if family == socket.AF_INET6 and bind == "0.0.0.0":
            continue
        if (address := _source_of(family, destination)) is not None:
            return address
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Return True for an address or name that only this host can reach."""
    return address in LOOPBACK or address.startswith("127.")


def _source_of(family: socket.AddressFamily, destination: str) -> str | None:
    """Return the address that packets to `destination` are sent from, or None without a route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # A connected UDP socket sends nothing: the kernel only picks the source address.
            probe.connect((destination, 9))
            found = str(probe.getsockname()[0])
    except OSError:
        return None
    # A link-local address needs the name of an interface, which other hosts do not know.
    return None if is_loopback(found) or found.startswith("fe80:") else found


def redacted(text: str) -> str:
    """Return the text without the user names and passwords of its URLs."""
    # Up to the last @: an unquoted password may contain any other character.
    return re.sub(r"(?<=://)\S*@", "***@", text)


def host_port(host: str, port: int) -> str:
    """Return host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
