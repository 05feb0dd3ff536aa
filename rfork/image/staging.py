"""Staging: host memory through which bytes reach devices and disks, and the copies between the two.

`PinnedStaging` double-buffers an image's ranges between a device and transports that send and receive on the
host. A range is processed in steps: while the host sends one step, the next is copied from the device; while
the host receives one, the previous one is copied to it. Two buffers suffice and are reused by the next pass.
However a pass ends, it first waits for its copies: none reads or writes the image's memory afterwards.

Storage reads blocks into buffers of a `BufferPool` and copies them with the same `CudaCopier`. Page size
determines the speed of DMA from a disk: on one disk, 2.0 GB/s into pages of 4 KiB and 3.7 GB/s into pages of
2 MiB were measured.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, Protocol

import torch

from rfork.cuda.device import CopyOp, CudaDriver, CudaEvent, CudaStream, cuda_driver, device_of
from rfork.cuda.library import DriverError
from rfork.image.host_memory import HUGE_PAGE, advise_huge_pages, host_view

STEP_BYTES = 2 << 20
"""Size of a step in bytes. The first copy of a pass overlaps with nothing: 80 us at PCIe 4's 25 GB/s."""
MAX_POOLED_STEPS = 16
"""Maximum number of cached buffers: 32 MiB per image, enough for eight concurrent passes."""
MAX_POOLED_BLOCKS = 2
"""Maximum number of cached buffers for steps of up to `BUFFER_BYTES`, such as blocks of storage. Allocated on demand,
because page-locking costs more than a copy.
"""
BUFFER_BYTES = 16 << 20
"""Size of most reads of storage: larger is not faster, and smaller is slower on striped disks."""
BUFFER_ALIGNMENT = 4096
"""Sufficient alignment for direct reads on every device."""
CPU = torch.device("cpu")


class PendingCopy(Protocol):
    """Copies in progress."""

    def wait(self) -> None:
        """Return when the copies are complete. May be called again."""
        ...


