"""gloo: process groups over TCP between host memories.

A group's sockets listen on this instance's own address and on a port that the system picks; gloo asks
nobody who connects for anything. What a reader tells of where it listens is checked before it is believed.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import cast

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Work

from rfork.errors import SourceGone, SourceStalled, TransportUnusable
from rfork.image.memory import Image
from rfork.transport.collective.group import Process, broken
from rfork.transport.collective.rendezvous import Keys, KeyStore

BLOCK_BYTES = 16 << 20
POISON_S = 0.001
POISON_TAG = 1
GRACE_S = 2.0
LONGEST_HOSTNAME = 255
ADDRESS_BYTES = 136
"""A `sockaddr_storage` and a sequence number: how gloo tells where a rank listens."""


class GlooBackend:
    """Makes gloo groups that listen on `address`; see `Backend`."""

    name = "gloo"
    block_bytes = BLOCK_BYTES

    def __init__(self, address: str) -> None:
        self._address = address

    def version(self) -> str:
        """torch's: gloo has none of its own, and what it sends changed between torch's releases."""
        return ".".join(torch.__version__.split("+")[0].split(".")[:2])

    def fits(self, version: str) -> bool:
        """Whether it is the same."""
        return version == self.version()

    def device(self, image: Image) -> torch.device:
        """The CPU; see `Backend.device`."""
        if any(device.type != "cpu" for device in image.devices):
            raise TransportUnusable(
                f"gloo gives host memory alone, and the image lies on {image.device}",
                hint="use nccl or http for weights on a GPU",
            )
        return torch.device("cpu")

    def working(self, device: torch.device) -> AbstractContextManager[None]:
        """Nothing: host memory has no streams."""
        return nullcontext()

    def form(self, keys: Keys, rank: int, size: int, device: torch.device, deadline: float) -> GlooGroup:
        """See `Backend.form`."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _left(deadline)
        options._threads = 1
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
            group = ProcessGroupGloo(KeyStore(keys, deadline), rank, size, options)
        except RuntimeError as error:
            raise broken(error, "no gloo group could be formed") from None
        return GlooGroup(cast(Process, group), rank)

    def sent_by_source(self, readers: int) -> int:
        """gloo broadcasts along a binomial tree: the source sends to every power of two."""
        return readers.bit_length()

    def admits(self, key: str, value: bytes, rank: int, size: int, address: str) -> bool:
        """A reader tells where it itself listens, on the host that its channel was opened from."""
        return key == f"0/{rank}" and listens_at(value, size) == ipaddress.ip_address(address)


class GlooGroup:
    """See `Group`."""

    def __init__(self, group: Process, rank: int) -> None:
        self._group: Process | None = group
        self._peer = 0 if rank else 1
        self._lock = threading.Lock()
        self._aborted = False

    def send(self, block: torch.Tensor, rank: int, deadline: float) -> None:
        """See `Group.send`."""
        self._move(lambda group: group.send([block], rank, 0), deadline)

    def receive(self, block: torch.Tensor, deadline: float) -> None:
        """See `Group.receive`."""
        self._move(lambda group: group.recv([block], 0, 0), deadline)

    def broadcast(self, block: torch.Tensor, deadline: float) -> None:
        """See `Group.broadcast`."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, _left(deadline)
        self._move(lambda group: group.broadcast([block], options), deadline, GRACE_S)

    def _move(self, begin: Callable[[Process], Work], deadline: float, grace_s: float = 0.0) -> None:
        with self._lock:
            if self._aborted or self._group is None:
                raise SourceGone("the gloo group is over")
            if time.monotonic() >= deadline:
                raise SourceStalled("no time is left for the next block")
            try:
                work = begin(self._group)
            except RuntimeError as error:
                raise broken(error, "gloo") from None
        try:
            work.wait(_left(deadline) + timedelta(seconds=grace_s))
        except RuntimeError as error:
            self.abort()
            # A broadcast runs on a thread of gloo's: it has ended once this returns or raises.
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=GRACE_S))
            raise broken(error, "gloo") from None

    def abort(self) -> None:
        """See `Group.abort`.

        gloo has no abort (`ProcessGroupGloo.abort` leaves what waits waiting). What ends it is a receive
        that times out: that closes all connections of the group, and whoever waits on one raises.
        """
        with self._lock:
            if self._aborted or self._group is None:
                return
            self._aborted = True
            with suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self._group.recv([nothing], self._peer, POISON_TAG).wait(timedelta(seconds=POISON_S))

    def close(self) -> None:
        """See `Group.close`."""
        self.abort()
        with self._lock:
            self._group = None


def listens_at(value: bytes, size: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address in what a rank of a group of `size` tells of itself; None: gloo did not write that.

    Its host's name, its address, a number for each rank; each of the first two behind its length.
    """
    if len(value) < 8:
        return None
    (named,) = struct.unpack_from("=Q", value)
    if named > LONGEST_HOSTNAME or len(value) != 8 + named + 8 + ADDRESS_BYTES + 8 * size:
        return None
    length, family = struct.unpack_from("=QH", value, 8 + named)
    if length != ADDRESS_BYTES:
        return None
    at = 8 + named + 8
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(value[at + 4 : at + 8])
    return ipaddress.IPv6Address(value[at + 8 : at + 24]) if family == socket.AF_INET6 else None


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))
