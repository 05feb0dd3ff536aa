"""The seam between the two transports and what they have in common: a group of ranks that moves tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch.distributed import BroadcastOptions, Work

from rfork.errors import RforkError, SourceTimeout, SourceUnavailable
from rfork.image.memory import Image
from rfork.transport.collective.rendezvous import KeyValueStore


class TorchProcessGroup(Protocol):
    """What torch's process groups have, and its annotations lack."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Begin to send."""
        ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Begin to receive."""
        ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions, /) -> Work:
        """Begin to broadcast."""
        ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> Work: ...


class CollectiveGroup(Protocol):
    """One rank's view of a process group: rank 0 is the source, the others are readers.

    One thread moves bytes, any may abort. `deadline`s are `time.monotonic()` values. All that move bytes
    raise SourceTimeout at the deadline, and SourceUnavailable when a rank is gone or the group was aborted; the
    group is then of no use any more, and no byte of that tensor is read or written once they have raised.
    """

    def send(self, block: torch.Tensor, rank: int, deadline: float) -> None:
        """On the source: the bytes of a uint8 tensor, 1-D, to one reader."""
        ...

    def receive(self, block: torch.Tensor, deadline: float) -> None:
        """On a reader: fill the tensor with what the source sends to this rank."""
        ...

    def broadcast(self, block: torch.Tensor, deadline: float) -> None:
        """On all ranks: from the source into the others' tensors."""
        ...

    def abort(self) -> None:
        """End what moves now, from any thread; returns soon. Safe to call twice, and after `close`."""
        ...

    def close(self) -> None:
        """Give all back that it holds, on the thread that moves bytes."""
        ...


class Backend(Protocol):
    """What makes groups: gloo or NCCL."""

    name: str
    block_bytes: int
    """Most bytes that move at once."""
    open_to: str
    """Who may join a group unasked, and so read, or end the process: in words."""

    def version(self) -> str:
        """Of the library: told to the other side before it joins."""
        ...

    def fits(self, version: str) -> bool:
        """Whether ours and the other side's version can form a group."""
        ...

    def device(self, image: Image) -> torch.device:
        """Where blocks of this image have to lie; raises TransportUnavailable for an image on the wrong one."""
        ...

    def working(self, device: torch.device) -> AbstractContextManager[None]:
        """Around all that one thread does with a group and its blocks."""
        ...

    def form(
        self, keys: KeyValueStore, rank: int, size: int, readers: str, device: torch.device, deadline: float
    ) -> CollectiveGroup:
        """Join a group as `rank`; returns once all have. Raises SourceUnavailable or SourceTimeout.

        `readers`: on the source, the IP address of the host that the readers are on; on a reader, empty.
        """
        ...

    def sent_by_source(self, readers: int) -> int:
        """How many times the source sends the bytes of one broadcast to so many readers."""
        ...

    def admits(self, key: str, value: bytes, rank: int, size: int, address: str) -> bool:
        """On the source: whether the reader of this rank, at this IP address, may set this key."""
        ...


def group_error(error: Exception, name: str) -> RforkError:
    """What a failure within a group means to whoever reads."""
    text = " ".join(str(error).split())
    if "imed out" in text or "imeout" in text or "deadline" in text:
        return SourceTimeout(f"{name}: {text}")
    return SourceUnavailable(f"{name}: {text}")
