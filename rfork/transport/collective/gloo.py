"""gloo backend: process groups over TCP between host memories.

A group listens on this instance's own address and on a port that the system selects. gloo does not
authenticate clients, and one malformed message from a rank ends the process. So a packet filter restricts
that port to the hosts of the group (`FirewalledStore`), and the listen address that a reader sends is
validated.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Work

from rfork.errors import SourceTimeout, SourceUnavailable, TransportUnavailable
from rfork.image.memory import Image
from rfork.transport.bpf_filter import PacketFilter
from rfork.transport.collective.backend import TorchProcessGroup, group_error
from rfork.transport.collective.key_store import KeyStore, KeyValueStore

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

    @property
    def closed(self) -> bool:
        """See `KeyValueStore.closed`."""
        return self._keys.closed

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


BLOCK_BYTES = 16 << 20
POISON_S = 0.001
POISON_TAG = 1
GRACE_S = 2.0


class GlooBackend:
    """Creates gloo groups that listen on `address`; see `Backend`."""

    name = "gloo"
    block_bytes = BLOCK_BYTES
    form_timeout_s = 5.0
    open_to = "every process on a reader's host"

    def __init__(self, address: str) -> None:
        self._address = address

    def version(self) -> str:
        """Return torch's version: gloo has no version, and its protocol has changed between torch releases."""
        return ".".join(torch.__version__.split("+")[0].split(".")[:2])

    def is_compatible(self, version: str) -> bool:
        """Return True if the versions are equal."""
        return version == self.version()

    def device(self, image: Image) -> torch.device:
        """Return the CPU; see `Backend.device`."""
        if any(device.type != "cpu" for device in image.devices):
            raise TransportUnavailable(
                f"gloo serves only host memory, and the image is on {image.device}",
                hint="use nccl or http for weights on a GPU",
            )
        return torch.device("cpu")

    def transfer_context(self, device: torch.device) -> AbstractContextManager[None]:
        """See `Backend.transfer_context`: host memory needs no stream."""
        return nullcontext()

    def form(
        self, keys: KeyValueStore, rank: int, size: int, readers: str, device: torch.device, deadline: float
    ) -> GlooGroup:
        """See `Backend.form`."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _left(deadline)
        options._threads = 1
        store = FirewalledStore(keys, rank, size, readers, deadline)
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
            group = ProcessGroupGloo(KeyStore(store, deadline), rank, size, options)
        except RuntimeError as error:
            store.port.close()
            raise group_error(error, "could not form a gloo group") from None
        except BaseException:  # errors of the key store, unchanged
            store.port.close()
            raise
        return GlooGroup(cast(TorchProcessGroup, group), rank, store.port)

    def broadcast_copies(self, readers: int) -> int:
        """gloo broadcasts along a binomial tree: the source sends to every power of two."""
        return readers.bit_length()

    def may_set(self, key: str, value: bytes, rank: int, size: int, address: str) -> bool:
        """A reader may only publish its own listen address, on the host from which it opened its channel."""
        listen_address = parse_listen_address(value, size)
        return (
            key == f"0/{rank}" and listen_address is not None and listen_address.host == ipaddress.ip_address(address)
        )


class GlooGroup:
    """See `CollectiveGroup`."""

    def __init__(self, group: TorchProcessGroup, rank: int, port: PacketFilter) -> None:
        self._group: TorchProcessGroup | None = group
        self._port = port
        self._peer = 0 if rank else 1
        self._lock = threading.Lock()
        self._aborted = False

    def send(self, block: torch.Tensor, rank: int, deadline: float) -> None:
        """See `CollectiveGroup.send`."""
        self._move(lambda group: group.send([block], rank, 0), deadline)

    def receive(self, block: torch.Tensor, deadline: float) -> None:
        """See `CollectiveGroup.receive`."""
        self._move(lambda group: group.recv([block], 0, 0), deadline)

    def broadcast(self, block: torch.Tensor, deadline: float) -> None:
        """See `CollectiveGroup.broadcast`."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, _left(deadline)
        self._move(lambda group: group.broadcast([block], options), deadline, GRACE_S)

    def _move(self, begin: Callable[[TorchProcessGroup], Work], deadline: float, grace_s: float = 0.0) -> None:
        with self._lock:
            if self._aborted or self._group is None:
                raise SourceUnavailable("the gloo group is closed")
            if time.monotonic() >= deadline:
                raise SourceTimeout("the deadline passed before the next block")
            try:
                work = begin(self._group)
            except RuntimeError as error:
                raise group_error(error, "gloo") from None
        try:
            work.wait(_left(deadline) + timedelta(seconds=grace_s))
        except RuntimeError as error:
            self.abort()
            # A broadcast runs on one of gloo's threads: it has finished once this returns or raises.
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=GRACE_S))
            raise group_error(error, "gloo") from None

    def abort(self) -> None:
        """See `CollectiveGroup.abort`.

        gloo has no abort (`ProcessGroupGloo.abort` does not interrupt pending operations). A receive that
        times out works instead: it closes all connections of the group, and pending operations raise.
        """
        with self._lock:
            if self._aborted or self._group is None:
                return
            self._aborted = True
            with suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self._group.recv([nothing], self._peer, POISON_TAG).wait(timedelta(seconds=POISON_S))

    def close(self) -> None:
        """See `CollectiveGroup.close`."""
        self.abort()
        self._port.close()
        with self._lock:
            self._group = None


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))
