"""Driver for NVIDIA GPUs, using libcuda. See `rfork.transport.cuda_ipc.driver.Driver`.

Every call runs in the device's primary context, which torch uses too: so torch's allocations are accessible,
and no second context uses memory of a serving GPU. Every call also relaxes this thread's stream capture mode,
so that it does not invalidate a CUDA graph capture of the engine on another thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import torch

from rfork.transport.cuda_ipc import libcuda
from rfork.transport.cuda_ipc.driver import (
    Allocation,
    CopyOp,
    DriverError,
    HandleType,
    ImportedAllocation,
    IpcHandle,
)
from rfork.transport.cuda_ipc.libcuda import CudaDriverLibrary

_FABRIC, _DESCRIPTOR = libcuda.MEM_HANDLE_TYPE_FABRIC, libcuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class CudaDriver:
    """`Driver` for the GPUs visible to this process.

    Raises TransportUnavailable or a subclass without a suitable driver.
    """

    def __init__(self, library: CudaDriverLibrary | None = None) -> None:
        self._library = library or CudaDriverLibrary()
        self._library.call("cuInit", 0)
        self._lock = threading.Lock()
        # Never released: torch retains them too until the process ends.
        self._contexts: dict[int, int] = {}

    def device_of(self, storage: torch.UntypedStorage) -> int | None:
        """See `Driver.device_of`."""
        return storage.device.index if storage.device.type == "cuda" else None

    def uuid(self, device: int) -> str:
        """See `Driver.uuid`. A MIG device has its own UUID, different from its GPU's."""
        found = libcuda.Uuid()
        self._library.call("cuDeviceGetUuid_v2", byref(found), self._ordinal(device))
        return bytes(found.data).hex()

    def device_index(self, uuid: str) -> int | None:
        """See `Driver.device_index`."""
        count = c_int()
        self._library.call("cuDeviceGetCount", byref(count))
        return next((device for device in range(count.value) if self.uuid(device) == uuid), None)

    def can_access_peer(self, device: int, peer: int) -> bool:
        """See `Driver.can_access_peer`."""
        if device == peer:
            return True
        can_access = c_int()
        ordinal, peer_ordinal = self._ordinal(device), self._ordinal(peer)
        self._library.call("cuDeviceCanAccessPeer", byref(can_access), ordinal, peer_ordinal)
        return bool(can_access.value)

    def allocation(self, device: int, address: int) -> Allocation:
        """See `Driver.allocation`.

        For mapped memory, returns one mapping, not the complete reserved range.
        """
        base, size = c_uint64(), c_size_t()
        with self.current(device):
            self._library.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
            legacy = self._attribute(libcuda.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)
            allowed = self._attribute(libcuda.POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address)
        handle_type: HandleType = "none"
        if legacy:
            handle_type = "legacy"
        elif allowed & _DESCRIPTOR:
            handle_type = "descriptor"
        elif allowed & _FABRIC:
            handle_type = "fabric"
        return Allocation(base.value, size.value, device, handle_type)

    def export(self, allocation: Allocation) -> IpcHandle:
        """See `Driver.export`."""
        call = self._library.call
        with self.current(allocation.device):
            if allocation.handle_type == "legacy":
                ipc_handle = libcuda.IpcMemHandle()
                call("cuIpcGetMemHandle", byref(ipc_handle), allocation.base)
                return IpcHandle(bytes(ipc_handle.reserved))
            memory = c_uint64()
            call("cuMemRetainAllocationHandle", byref(memory), allocation.base)
            try:
                if allocation.handle_type == "fabric":
                    fabric = libcuda.FabricHandle()
                    call("cuMemExportToShareableHandle", byref(fabric), memory.value, _FABRIC, 0)
                    return IpcHandle(bytes(fabric.data))
                descriptor = c_int(-1)
                call("cuMemExportToShareableHandle", byref(descriptor), memory.value, _DESCRIPTOR, 0)
                return IpcHandle(descriptor=descriptor.value)
            finally:
                call("cuMemRelease", memory.value)

    def open(self, device: int, handle_type: HandleType, handle: IpcHandle, size: int) -> ImportedAllocation:
        """See `Driver.open`."""
        with self.current(device):
            if handle_type == "legacy":
                return ImportedAllocation(self._open_legacy(handle, size), size, device, handle_type)
            return ImportedAllocation(self._map(device, handle_type, handle, size), size, device, handle_type)

    def close(self, opened: ImportedAllocation) -> None:
        """See `Driver.close`."""
        with self.current(opened.device):
            if opened.handle_type == "legacy":
                self._library.call("cuIpcCloseMemHandle", opened.address)
            else:
                self._library.call("cuMemUnmap", opened.address, opened.size)
                self._library.call("cuMemAddressFree", opened.address, opened.size)

    def copy_stream(self, device: int) -> CudaCopyStream:
        """See `Driver.copy_stream`."""
        return CudaCopyStream(self, self._library, device)

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Make a device's primary context current on this thread within the context."""
        context, mode = self._context(device), c_int(libcuda.STREAM_CAPTURE_MODE_RELAXED)
        self._library.call("cuCtxPushCurrent_v2", context)
        try:
            self._library.call("cuThreadExchangeStreamCaptureMode", byref(mode))
            try:
                yield
            finally:
                self._library.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        finally:
            self._library.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _context(self, device: int) -> int:
        with self._lock:
            if device not in self._contexts:
                context = c_void_p()
                self._library.call("cuDevicePrimaryCtxRetain", byref(context), self._ordinal(device))
                self._contexts[device] = context.value or 0
            return self._contexts[device]

    def _ordinal(self, device: int) -> int:
        found = c_int()
        self._library.call("cuDeviceGet", byref(found), device)
        return found.value

    def _attribute(self, attribute: int, address: int) -> int:
        # 64 bits: drivers write 4 or 8 bytes, and all CUDA platforms are little-endian.
        value = c_uint64()
        self._library.call("cuPointerGetAttribute", byref(value), attribute, address)
        return value.value

    def _open_legacy(self, handle: IpcHandle, size: int) -> int:
        ipc_handle = libcuda.IpcMemHandle.from_buffer_copy(handle.data)
        address = c_uint64()
        flags = libcuda.IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self._library.call("cuIpcOpenMemHandle_v2", byref(address), ipc_handle, flags)
        # Copying beyond the end would destroy this process's context, so check the size. If the driver cannot
        # report it, trust the source.
        base, opened = c_uint64(), c_size_t()
        address_range = self._library.function("cuMemGetAddressRange_v2")
        has_size = address_range(byref(base), byref(opened), address.value) == libcuda.SUCCESS
        if has_size and base.value + opened.value < address.value + size:
            self._library.call("cuIpcCloseMemHandle", address.value)
            text = f"the allocation has {opened.value} bytes, not {size}"
            raise DriverError("cuIpcOpenMemHandle_v2", libcuda.INVALID_VALUE, text)
        return address.value

    def _map(self, device: int, handle_type: HandleType, handle: IpcHandle, size: int) -> int:
        """Map memory of cuMemCreate into this process; the driver rejects a size beyond the allocation."""
        call, address, memory = self._library.call, c_uint64(), c_uint64()
        if handle_type == "fabric":
            fabric = libcuda.FabricHandle.from_buffer_copy(handle.data)
            call("cuMemImportFromShareableHandle", byref(memory), byref(fabric), _FABRIC)
        else:
            # The descriptor is passed by value in place of a pointer.
            call("cuMemImportFromShareableHandle", byref(memory), handle.descriptor, _DESCRIPTOR)
        try:
            call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
            try:
                call("cuMemMap", address.value, size, 0, memory.value, 0)
                try:
                    self._map_read_only(device, address.value, size)
                except DriverError:
                    call("cuMemUnmap", address.value, size)
                    raise
            except DriverError:
                call("cuMemAddressFree", address.value, size)
                raise
        finally:
            call("cuMemRelease", memory.value)  # the mapping keeps the memory alive
        return address.value

    def _map_read_only(self, device: int, address: int, size: int) -> None:
        """Map read-only if the driver supports it, because the target never writes."""
        location = libcuda.MemLocation(libcuda.MEM_LOCATION_TYPE_DEVICE, device)
        for flags in (libcuda.MEM_ACCESS_FLAGS_PROT_READ, libcuda.MEM_ACCESS_FLAGS_PROT_READWRITE):
            access = libcuda.MemAccessDesc(location, flags)
            try:
                self._library.call("cuMemSetAccess", address, size, byref(access), 1)
                return
            except DriverError as error:
                last_error = error
        raise last_error


