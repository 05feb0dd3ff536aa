"""Key-value store that installs a packet filter on the port of a gloo group before publishing its address."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rfork.errors import SourceUnavailable
from rfork.transport.bpf_filter import PacketFilter
from rfork.transport.collective.rendezvous import KeyValueStore

MAX_HOSTNAME_CHARS = 255
ADDRESS_BYTES = 136
"""A `sockaddr_storage` and a sequence number: gloo's encoding of a listen address."""


@dataclass(frozen=True)
class ListenAddress:
    """Address that a rank published as its listen address."""

    host: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int


class FirewalledStore:
    """Key-value store for gloo that filters a rank's port before other ranks learn its address.

    `readers`: on the source, the IP address of the readers' host; on a reader, empty. gloo does not
    authenticate its ranks: the first client to connect is accepted as a rank. So if a client connected before
    the filter was installed, the group is not formed.
    """

    def __init__(self, keys: KeyValueStore, rank: int, size: int, readers: str, deadline: float) -> None:
        self._keys, self._rank, self._size = keys, rank, size
        self._readers, self._deadline = readers, deadline
        self.port = PacketFilter()

    def put(self, key: str, value: bytes) -> None:
        """See `KeyValueStore.put`."""
        if key == f"0/{self._rank}":
            self._install_filter(value)
        self._keys.put(key, value)

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        """See `KeyValueStore.get_values`."""
        return self._keys.get_values(keys, deadline, wait=wait)

    def _install_filter(self, value: bytes) -> None:
        own_address = self._read(value)
        self.port.add(own_address.port)
        if self.port.close_unauthorized():
            raise SourceUnavailable(
                "an unauthenticated client connected to the port of a gloo group before it was filtered"
            )
        if self._rank:
            self.port.allow(
                "source", str(self._read(self._keys.get_values(["0/0"], self._deadline, wait=True)[0]).host)
            )
            self.port.allow("readers", str(own_address.host))  # all readers of a group are on one host
        else:
            self.port.allow("readers", self._readers)

    def _read(self, value: bytes | None) -> ListenAddress:
        address = parse_listen_address(value or b"", self._size)
        if address is None:
            raise SourceUnavailable(
                "unexpected format of gloo's listen address; this version of torch is not supported"
            )
        return address


def parse_listen_address(value: bytes, size: int) -> ListenAddress | None:
    """Parse the address and the port that a rank of a group of `size` published; None if the format is not
    gloo's.

    Format: host name and socket address, each preceded by its length, then one number per rank.
    """
    if len(value) < 8:
        return None
    (name_bytes,) = struct.unpack_from("=Q", value)
    if name_bytes > MAX_HOSTNAME_CHARS or len(value) != 8 + name_bytes + 8 + ADDRESS_BYTES + 8 * size:
        return None
    length, family = struct.unpack_from("=QH", value, 8 + name_bytes)
    if length != ADDRESS_BYTES:
        return None
    at = 8 + name_bytes + 8
    (port,) = struct.unpack_from("!H", value, at + 2)
    if family == socket.AF_INET:
        return ListenAddress(ipaddress.IPv4Address(value[at + 4 : at + 8]), port)
    if family == socket.AF_INET6:
        return ListenAddress(ipaddress.IPv6Address(value[at + 8 : at + 24]), port)
    return None
