"""Fake GPUs in shared memory, so that the cuda_ipc transport can run between real processes without a GPU.

A device's memory consists of unnamed files mapped into one address range. As in CUDA, a *legacy* handle names
the process and the file, and a descriptor is the file itself. Copies run on a separate thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from rfork.cuda.device import CopyOp, CudaStream
from rfork.cuda.library import HANDLE_BYTES, DriverError
from rfork.image.layout import Layout, TensorSpec
from rfork.image.memory import Image
from rfork.transport.cuda_ipc.driver import (
    Allocation,
    HandleType,
    ImportedAllocation,
    IpcDriver,
    IpcHandle,
)

INVALID_CONTEXT = 201
MAP_FAILED = 205

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED = 0x10
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def _mapped(descriptor: int, size: int, fixed_address: int = 0) -> int:
    flags = mmap.MAP_SHARED | (_MAP_FIXED if fixed_address else 0)
    address = _libc.mmap(fixed_address or None, size, _READ_WRITE, flags, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap failed")
    return int(address)


@dataclass(frozen=True)
class FakeAllocation:
    """One allocation and its file."""

    allocation: Allocation
    descriptor: int


class FakeMemory:
    """Device memory of one process; it lives as long as the process."""

    def __init__(self) -> None:
        self.blocks: list[FakeAllocation] = []

    def allocate(self, size: int, *, block: int, handle_type: HandleType = "legacy", device: int = 0) -> torch.Tensor:
        """Return zeroed memory of `size` bytes in adjacent allocations of `block` bytes (complete pages)."""
        total = -(-size // block) * block
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = int(_libc.mmap(None, total, 0, reserved, -1, 0))
        for offset in range(0, total, block):
            descriptor = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, block)
            _mapped(descriptor, block, base + offset)
            self.blocks.append(FakeAllocation(Allocation(base + offset, block, device, handle_type), descriptor))
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(base), dtype=torch.uint8)

    def find_block(self, address: int) -> FakeAllocation | None:
        """Return the block that contains an address."""
        found = [one for one in self.blocks if one.allocation.base <= address < one.allocation.end]
        return found[0] if found else None


@dataclass
class FakeDriver(IpcDriver):
    """Driver on top of `FakeMemory`, with faults on demand."""

    memory: FakeMemory
    uuids: Sequence[str] = ("gpu-0",)
    has_peer_access: bool = True
    open_error_code: int | None = None
    """Error code that every `open` raises."""
    running: threading.Event = field(default_factory=threading.Event)
    """Copies run only while it is set."""
    queued: threading.Event = field(default_factory=threading.Event)
    """Set once copies have been queued."""
    streams: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released for each `copy`."""
    rejected_handle_types: Sequence[HandleType] = ("legacy", "descriptor", "fabric")
    """Handle types for which `open_error_code` is raised."""
    copies_fail: bool = False
    opened: list[ImportedAllocation] = field(default_factory=list)
    exports: list[int] = field(default_factory=list)
    completed_copies: list[CopyOp] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    """Accesses at which a real device would have crashed."""

    def __post_init__(self) -> None:
        self.running.set()
        self._lock = threading.Lock()

    def device_of(self, storage: torch.UntypedStorage) -> int | None:
        found = self.memory.find_block(storage.data_ptr())
        return found.allocation.device if found else None

    def uuid(self, device: int) -> str:
        return self.uuids[device]

    def device_index(self, uuid: str) -> int | None:
        return list(self.uuids).index(uuid) if uuid in self.uuids else None

    def can_access_peer(self, device: int, peer: int) -> bool:
        return self.has_peer_access or device == peer

    def allocation(self, device: int, address: int) -> Allocation:
        found = self.memory.find_block(address)
        if found is None:
            raise DriverError("cuMemGetAddressRange_v2", 1, "invalid argument")
        return found.allocation

    def export(self, allocation: Allocation) -> IpcHandle:
        found = self.memory.find_block(allocation.base)
        if found is None:
            raise DriverError("cuIpcGetMemHandle", 1, "invalid argument")
        self.exports.append(allocation.base)
        if allocation.handle_type == "descriptor":
            return IpcHandle(descriptor=os.dup(found.descriptor))
        return IpcHandle(f"{os.getpid()}:{found.descriptor}".encode().ljust(HANDLE_BYTES, b"\0"))

    def open(self, device: int, handle_type: HandleType, handle: IpcHandle, size: int) -> ImportedAllocation:
        if self.open_error_code is not None and handle_type in self.rejected_handle_types:
            raise DriverError("cuIpcOpenMemHandle_v2", self.open_error_code, "invalid device context")
        if handle_type == "descriptor":
            descriptor = os.dup(handle.descriptor or 0)
        else:
            try:
                pid, number = handle.data.rstrip(b"\0").decode().split(":")
                descriptor = os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
            except (ValueError, OSError) as error:
                raise DriverError("cuIpcOpenMemHandle_v2", MAP_FAILED, str(error)) from None
        try:
            if os.fstat(descriptor).st_size < size:
                raise DriverError("cuMemMap", 1, "invalid argument")
            opened = ImportedAllocation(_mapped(descriptor, size), size, device, handle_type)
        finally:
            os.close(descriptor)
        with self._lock:
            self.opened.append(opened)
        return opened

    def close(self, opened: ImportedAllocation) -> None:
        with self._lock:
            self.opened.remove(opened)
        _libc.munmap(opened.address, opened.size)

    def copy_stream(self, device: int) -> FakeCopyStream:
        return FakeCopyStream(self)

    def copy(self, request: CopyOp) -> None:
        """Copy, unless a real device would crash."""
        with self._lock:
            for one in self.opened:
                if one.address <= request.source and request.source + request.length <= one.address + one.size:
                    ctypes.memmove(request.target, request.source, request.length)
                    self.completed_copies.append(request)
                    return
            self.violations.append(f"a copy from {request.source:#x}, where nothing is mapped")