class CudaCopyStream:
    """`CopyStream` on a non-blocking CUDA stream; between two GPUs it uses NVLink or PCIe."""

    def __init__(self, driver: CudaDriver, library: CudaDriverLibrary, device: int) -> None:
        self._driver = driver
        self._library = library
        self._device = device
        stream = c_void_p()
        with driver.current(device):
            library.call("cuStreamCreate", byref(stream), libcuda.STREAM_NON_BLOCKING)
        self._stream = stream.value or 0

    def queue(self, copies: Sequence[CopyOp]) -> None:
        """See `CopyStream.queue`: one call of a few µs per copy, so 20,000 copies take about 0.1 s."""
        copy, stream = self._library.function("cuMemcpyAsync"), self._stream
        with self._driver.current(self._device):
            for op in copies:
                code = copy(op.target, op.source, op.length, stream)
                if code:
                    self._library.check("cuMemcpyAsync", code)

    def done(self) -> bool:
        """See `CopyStream.done`."""
        with self._driver.current(self._device):
            code = self._library.function("cuStreamQuery")(self._stream)
        if code == libcuda.NOT_READY:
            return False
        self._library.check("cuStreamQuery", code)
        return True

    def close(self) -> None:
        """See `CopyStream.close`."""
        with self._driver.current(self._device):
            self._library.call("cuStreamDestroy_v2", self._stream)
