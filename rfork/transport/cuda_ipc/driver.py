"""Sharing of GPU memory between processes: allocations and their handles. For both sides.

All driver calls of the cuda_ipc transport are here and in `rfork.cuda`.
"""

from __future__ import annotations

import contextlib
from ctypes import byref, c_int, c_size_t, c_uint64
from dataclasses import dataclass
from typing import Final, Literal

import torch

from rfork.cuda import library as cuda
from rfork.cuda.device import CudaDriver, CudaStream, cuda_driver, device_of
from rfork.cuda.library import DriverError, FabricHandle, IpcMemHandle, MemAccessDesc, MemLocation, Uuid

HandleType = Literal["legacy", "descriptor", "fabric", "none"]
"""Mechanism by which an allocation can be shared with another process.

`legacy`: 64-byte handle (memory of cudaMalloc); `descriptor`: file descriptor, and `fabric`: 64-byte handle
(memory of cuMemCreate, such as torch's expandable segments); `none`: cannot be shared.
"""
HANDLE_TYPES: Final[tuple[HandleType, ...]] = ("legacy", "descriptor", "fabric", "none")


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


class IpcDriver:
    """Shares allocations with other processes. Thread-safe. Every method except `device_of` raises DriverError.

    The constructor raises TransportUnavailable or a subclass without a suitable driver.
    """

    def __init__(self) -> None:
        self._cuda: CudaDriver = cuda_driver()
        self._library = self._cuda.library

    def device_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the device of a storage; None for host memory."""
        device = device_of(storage)
        return device.index if device.type == "cuda" else None

    def uuid(self, device: int) -> str:
        """Return the device's UUID, which is the same in every process. A MIG device has its own, different
        from its GPU's.
        """
        found = Uuid()
        self._library.call("cuDeviceGetUuid_v2", byref(found), self._cuda.ordinal(device))
        return bytes(found.data).hex()

    def device_index(self, uuid: str) -> int | None:
        """Return the device with this UUID; None if it is not visible to this process."""
        count = c_int()
        self._library.call("cuDeviceGetCount", byref(count))
        return next((device for device in range(count.value) if self.uuid(device) == uuid), None)

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Return True if the devices are equal or `device` can address the memory of `peer`."""
        if device == peer:
            return True
        can_access = c_int()
        ordinal, peer_ordinal = self._cuda.ordinal(device), self._cuda.ordinal(peer)
        self._library.call("cuDeviceCanAccessPeer", byref(can_access), ordinal, peer_ordinal)
        return bool(can_access.value)

    def allocation(self, device: int, address: int) -> Allocation:
        """Return the allocation of this process that contains a device address. Runs on both sides.

        For mapped memory, returns one mapping, not the complete reserved range.
        """
        attribute = self._cuda.pointer_attribute
        with self._cuda.on_device(device):
            legacy = attribute(cuda.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)
            allowed = attribute(cuda.POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address)
            base, size = self._range(address) if legacy else self._mapping(address)
        handle_type: HandleType = "none"
        if legacy:
            handle_type = "legacy"
        elif allowed & cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
            handle_type = "descriptor"
        elif allowed & cuda.MEM_HANDLE_TYPE_FABRIC:
            handle_type = "fabric"
        return Allocation(base, size, device, handle_type)

    def export(self, allocation: Allocation) -> IpcHandle:
        """Create a handle of an allocation of this process whose handle type is not `none`. Runs on the
        source.
        """
        call = self._library.call
        with self._cuda.on_device(allocation.device):
            if allocation.handle_type == "legacy":
                ipc_handle = IpcMemHandle()
                call("cuIpcGetMemHandle", byref(ipc_handle), allocation.base)
                return IpcHandle(bytes(ipc_handle.reserved))
            memory = c_uint64()
            call("cuMemRetainAllocationHandle", byref(memory), allocation.base)
            export = "cuMemExportToShareableHandle"
            try:
                if allocation.handle_type == "fabric":
                    fabric = FabricHandle()
                    call(export, byref(fabric), memory.value, cuda.MEM_HANDLE_TYPE_FABRIC, 0)
                    return IpcHandle(bytes(fabric.data))
                descriptor = c_int(-1)
                call(export, byref(descriptor), memory.value, cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
                return IpcHandle(descriptor=descriptor.value)
            finally:
                call("cuMemRelease", memory.value)

    def open(self, device: int, handle_type: HandleType, handle: IpcHandle, size: int) -> ImportedAllocation:
        """Map an allocation of another process for a device of this one. Runs on the target.

        The handle's descriptor may be closed afterwards. Raises DriverError, also if the allocation has fewer
        than `size` bytes.
        """
        with self._cuda.on_device(device):
            if handle_type == "legacy":
                address = self._open_legacy(handle, size)
            else:
                address = self._map(device, handle_type, handle, size)
        return ImportedAllocation(address, size, device, handle_type)

    def close(self, opened: ImportedAllocation) -> None:
        """Undo `open`, after all copies from it have finished."""
        with self._cuda.on_device(opened.device):
            if opened.handle_type == "legacy":
                self._library.call("cuIpcCloseMemHandle", opened.address)
            else:
                self._library.call("cuMemUnmap", opened.address, opened.size)
                self._library.call("cuMemAddressFree", opened.address, opened.size)

    def copy_stream(self, device: int) -> CudaStream:
        """Create a stream for copies by this device."""
        return CudaStream(self._cuda, device)

    def _range(self, address: int) -> tuple[int, int]:
        """Return address and size of the cudaMalloc allocation that contains an address."""
        base, size = c_uint64(), c_size_t()
        self._library.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value, size.value

    def _mapping(self, address: int) -> tuple[int, int]:
        """Return address and size of the mapping of cuMemMap that contains an address.

        Not by cuMemGetAddressRange: whether it means one mapping or the complete reserved range differs.
        """
        base = self._cuda.pointer_attribute(cuda.POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, address)
        return base, self._cuda.pointer_attribute(cuda.POINTER_ATTRIBUTE_MAPPING_SIZE, address)

    def _open_legacy(self, handle: IpcHandle, size: int) -> int:
        ipc_handle = IpcMemHandle.from_buffer_copy(handle.data)
        address = c_uint64()
        self._library.call("cuIpcOpenMemHandle_v2", byref(address), ipc_handle, cuda.IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        # Copying beyond the end would destroy this process's context, so check the size. If the driver cannot
        # report it, trust the source.
        base, opened = c_uint64(), c_size_t()
        address_range = self._library.function("cuMemGetAddressRange_v2")
        has_size = address_range(byref(base), byref(opened), address.value) == cuda.SUCCESS
        if has_size and base.value + opened.value < address.value + size:
            self._library.call("cuIpcCloseMemHandle", address.value)
            text = f"the allocation has {opened.value} bytes, not {size}"
            raise DriverError("cuIpcOpenMemHandle_v2", cuda.INVALID_VALUE, text)
        return address.value

    def _map(self, device: int, handle_type: HandleType, handle: IpcHandle, size: int) -> int:
        """Map memory of cuMemCreate into this process; the driver rejects a size beyond the allocation."""
        call, address, memory = self._library.call, c_uint64(), c_uint64()
        import_handle = "cuMemImportFromShareableHandle"
        if handle_type == "fabric":
            fabric = FabricHandle.from_buffer_copy(handle.data)
            call(import_handle, byref(memory), byref(fabric), cuda.MEM_HANDLE_TYPE_FABRIC)
        else:
            # The descriptor is passed by value in place of a pointer.
            call(import_handle, byref(memory), handle.descriptor, cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        with contextlib.ExitStack() as cleanup, contextlib.ExitStack() as on_error:
            cleanup.callback(call, "cuMemRelease", memory.value)  # the mapping keeps the memory alive
            call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
            on_error.callback(call, "cuMemAddressFree", address.value, size)
            call("cuMemMap", address.value, size, 0, memory.value, 0)
            on_error.callback(call, "cuMemUnmap", address.value, size)
            self._map_read_only(device, address.value, size)
            on_error.pop_all()
        return address.value

    def _map_read_only(self, device: int, address: int, size: int) -> None:
        """Map read-only if the driver supports it, because the target never writes."""
        location = MemLocation(cuda.MEM_LOCATION_TYPE_DEVICE, device)
        access = MemAccessDesc(location, cuda.MEM_ACCESS_FLAGS_PROT_READ)
        try:
            self._library.call("cuMemSetAccess", address, size, byref(access), 1)
        except DriverError:
            access.flags = cuda.MEM_ACCESS_FLAGS_PROT_READWRITE
            self._library.call("cuMemSetAccess", address, size, byref(access), 1)