class FakeCopyStream(CudaStream):
    """Copy stream on a thread that runs from one `copy` to the last copy."""

    def __init__(self, driver: FakeDriver) -> None:
        self._fake = driver
        self._pending: deque[CopyOp] = deque()
        self._thread: threading.Thread | None = None

    def copy(self, copies: Iterable[CopyOp]) -> None:
        if self._fake.copies_fail:
            raise DriverError("cuMemcpyAsync", 700, "an illegal memory access was encountered")
        self._pending.extend(copies)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._fake.queued.set()
        self._fake.streams.release()

    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        if not self.done():
            self._fake.violations.append("a stream was released while copies were running on it")

    def _run(self) -> None:
        while self._pending:
            self._fake.running.wait()
            self._fake.copy(self._pending.popleft())


def pattern(index: int, size: int) -> torch.Tensor:
    """Return bytes that differ between tensors and between offsets."""
    period = ((torch.arange(251) * 7 + index * 13 + 1) % 251).to(torch.uint8)
    return period.repeat(size // 251 + 1)[:size].clone()


def fake_device_image(
    memory: FakeMemory,
    sizes: Sequence[int],
    *,
    on_host: Sequence[int] = (),
    filled: bool = False,
    block: int = 1 << 20,
    align: int = 512,
    handle_type: HandleType = "legacy",
    device: int = 0,
) -> Image:
    """Return an image of byte tensors in device memory, except those with an index in `on_host`; zeros unless
    `filled`.

    Tensors are adjacent and aligned to `align` bytes, as with torch's allocator.
    """
    padded_sizes = [-(-size // align) * align for size in sizes]
    buffer = memory.allocate(max(sum(padded_sizes), 1), block=block, handle_type=handle_type, device=device)
    specs: list[TensorSpec] = []
    tensors: list[torch.Tensor] = []
    device_offset = offset = 0
    for index, (size, padded_size) in enumerate(zip(sizes, padded_sizes, strict=True)):
        host = torch.zeros(size, dtype=torch.uint8)
        tensors.append(host if index in on_host else buffer[device_offset : device_offset + size])
        if filled:
            tensors[-1].copy_(pattern(index, size))
        specs.append(TensorSpec(f"t{index}", "uint8", (size,), (1,), offset))
        device_offset, offset = device_offset + padded_size, offset + size
    return Image(Layout(tuple(specs), offset), tensors)
