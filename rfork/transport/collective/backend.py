"""Interface of a process group that transfers tensors, implemented by gloo and NCCL."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch.distributed import BroadcastOptions, Work

from rfork.errors import RforkError, SourceTimeout, SourceUnavailable
from rfork.image.memory import Image
from rfork.transport.collective.key_store import KeyValueStore


class TorchProcessGroup(Protocol):
    """Methods of torch's process groups that its annotations lack."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Start a send."""
        ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Start a receive."""
        ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions, /) -> Work:
        """Start a broadcast."""
        ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> Work: ...


class CollectiveGroup(Protocol):
    """One rank's view of a process group: rank 0 is the source, the others are readers.

    One thread transfers, any thread may abort. `deadline`s are `time.monotonic()` values. `send`, `receive`
    and `broadcast` raise SourceTimeout at the deadline, and SourceUnavailable if a rank died or the group was
    aborted. The group is then unusable, and the tensor is no longer read or written.
    """

    def send(self, block: torch.Tensor, rank: int, deadline: float) -> None:
        """On the source: send a 1-D uint8 tensor to one reader."""
        ...

    def receive(self, block: torch.Tensor, deadline: float) -> None:
        """On a reader: fill the tensor with the bytes that the source sends to this rank."""
        ...

    def broadcast(self, block: torch.Tensor, deadline: float) -> None:
        """On all ranks: copy the source's tensor into the readers' tensors."""
        ...

    def abort(self) -> None:
        """Abort the current transfer, from any thread; returns soon. Idempotent, also after `close`."""
        ...

    def close(self) -> None:
        """Release all resources, on the thread that transfers."""
        ...


class Backend(Protocol):
    """Creates groups: gloo or NCCL."""

    name: str
    block_bytes: int
    """Maximum size of one transfer."""
    form_timeout_s: float
    """Maximum time for forming a group; the remaining readers then join the next one."""
    open_to: str
    """Clients that can join a group without authentication, and so read the weights or crash the process; for
    the warning.
    """

    def version(self) -> str:
        """Return the library's version, which the other side compares before it joins."""
        ...

    def is_compatible(self, version: str) -> bool:
        """Return True if this version can form a group with the other side's version."""
        ...

    def device(self, image: Image) -> torch.device:
        """Return the device for blocks of this image. Raises TransportUnavailable for an image on an
        unsupported device.
        """
        ...

    def transfer_context(self, device: torch.device) -> AbstractContextManager[None]:
        """Context for all work of a thread on a group and its blocks: the only place that sets the thread's
        device and stream.
        """
        ...

    def form(
        self, keys: KeyValueStore, rank: int, size: int, readers: str, device: torch.device, deadline: float
    ) -> CollectiveGroup:
        """Join a group as `rank`; return when all ranks have joined. Raises SourceUnavailable or
        SourceTimeout, soon after the deadline or after `keys` was closed.

        `readers`: on the source, the IP address of the readers' host; on a reader, empty.
        """
        ...

    def broadcast_copies(self, readers: int) -> int:
        """Return how many times the source sends the bytes of one broadcast to this many readers."""
        ...

    def may_set(self, key: str, value: bytes, rank: int, size: int, address: str) -> bool:
        """On the source: return True if the reader with this rank and IP address may set this key."""
        ...


def group_error(error: Exception, name: str) -> RforkError:
    """Convert an error of a process group to the error that readers raise."""
    text = " ".join(str(error).split())
    if "imed out" in text or "imeout" in text or "deadline" in text:
        return SourceTimeout(f"{name}: {text}")
    return SourceUnavailable(f"{name}: {text}")
