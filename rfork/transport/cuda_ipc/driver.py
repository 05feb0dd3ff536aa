"""The seam to the GPUs: what the cuda_ipc transport asks of a CUDA driver, on either side.

`rfork.transport.cuda_ipc.cuda.CudaDriver` is the real one. Nothing above this seam knows CUDA, so all of it
is tested on machines without a GPU. Devices are numbered as the process sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch

HandleType = Literal["legacy", "descriptor", "fabric", "none"]
"""How an allocation can be shown to another process.

`legacy`: by 64 bytes that name it (memory of cudaMalloc); `descriptor`: by a file descriptor, and `fabric`:
by 64 bytes (memory of cuMemCreate, such as torch's expandable segments); `none`: not at all.
"""
HANDLE_TYPES: Final[tuple[HandleType, ...]] = ("legacy", "descriptor", "fabric", "none")

HANDLE_BYTES: Final = 64


class DriverError(Exception):
    """A call that the driver refused: its name, and the driver's number and text for the reason.

    It never leaves this package: who made the call knows whom it blames.
    """

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.code = code


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of a device's memory: what is shown to another process as a whole."""

    base: int
    size: int
    device: int
    handle_type: HandleType

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.base + self.size


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """What lets another process open an allocation.

    The `descriptor` is whoever's has the handle, to close.
    """

    data: bytes = b""
    descriptor: int | None = None


@dataclass(frozen=True, slots=True)
class ImportedAllocation:
    """An allocation of another process, at `address` of this one, for use by one device of this one."""

    address: int
    size: int
    device: int
    handle_type: HandleType


@dataclass(frozen=True, slots=True)
class CopyOp:
    """`length` bytes from one address to another; either may be a device's."""

    source: int
    target: int
    length: int


class CopyStream(Protocol):
    """Copies on a stream of its own, which waits for no kernel and which no kernel waits for. One thread."""

    def queue(self, copies: Sequence[CopyOp]) -> None:
        """Start copies. Raises DriverError, some of them then being under way."""
        ...

    def done(self) -> bool:
        """Whether all that was queued has ended.

        Raises DriverError when the device failed: then it has, too.
        """
        ...

    def close(self) -> None:
        """Let the stream go; after its copies have ended."""
        ...


class Driver(Protocol):
    """Thread-safe. Every method but `device_of` raises DriverError."""

    def device_of(self, storage: torch.UntypedStorage) -> int | None:
        """The device that a storage lies on; None: in host memory."""
        ...

    def uuid(self, device: int) -> str:
        """What the device is called in every process."""
        ...

    def device_index(self, uuid: str) -> int | None:
        """The device of that name; None: this process does not see it."""
        ...

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether a device can address another one's memory, or is that one."""
        ...

    def allocation(self, device: int, address: int) -> Allocation:
        """The allocation of this process that an address on a device lies in. Runs on both sides."""
        ...

    def export(self, allocation: Allocation) -> IpcHandle:
        """Make a handle of an allocation of this process, whose kind is not `none`. Runs on the source."""
        ...

    def open(self, device: int, handle_type: HandleType, handle: IpcHandle, size: int) -> ImportedAllocation:
        """Make an allocation of another process readable by a device of this one. Runs on the target.

        The handle's descriptor may be closed afterwards. Raises DriverError, also where the allocation has
        fewer than `size` bytes.
        """
        ...

    def close(self, opened: ImportedAllocation) -> None:
        """Undo `open`; after all copies out of it have ended."""
        ...

    def copies(self, device: int) -> CopyStream:
        """A new stream of copies to, or for, this device."""
        ...
