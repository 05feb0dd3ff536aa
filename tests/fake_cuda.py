"""GPUs made of shared memory: what lets the cuda_ipc transport run between real processes without a GPU.

A device's memory is files without a name, mapped at one line of addresses; a *legacy* handle names the
process and the file, as CUDA's does, and a descriptor is the file itself. Copies run on a thread of their
own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rfork.image.layout import Layout
from rfork.image.memory import Image
from rfork.image.specs import TensorSpec
from rfork.transport.cuda_ipc.driver import HANDLE_BYTES, Allocation, Copy, DriverError, Handle, Kind, Opened

INVALID_CONTEXT = 201
MAP_FAILED = 205

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED = 0x10
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def _mapped(descriptor: int, size: int, at: int = 0) -> int:
    flags = mmap.MAP_SHARED | (_MAP_FIXED if at else 0)
    address = _libc.mmap(at or None, size, _READ_WRITE, flags, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap failed")
    return int(address)


@dataclass(frozen=True)
class Block:
    """One allocation and the file it is."""

    allocation: Allocation
    descriptor: int


class FakeMemory:
    """The memory of one process's devices; it lives as long as the process."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def allocate(self, size: int, *, block: int, kind: Kind = "legacy", device: int = 0) -> torch.Tensor:
        """Zeros of so many bytes, in allocations of `block` bytes (whole pages), side by side."""
        total = -(-size // block) * block
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = int(_libc.mmap(None, total, 0, reserved, -1, 0))
        for offset in range(0, total, block):
            descriptor = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, block)
            _mapped(descriptor, block, base + offset)
            self.blocks.append(Block(Allocation(base + offset, block, device, kind), descriptor))
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(base), dtype=torch.uint8)

    def find(self, address: int) -> Block | None:
        """The block that an address lies in."""
        found = [one for one in self.blocks if one.allocation.base <= address < one.allocation.end]
        return found[0] if found else None


@dataclass
class FakeDriver:
    """`Driver` over `FakeMemory`, with faults on demand."""

    memory: FakeMemory
    uuids: Sequence[str] = ("gpu-0",)
    peers: bool = True
    refuses: int | None = None
    """The code that every `open` is refused with."""
    running: threading.Event = field(default_factory=threading.Event)
    """While it is not set, no copy goes on."""
    queued: threading.Event = field(default_factory=threading.Event)
    """Set once copies have been queued."""
    streams: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released for each `queue` of copies."""
    refused_kinds: Sequence[Kind] = ("legacy", "descriptor", "fabric")
    """Those that `refuses` is for."""
    fails: bool = False
    opened: list[Opened] = field(default_factory=list)
    exports: list[int] = field(default_factory=list)
    copied: list[Copy] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What a real device would have crashed at."""

    def __post_init__(self) -> None:
        self.running.set()
        self._lock = threading.Lock()

    def place(self, storage: torch.UntypedStorage) -> int | None:
        found = self.memory.find(storage.data_ptr())
        return found.allocation.device if found else None

    def uuid(self, device: int) -> str:
        return self.uuids[device]

    def find(self, uuid: str) -> int | None:
        return list(self.uuids).index(uuid) if uuid in self.uuids else None

    def reaches(self, device: int, peer: int) -> bool:
        return self.peers or device == peer

    def allocation(self, device: int, address: int) -> Allocation:
        found = self.memory.find(address)
        if found is None:
            raise DriverError("cuMemGetAddressRange_v2", 1, "invalid argument")
        return found.allocation

    def export(self, allocation: Allocation) -> Handle:
        found = self.memory.find(allocation.base)
        if found is None:
            raise DriverError("cuIpcGetMemHandle", 1, "invalid argument")
        self.exports.append(allocation.base)
        if allocation.kind == "descriptor":
            return Handle(descriptor=os.dup(found.descriptor))
        return Handle(f"{os.getpid()}:{found.descriptor}".encode().ljust(HANDLE_BYTES, b"\0"))

    def open(self, device: int, kind: Kind, handle: Handle, size: int) -> Opened:
        if self.refuses is not None and kind in self.refused_kinds:
            raise DriverError("cuIpcOpenMemHandle_v2", self.refuses, "invalid device context")
        if kind == "descriptor":
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
            opened = Opened(_mapped(descriptor, size), size, device, kind)
        finally:
            os.close(descriptor)
        with self._lock:
            self.opened.append(opened)
        return opened

    def close(self, opened: Opened) -> None:
        with self._lock:
            self.opened.remove(opened)
        _libc.munmap(opened.address, opened.size)

    def copies(self, device: int) -> FakeCopies:
        return FakeCopies(self)

    def copy(self, wanted: Copy) -> None:
        """Copy, unless that would crash."""
        with self._lock:
            for one in self.opened:
                if one.address <= wanted.source and wanted.source + wanted.length <= one.address + one.size:
                    ctypes.memmove(wanted.target, wanted.source, wanted.length)
                    self.copied.append(wanted)
                    return
            self.wrong.append(f"a copy from {wanted.source:#x}, where nothing is opened")


class FakeCopies:
    """`Copies` on a thread that lives from one `queue` to the last copy."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self._left: deque[Copy] = deque()
        self._thread: threading.Thread | None = None

    def queue(self, copies: Sequence[Copy]) -> None:
        if self._driver.fails:
            raise DriverError("cuMemcpyAsync", 700, "an illegal memory access was encountered")
        self._left.extend(copies)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._driver.queued.set()
        self._driver.streams.release()

    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        if not self.done():
            self._driver.wrong.append("a stream was let go while copies were under way on it")

    def _run(self) -> None:
        while self._left:
            self._driver.running.wait()
            self._driver.copy(self._left.popleft())


def pattern(index: int, size: int) -> torch.Tensor:
    """Bytes that differ between tensors and between places."""
    period = ((torch.arange(251) * 7 + index * 13 + 1) % 251).to(torch.uint8)
    return period.repeat(size // 251 + 1)[:size].clone()


def image_in(
    memory: FakeMemory,
    sizes: Sequence[int],
    *,
    on_host: Sequence[int] = (),
    filled: bool = False,
    block: int = 1 << 20,
    align: int = 512,
    kind: Kind = "legacy",
    device: int = 0,
) -> Image:
    """An image of byte tensors in device memory, but those numbered `on_host`; zeros unless `filled`.

    As torch's allocator has them: side by side, each from a multiple of `align` bytes on.
    """
    places = [-(-size // align) * align for size in sizes]
    line = memory.allocate(max(sum(places), 1), block=block, kind=kind, device=device)
    specs: list[TensorSpec] = []
    tensors: list[torch.Tensor] = []
    at = offset = 0
    for index, (size, place) in enumerate(zip(sizes, places, strict=True)):
        host = torch.zeros(size, dtype=torch.uint8)
        tensors.append(host if index in on_host else line[at : at + size])
        if filled:
            tensors[-1].copy_(pattern(index, size))
        specs.append(TensorSpec(f"t{index}", "uint8", (size,), (1,), offset))
        at, offset = at + place, offset + size
    return Image(Layout(tuple(specs), offset), tensors)
