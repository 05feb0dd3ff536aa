"""Interface to a CUDA driver, used by both sides of the cuda_ipc transport.

`rfork.transport.cuda_ipc.cuda.CudaDriver` implements it with libcuda. No other module uses CUDA, so all of
them are tested on machines without a GPU. Device numbers are those visible to the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch

HandleType = Literal["legacy", "descriptor", "fabric", "none"]
"""Mechanism by which an allocation can be shared with another process.

`legacy`: 64-byte handle (memory of cudaMalloc); `descriptor`: file descriptor, and `fabric`: 64-byte handle
(memory of cuMemCreate, such as torch's expandable segments); `none`: cannot be shared.
"""
HANDLE_TYPES: Final[tuple[HandleType, ...]] = ("legacy", "descriptor", "fabric", "none")

HANDLE_BYTES: Final = 64


class DriverError(Exception):
    """A driver call failed: its name, and the driver's error code and text.

    Never raised outside this package: the caller converts it to an error that blames the right side.
    """

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.code = code


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of device memory: the unit that is shared with another process."""

    base: int
    size: int
    device: int
    handle_type: HandleType

    @property
    def end(self) -> int:
        """First address after the allocation."""
        return self.base + self.size


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """Handle with which another process opens an allocation.

    The owner of the handle closes the `descriptor`.
    """

    data: bytes = b""
    descriptor: int | None = None


@dataclass(frozen=True, slots=True)
class ImportedAllocation:
    """An allocation of another process, mapped at `address` in this one for one of its devices."""

    address: int
    size: int
    device: int
    handle_type: HandleType


@dataclass(frozen=True, slots=True)
class CopyOp:
    """Copy of `length` bytes between two addresses; either may be on a device."""

    source: int
    target: int
    length: int


class CopyStream(Protocol):
    """Copies on a separate stream, independent of all kernels. Used by one thread."""

    def queue(self, copies: Sequence[CopyOp]) -> None:
        """Start copies. Raises DriverError; some of them may then be running."""
        ...

    def done(self) -> bool:
        """Return True if all queued copies have finished.

        Raises DriverError if the device failed; they have then finished too.
        """
        ...

    def close(self) -> None:
        """Destroy the stream, after its copies have finished."""
        ...


class Driver(Protocol):
    """Driver of the GPUs visible to this process. Thread-safe. Every method except `device_of` raises
    DriverError.
    """

    def device_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the device of a storage; None for host memory."""
        ...

    def uuid(self, device: int) -> str:
        """Return the device's UUID, which is the same in every process."""
        ...

    def device_index(self, uuid: str) -> int | None:
        """Return the device with this UUID; None if it is not visible to this process."""
        ...

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Return True if the devices are equal or `device` can address the memory of `peer`."""
        ...

    def allocation(self, device: int, address: int) -> Allocation:
        """Return the allocation of this process that contains a device address. Runs on both sides."""
        ...

    def export(self, allocation: Allocation) -> IpcHandle:
        """Create a handle of an allocation of this process whose handle type is not `none`. Runs on the
        source.
        """
        ...

    def open(self, device: int, handle_type: HandleType, handle: IpcHandle, size: int) -> ImportedAllocation:
        """Map an allocation of another process for a device of this one. Runs on the target.

        The handle's descriptor may be closed afterwards. Raises DriverError, also if the allocation has fewer
        than `size` bytes.
        """
        ...

    def close(self, opened: ImportedAllocation) -> None:
        """Undo `open`, after all copies from it have finished."""
        ...

    def copy_stream(self, device: int) -> CopyStream:
        """Create a stream for copies by this device."""
        ...
