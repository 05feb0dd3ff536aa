"""Contexts, streams, events, copies and pinned memory of the GPUs visible to this process. For both sides.

Device numbers are torch's, which are those of the driver.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from ctypes import byref, c_int, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch

from rfork.cuda import library as cuda
from rfork.cuda.library import CudaDriverLibrary, DriverError
from rfork.errors import GpuDirectUnavailable, TargetError


class TorchDevices:
    """Devices of memory and streams of threads, from torch. Tests replace the functions for a fake GPU."""

    @staticmethod
    def has_gpu() -> bool:
        """Return True if torch finds an NVIDIA GPU."""
        return torch.version.cuda is not None and torch.cuda.is_available()

    @staticmethod
    def device_of(memory: torch.Tensor | torch.UntypedStorage) -> torch.device:
        """Return the device of memory."""
        return memory.device

    @staticmethod
    def current_stream(device: int) -> int:
        """Return the handle of the stream on which this thread's torch operations run."""
        return int(torch.cuda.current_stream(device).cuda_stream)


def device_of(memory: torch.Tensor | torch.UntypedStorage) -> torch.device:
    """Return the device of memory."""
    return TorchDevices.device_of(memory)


@dataclass(frozen=True, slots=True)
class CopyOp:
    """Copy of `length` bytes between two addresses; either may be on a device."""

    source: int
    target: int
    length: int


class CudaDriver:
    """Driver of the GPUs visible to this process. Thread-safe. Methods raise DriverError.

    The constructor raises TransportUnavailable or a subclass without a suitable driver.
    """

    def __init__(self) -> None:
        self.library = CudaDriverLibrary()
        self.library.call("cuInit", 0)
        self._lock = threading.Lock()
        # Never released: torch retains them too until the process ends.
        self._contexts: dict[int, int] = {}
        self._streams: dict[int, DeviceStreams] = {}

    @contextlib.contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Make a device's primary context, which torch uses too, current on this thread within the block.

        Also relaxes the thread's capture mode. Torch's operations within the block use the device too: CUDA's
        runtime takes the thread's device from its current context. May be nested.
        """
        call = self.library.call
        context, mode = self._context(device), c_int(cuda.STREAM_CAPTURE_MODE_RELAXED)
        call("cuCtxPushCurrent_v2", context)
        try:
            call("cuThreadExchangeStreamCaptureMode", byref(mode))
            try:
                yield
            finally:
                call("cuThreadExchangeStreamCaptureMode", byref(mode))
        finally:
            call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def streams(self, device: int) -> DeviceStreams:
        """Return this process's streams on a device."""
        with self._lock:
            found = self._streams.get(device)
        if found is not None:
            return found
        created = DeviceStreams(*(CudaStream(self, device) for _ in DeviceStreams.__slots__))
        with self._lock:
            found = self._streams.setdefault(device, created)
        if found is not created:  # another thread was faster
            created.close()
        return found

    def current_work(self, device: int) -> CudaEvent:
        """Return an event after all work that this thread has queued so far on its current torch stream."""
        return CudaEvent(self, device, TorchDevices.current_stream(device))

    def register_host(self, address: int, nbytes: int, device: int) -> None:
        """Page-lock complete pages of host memory for copies by any device."""
        with self.on_device(device):
            self.library.call("cuMemHostRegister_v2", address, nbytes, cuda.MEMHOSTREGISTER_PORTABLE)

    def unregister_host(self, address: int, device: int) -> None:
        """Undo `register_host`, before the memory is freed."""
        with self.on_device(device):
            self.library.call("cuMemHostUnregister", address)

    def allocate_host(self, nbytes: int, device: int) -> int:
        """Return the address of new page-locked host memory for copies by any device."""
        address = c_void_p()
        with self.on_device(device):
            self.library.call("cuMemHostAlloc", byref(address), nbytes, cuda.MEMHOSTALLOC_PORTABLE)
        return address.value or 0

    def free_host(self, address: int, device: int) -> None:
        """Undo `allocate_host`."""
        with self.on_device(device):
            self.library.call("cuMemFreeHost", address)

    def ordinal(self, device: int) -> int:
        """Return the driver's handle of a device."""
        found = c_int()
        self.library.call("cuDeviceGet", byref(found), device)
        return found.value

    def attribute(self, device: int, attribute: int) -> int:
        """Return an attribute of a device."""
        value = c_int()
        self.library.call("cuDeviceGetAttribute", byref(value), attribute, self.ordinal(device))
        return value.value

    def pointer_attribute(self, attribute: int, address: int) -> int:
        """Return an attribute of a device address. Called within `on_device`."""
        # 64 bits: drivers write 4 or 8 bytes, and all CUDA platforms are little-endian.
        value = c_uint64()
        self.library.call("cuPointerGetAttribute", byref(value), attribute, address)
        return value.value

    def _context(self, device: int) -> int:
        with self._lock:
            if device not in self._contexts:
                context = c_void_p()
                self.library.call("cuDevicePrimaryCtxRetain", byref(context), self.ordinal(device))
                self._contexts[device] = context.value or 0
            return self._contexts[device]


@cache
def cuda_driver() -> CudaDriver:
    """Return this process's driver. Raises TransportUnavailable or a subclass without a suitable one."""
    return CudaDriver()