class DeviceCopier(Protocol):
    """Interface to the copy engines of devices, such as CUDA's. Thread-safe."""

    def needs_staging(self, memory: torch.Tensor) -> bool:
        """Return True if the host can reach this memory only by copies."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return host memory (uint8, 1-D) for fast `device_to_host` and `host_to_device` copies."""
        ...

    def device_to_host(self, host: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> PendingCopy:
        """Start copying each device tensor to the host tensor at its position. If it raises, no copy is in progress."""
        ...

    def host_to_device(self, memory: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> PendingCopy:
        """Start copying each host tensor to the device tensor at its position. If it raises, no copy is in progress."""
        ...

    def finish_earlier_work(self) -> None:
        """Wait until memory of the devices may be written without `host_to_device`."""
        ...


def allocate_host(nbytes: int, like_offset: int = 0) -> torch.Tensor:
    """Allocate uninitialised memory (uint8, 1-D, CPU), backed by huge pages when it is written to.

    Its address equals `like_offset` modulo 4096, so that data at that file offset can be read directly past
    the page cache, without a copy. No page is allocated before the first write.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if nbytes < HUGE_PAGE:
        padded = torch.empty(nbytes + BUFFER_ALIGNMENT, dtype=torch.uint8)
        begin = (like_offset - padded.data_ptr()) % BUFFER_ALIGNMENT
        return padded[begin : begin + nbytes]
    mapping = mmap.mmap(-1, nbytes + 2 * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    begin = -address % HUGE_PAGE + like_offset % BUFFER_ALIGNMENT
    advise_huge_pages(address, len(mapping))
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=begin)


class BufferPool:
    """Bounded pool of equally sized buffers, allocated on first use. Thread-safe.

    A thread that uses one buffer at a time, and waits for nothing meanwhile, cannot cause a deadlock.
    """

    def __init__(
        self,
        memory: int,
        buffer_bytes: int = BUFFER_BYTES,
        make: Callable[[int], torch.Tensor] = allocate_host,
    ) -> None:
        """At most `memory` bytes, but at least one buffer; `make` allocates a buffer."""
        self.buffer_bytes = min(buffer_bytes, memory)
        self._make = make
        self._left = memory // self.buffer_bytes
        self._spare: list[torch.Tensor] = []
        self._changed = threading.Condition()

    def acquire(self) -> torch.Tensor:
        """Return a buffer (uint8, 1-D) that must be released; waits while all are in use."""
        with self._changed:
            self._changed.wait_for(lambda: self._spare or self._left)
            return self._pop_or_allocate()

    def try_acquire(self) -> torch.Tensor | None:
        """Like `acquire`, but return None while all are in use."""
        with self._changed:
            return self._pop_or_allocate() if self._spare or self._left else None

    def release(self, buffer: torch.Tensor) -> None:
        """Return an unused buffer to the pool."""
        with self._changed:
            self._spare.append(buffer)
            self._changed.notify()

    @contextmanager
    def lease(self) -> Iterator[torch.Tensor]:
        """Yield a buffer for the duration of the block."""
        buffer = self.acquire()
        try:
            yield buffer
        finally:
            self.release(buffer)

    def close(self) -> None:
        """Free the memory of unused buffers; new ones may be allocated later."""
        with self._changed:
            self._left += len(self._spare)
            self._spare.clear()
            self._changed.notify_all()

    def _pop_or_allocate(self) -> torch.Tensor:
        if self._spare:
            return self._spare.pop()
        buffer = self._make(self.buffer_bytes)
        self._left -= 1
        return buffer


def pinned_memory(nbytes: int, device: int) -> torch.Tensor:
    """Return page-locked host memory (uint8, 1-D), unlocked when nothing refers to it any more.

    In huge pages: a GPU's copy engine accesses it directly, and disks write fastest to it. `device`: whose context
    locks it; it serves every device. Raises DriverError if it cannot be locked.
    """
    driver = cuda_driver()
    memory = allocate_host(max(nbytes, HUGE_PAGE))  # complete pages: no two buffers may share a locked one
    address = memory.data_ptr()
    try:
        driver.register_host(address, memory.numel(), device)
        release = partial(_unlock, driver, memory, device)  # refers to the memory, which must outlive its lock
    except DriverError:  # some sandboxes and file systems forbid it
        address = driver.allocate_host(nbytes, device)
        release = partial(_free, driver, address, device)
    locked = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(locked, release).atexit = False  # at exit the end of the process releases it
    return torch.frombuffer(locked, dtype=torch.uint8)


def _unlock(driver: CudaDriver, memory: torch.Tensor, device: int) -> None:
    with suppress(DriverError):  # the device failed: its memory is lost anyway
        driver.unregister_host(memory.data_ptr(), device)


def _free(driver: CudaDriver, address: int, device: int) -> None:
    with suppress(DriverError):
        driver.free_host(address, device)


class _Step(NamedTuple):
    buffer: torch.Tensor
    pool: BufferPool | None
    views: list[memoryview]
    memory: list[torch.Tensor]  # tensors on a device,
    host: list[torch.Tensor]  # and their slices of the buffer


class PinnedStaging:
    """The buffers of one image. Thread-safe, but each pass belongs to one thread.

    A step is passed as the tensors (uint8, 1-D) of its bytes in order, including tensors that the host can
    reach.
    """

    def __init__(self, copier: DeviceCopier) -> None:
        self._copier = copier
        self._pools = (
            BufferPool(MAX_POOLED_STEPS * STEP_BYTES, STEP_BYTES, copier.pinned),
            BufferPool(MAX_POOLED_BLOCKS * BUFFER_BYTES, BUFFER_BYTES, copier.pinned),
        )

    def reading(self, steps: Iterable[Sequence[torch.Tensor]]) -> Generator[Sequence[memoryview], None, None]:
        """Yield the bytes of each step as host views, valid until the next step is requested.

        Close the generator when done.
        """
        pending: list[tuple[_Step, PendingCopy]] = []  # at most two: one being read, one being copied
        try:
            for parts in steps:
                step = self._step(parts)
                try:
                    fetching = self._copier.device_to_host(step.host, step.memory)
                except BaseException:
                    self._release(step)
                    raise
                pending.append((step, fetching))
                if len(pending) == 2:
                    yield self._first(pending).views
                    self._release(pending.pop(0)[0])
            if pending:
                yield self._first(pending).views
        finally:
            self._end(pending)

    def writing(self, steps: Iterable[Sequence[torch.Tensor]]) -> Generator[Sequence[memoryview], None, None]:
        """Yield uninitialised host views of each step, to be filled before the next step is requested.

        All filled steps are in the tensors when the generator ends. A step that was not filled when it is
        closed is not written.
        """
        pending: list[tuple[_Step, PendingCopy]] = []  # at most one: the step being copied to the device
        step: _Step | None = None
        try:
            for parts in steps:
                step = self._step(parts)
                yield step.views
                host_to_device = self._copier.host_to_device(step.memory, step.host)
                pending.append((step, host_to_device))
                step = None
                if len(pending) == 2:
                    self._release(self._first(pending))
                    pending.pop(0)
            if pending:
                self._first(pending)
        finally:
            if step is not None:
                self._release(step)
            self._end(pending)

    def _step(self, parts: Sequence[torch.Tensor]) -> _Step:
        staged = [self._copier.needs_staging(part) for part in parts]
        nbytes = sum(part.numel() for part, is_staged in zip(parts, staged, strict=True) if is_staged)
        # Allocate another buffer if all are in use: a pass that waits for its second could cause a deadlock.
        pool = next((pool for pool in self._pools if 0 < nbytes <= pool.buffer_bytes), None)
        pooled = None if pool is None else pool.try_acquire()
        buffer = self._allocate(nbytes) if pooled is None else pooled
        memory: list[torch.Tensor] = []
        host: list[torch.Tensor] = []
        views: list[memoryview] = []
        used = begin = 0  # the bytes of the buffer from `begin` on are in no view yet
        for part, is_staged in zip(parts, staged, strict=True):
            if is_staged:
                memory.append(part)
                host.append(buffer[used : used + part.numel()])
                used += part.numel()
                continue
            if begin < used:
                views.append(_view(buffer[begin:used]))
                begin = used
            views.append(_view(part))
        if begin < used:
            views.append(_view(buffer[begin:used]))
        return _Step(buffer, None if pooled is None else pool, views, memory, host)

    def _first(self, pending: list[tuple[_Step, PendingCopy]]) -> _Step:
        """Wait for the first pending copy and return its step. On failure, wait for and drop all pending copies."""
        step, copying = pending[0]
        try:
            copying.wait()
        except BaseException:
            others = [other.wait for _, other in pending[1:]]
            pending.clear()
            with suppress(Exception):  # report the first failure
                wait_all(others)
            raise
        return step

    def _end(self, pending: list[tuple[_Step, PendingCopy]]) -> None:
        wait_all([copying.wait for _, copying in pending])
        for step, _ in pending:
            self._release(step)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return self._copier.pinned(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)

    def _release(self, step: _Step) -> None:
        if step.pool is not None:
            step.pool.release(step.buffer)


class CudaCopier:
    """`DeviceCopier` for CUDA, on this process's streams: one per direction, so neither waits for the other.

    Copies to a device begin after all work queued so far on the calling thread's current streams: kernels of
    the previous owner may still write to freshly allocated memory.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._driver = cuda_driver()
        self._earlier_work: dict[int, CudaEvent] = {}
        for device in devices:
            event = self._earlier_work[device.index] = self._driver.current_work(device.index)
            self._driver.streams(device.index).to_device.after(event)

    def needs_staging(self, memory: torch.Tensor) -> bool:
        """See `DeviceCopier`."""
        return device_of(memory) != CPU

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `DeviceCopier`. Raises DriverError."""
        return pinned_memory(nbytes, min(self._earlier_work))

    def device_to_host(self, host: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> PendingCopy:
        """See `DeviceCopier`. Raises DriverError."""
        return _begin(lambda device: self._driver.streams(device).to_host, host, memory, memory)

    def host_to_device(self, memory: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> PendingCopy:
        """See `DeviceCopier`. Raises DriverError."""
        return _begin(lambda device: self._driver.streams(device).to_device, memory, host, memory)

    def finish_earlier_work(self) -> None:
        """See `DeviceCopier`. Raises DriverError."""
        wait_all([event.wait for event in self._earlier_work.values()])


class _CudaCopy:
    def __init__(self) -> None:
        self._events: list[CudaEvent] = []

    def record(self, stream: CudaStream) -> None:
        self._events.append(stream.record())

    def wait(self) -> None:
        wait_all([event.wait for event in self._events])


def _begin(
    stream_of: Callable[[int], CudaStream],
    into: Sequence[torch.Tensor],
    source: Sequence[torch.Tensor],
    memory: Sequence[torch.Tensor],
) -> _CudaCopy:
    """Start copies on the streams of the devices; `memory` is the device side of the copies."""
    by_device: dict[int, list[CopyOp]] = {}
    for target, origin, on_device in zip(into, source, memory, strict=True):
        device = device_of(on_device).index
        copy = CopyOp(origin.data_ptr(), target.data_ptr(), target.nbytes)
        by_device.setdefault(device, []).append(copy)
    copying = _CudaCopy()
    begun: list[CudaStream] = []
    try:
        for device, copies in by_device.items():
            stream = stream_of(device)
            begun.append(stream)
            stream.copy(copies)
            copying.record(stream)
    except BaseException:
        for stream in begun:
            with suppress(DriverError):  # the device failed, so its copies have ended
                stream.record().wait()
        raise
    return copying


def wait_all(waits: Iterable[Callable[[], None]]) -> None:
    """Wait for all, even if some raise; then raise the first exception."""
    failed: BaseException | None = None
    for wait in waits:
        try:
            wait()
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _view(memory: torch.Tensor) -> memoryview:
    return host_view(memory.data_ptr(), memory.numel())
