"""The port of a gloo group, shut but for the hosts of the group before anybody is told of it."""

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
"""A `sockaddr_storage` and a sequence number: how gloo tells where a rank listens."""


@dataclass(frozen=True)
class ListenAddress:
    """Where a rank says that it listens."""

    host: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int


class FirewalledStore:
    """A group's keys, as gloo sees them: it tells where it listens once nobody else reaches that port.

    `readers`: on the source, the address of the readers' host; on a reader, empty. gloo gives its own
    ranks no way to know one another: who connects first has a rank's place. So where somebody came before
    the filter was there, the group does not form.
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
        here = self._read(value)
        self.port.add(here.port)
        if self.port.cut():
            raise SourceUnavailable("a stranger came to the port of a gloo group before it was shut")
        if self._rank:
            self.port.allow(
                "source", str(self._read(self._keys.get_values(["0/0"], self._deadline, wait=True)[0]).host)
            )
            self.port.allow("readers", str(here.host))  # those of the group are on one host
        else:
            self.port.allow("readers", self._readers)

    def _read(self, value: bytes | None) -> ListenAddress:
        at = parse_listen_address(value or b"", self._size)
        if at is None:
            raise SourceUnavailable("gloo does not say where it listens as this version of torch should")
        return at


def parse_listen_address(value: bytes, size: int) -> ListenAddress | None:
    """Address and port in what a rank of a group of `size` tells of itself; None: gloo did not write that.

    Its host's name, its address, a number for each rank; each of the first two behind its length.
    """
    if len(value) < 8:
        return None
    (named,) = struct.unpack_from("=Q", value)
    if named > MAX_HOSTNAME_CHARS or len(value) != 8 + named + 8 + ADDRESS_BYTES + 8 * size:
        return None
    length, family = struct.unpack_from("=QH", value, 8 + named)
    if length != ADDRESS_BYTES:
        return None
    at = 8 + named + 8
    (port,) = struct.unpack_from("!H", value, at + 2)
    if family == socket.AF_INET:
        return ListenAddress(ipaddress.IPv4Address(value[at + 4 : at + 8]), port)
    if family == socket.AF_INET6:
        return ListenAddress(ipaddress.IPv6Address(value[at + 8 : at + 24]), port)
    return None