def current_work(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Return a function that waits for all work that this thread has queued so far on its current torch streams.

    Any thread may call it. Raises DriverError, as does the function.
    """
    events = [cuda_driver().current_work(device.index) for device in devices]

    def wait() -> None:
        for event in events:
            event.wait()

    return wait


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Run all CUDA work of the block on a GPU: see `CudaDriver.on_device`. Does nothing for another device."""
    if device.type != "cuda":
        yield
        return
    with cuda_driver().on_device(device.index):
        yield


def must_flush_rdma_writes(device: torch.device) -> bool:
    """Return True if `flush_rdma_writes` must be called after network cards have written to a GPU.

    Raises GpuDirectUnavailable for a GPU that neither orders such writes itself nor can flush them.
    """
    driver, index = cuda_driver(), device.index
    try:
        ordering = driver.attribute(index, cuda.DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
        options = driver.attribute(index, cuda.DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)
    except DriverError as error:
        raise GpuDirectUnavailable(
            f"the driver does not state how {device} orders the writes of network cards: {error}",
            hint="use RFORK_TRANSPORTS=http",
        ) from error
    if ordering >= cuda.GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER:
        return False
    if not options & cuda.FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST:
        raise GpuDirectUnavailable(
            f"{device} neither orders the writes of network cards nor can flush them",
            hint="use RFORK_TRANSPORTS=http",
        )
    return True


def flush_rdma_writes(device: torch.device) -> None:
    """Make bytes that network cards have written to a GPU visible to its kernels and copies. Runs on the target.

    Raises TargetError if the GPU fails.
    """
    driver = cuda_driver()
    try:
        with driver.on_device(device.index):
            driver.library.call(
                "cuFlushGPUDirectRDMAWrites",
                cuda.FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                cuda.FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
            )
    except DriverError as error:
        raise TargetError(f"{device} failed to complete the writes of network cards: {error}") from error


class CudaEvent:
    """All work that was queued on a stream when the event was created.

    Waiting blocks in the driver without the interpreter lock, and the thread sleeps: it occupies no core.
    """

    def __init__(self, driver: CudaDriver, device: int, stream: int) -> None:
        self._driver, self._device = driver, device
        event = c_void_p()
        with driver.on_device(device):
            flags = cuda.EVENT_BLOCKING_SYNC | cuda.EVENT_DISABLE_TIMING
            driver.library.call("cuEventCreate", byref(event), flags)
            self.handle = event.value or 0
            try:
                driver.library.call("cuEventRecord", self.handle, stream)
            except DriverError:
                self._destroy()
                raise

    def wait(self) -> None:
        """Wait until the work has finished. May be called again. Raises DriverError if it failed."""
        if self.handle:
            with self._driver.on_device(self._device):
                self._driver.library.call("cuEventSynchronize", self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            with contextlib.suppress(DriverError), self._driver.on_device(self._device):
                self._destroy()

    def _destroy(self) -> None:
        handle, self.handle = self.handle, 0
        self._driver.library.call("cuEventDestroy_v2", handle)


class CudaStream:
    """A stream of rfork: neither waits for the engine's kernels, nor they for it. Thread-safe.

    Copies between two GPUs use NVLink or PCIe.
    """

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self._driver = driver
        self.device = device
        stream = c_void_p()
        with driver.on_device(device):
            driver.library.call("cuStreamCreate", byref(stream), cuda.STREAM_NON_BLOCKING)
        self.handle = stream.value or 0

    def copy(self, copies: Iterable[CopyOp]) -> None:
        """Queue copies. Raises DriverError; some of them may then be running.

        One call of a few µs per copy, so 20,000 copies take about 0.1 s.
        """
        copy, stream = self._driver.library.function("cuMemcpyAsync"), self.handle
        with self._driver.on_device(self.device):
            for op in copies:
                code = copy(op.target, op.source, op.length, stream)
                if code:
                    self._driver.library.check("cuMemcpyAsync", code)

    @contextlib.contextmanager
    def as_torch_stream(self) -> Iterator[None]:
        """Run this thread's torch operations on the stream within the block. Used within `on_device`."""
        with torch.cuda.stream(torch.cuda.ExternalStream(self.handle, self.device)):  # type: ignore[no-untyped-call]
            yield

    def after(self, event: CudaEvent) -> None:
        """Let all work that is queued from now on begin after an event."""
        with self._driver.on_device(self.device):
            self._driver.library.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def record(self) -> CudaEvent:
        """Return an event after all work queued so far."""
        return CudaEvent(self._driver, self.device, self.handle)

    def done(self) -> bool:
        """Return True if all queued work has finished.

        Raises DriverError if the device failed; it has then finished too.
        """
        with self._driver.on_device(self.device):
            code = self._driver.library.function("cuStreamQuery")(self.handle)
        if code == cuda.NOT_READY:
            return False
        self._driver.library.check("cuStreamQuery", code)
        return True

    def close(self) -> None:
        """Destroy the stream, after its work has finished."""
        with self._driver.on_device(self.device):
            self._driver.library.call("cuStreamDestroy_v2", self.handle)


@dataclass(frozen=True, slots=True)
class DeviceStreams:
    """The streams of this process on one device: one for each direction of copies, and one for digests."""

    to_host: CudaStream
    to_device: CudaStream
    digest: CudaStream

    def close(self) -> None:
        """Destroy the streams, after their work has finished."""
        for stream in (self.to_host, self.to_device, self.digest):
            stream.close()
