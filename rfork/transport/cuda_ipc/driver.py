"""CUDA driver of this process: allocations, handles for other processes, and copies. For both sides.

All CUDA work of the cuda_ipc transport is in this module, so the others are tested with a fake driver on
machines without a GPU. Device numbers are those visible to the process.

Uses the driver API, not the runtime: only the driver API can open torch's expandable segments, and the
library comes with the driver, independent of torch's CUDA version. By ctypes, because cuda-bindings would be a
dependency of 31 MB whose import takes 0.23 s (version 13.5; a fork's imports and set-up may take 0.2 s), and its
newest releases do not support Python 3.10.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

from rfork.errors import TransportUnavailable, VersionMismatch

HandleType = Literal["legacy", "descriptor", "fabric", "none"]
"""Mechanism by which an allocation can be shared with another process.

`legacy`: 64-byte handle (memory of cudaMalloc); `descriptor`: file descriptor, and `fabric`: 64-byte handle
(memory of cuMemCreate, such as torch's expandable segments); `none`: cannot be shared.
"""
HANDLE_TYPES: Final[tuple[HandleType, ...]] = ("legacy", "descriptor", "fabric", "none")

HANDLE_BYTES: Final = 64
MIN_VERSION: Final = 11040
"""CUDA 11.4, driver R470: the first with all functions used here."""

# Constants of cuda.h.
SUCCESS: Final = 0
INVALID_VALUE: Final = 1
INVALID_DEVICE: Final = 101
INVALID_CONTEXT: Final = 201
PEER_ACCESS_UNSUPPORTED: Final = 217
NOT_READY: Final = 600
TOO_MANY_PEERS: Final = 711
NOT_PERMITTED: Final = 800
SYSTEM_DRIVER_MISMATCH: Final = 803
COMPAT_NOT_SUPPORTED_ON_DEVICE: Final = 804

_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: Final = 1
_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: Final = 10
_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: Final = 14
_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: Final = 1
_MEM_HANDLE_TYPE_FABRIC: Final = 8
_MEM_LOCATION_TYPE_DEVICE: Final = 1
_MEM_ACCESS_FLAGS_PROT_READ: Final = 1
_MEM_ACCESS_FLAGS_PROT_READWRITE: Final = 3
_STREAM_NON_BLOCKING: Final = 1
_STREAM_CAPTURE_MODE_RELAXED: Final = 2


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


class IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle: passed by value to cuIpcOpenMemHandle_v2."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class FabricHandle(ctypes.Structure):
    """CUmemFabricHandle: always passed by address."""

    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("data", ctypes.c_ubyte * 16),)


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class MemAccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemLocation), ("flags", c_int))


# CUdeviceptr and CUmemGenericAllocationHandle are unsigned long long; CUcontext and CUstream pointers;
# CUdevice and the enumerations int. Every function returns CUresult, an int. Names have the version suffix that
# cuda.h maps them to.
_SIGNATURES: Final[Mapping[str, tuple[type[ctypes._CDataType], ...]]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuIpcGetMemHandle": (POINTER(IpcMemHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcMemHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemRetainAllocationHandle": (POINTER(c_uint64), c_void_p),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_ulonglong),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_ulonglong),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(MemAccessDesc), c_size_t),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamQuery": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
}

# The last type is returned by byref().
Argument: TypeAlias = "int | ctypes.Structure | ctypes._CArgObject | None"
Function = Callable[..., int]


class CudaDriverLibrary:
    """The functions of libcuda. `path` names the library.

    Raises TransportUnavailable without a driver, and VersionMismatch if it is too old.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            # CDLL releases the GIL during calls: some of them wait for the driver.
            library = ctypes.CDLL(path)
        except OSError as error:
            raise TransportUnavailable(
                f"cannot load the NVIDIA driver's library: {error}", hint="expose GPUs to the container"
            ) from None
        self._functions: dict[str, Function] = {}
        for name, arguments in _SIGNATURES.items():
            try:
                function = library[name]
            except AttributeError:
                raise VersionMismatch(
                    f"the NVIDIA driver has no {name}", hint="needs a driver for CUDA 11.4 (R470) or newer"
                ) from None
            function.argtypes = list(arguments)
            function.restype = c_int
            self._functions[name] = function

    def version(self) -> int:
        """Return the newest CUDA version that the driver supports, as 1000 * major + 10 * minor. Opens no
        device.
        """
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        return version.value

    def function(self, name: str) -> Function:
        """Return a function whose result the caller checks."""
        return self._functions[name]

    def call(self, name: str, *arguments: Argument) -> None:
        """Call a function. Raises DriverError unless it succeeds."""
        self.check(name, self._functions[name](*arguments))

    def check(self, name: str, code: int) -> None:
        """Raise DriverError unless a function's result is success."""
        if code != SUCCESS:
            raise DriverError(name, code, self._text(code))

    def _text(self, code: int) -> str:
        text = c_char_p()
        if self._functions["cuGetErrorString"](code, byref(text)) != SUCCESS or text.value is None:
            return "unknown error"
        return text.value.decode("ascii", "replace")


class CudaDriver:
    """Driver of the GPUs visible to this process. Thread-safe. Every method except `device_of` raises
    DriverError.

    Every call runs in the device's primary context, which torch uses too: so torch's allocations are
    accessible, and no second context uses memory of a serving GPU. Every call also relaxes this thread's
    stream capture mode, so that it does not invalidate a CUDA graph capture of the engine on another thread.

    The constructor raises TransportUnavailable or a subclass without a suitable driver.
    """

    def __init__(self) -> None:
        self._library = CudaDriverLibrary()
        self._library.call("cuInit", 0)
        self._lock = threading.Lock()
        # Never released: torch retains them too until the process ends.
        self._contexts: dict[int, int] = {}

    def device_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the device of a storage; None for host memory."""
        return storage.device.index if storage.device.type == "cuda" else None

    def uuid(self, device: int) -> str:
        """Return the device's UUID, which is the same in every process. A MIG device has its own, different
        from its GPU's.
        """
        found = Uuid()
        self._library.call("cuDeviceGetUuid_v2", byref(found), self._ordinal(device))
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
        ordinal, peer_ordinal = self._ordinal(device), self._ordinal(peer)
        self._library.call("cuDeviceCanAccessPeer", byref(can_access), ordinal, peer_ordinal)
        return bool(can_access.value)

    def allocation(self, device: int, address: int) -> Allocation:
        """Return the allocation of this process that contains a device address. Runs on both sides.

        For mapped memory, returns one mapping, not the complete reserved range.
        """
        base, size = c_uint64(), c_size_t()
        with self.on_device(device):
            self._library.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
            legacy = self._attribute(_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)
            allowed = self._attribute(_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address)
        handle_type: HandleType = "none"
        if legacy:
            handle_type = "legacy"
        elif allowed & _MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
            handle_type = "descriptor"
        elif allowed & _MEM_HANDLE_TYPE_FABRIC:
            handle_type = "fabric"
        return Allocation(base.value, size.value, device, handle_type)

    def export(self, allocation: Allocation) -> IpcHandle:
        """Create a handle of an allocation of this process whose handle type is not `none`. Runs on the
        source.
        """
        call = self._library.call
        with self.on_device(allocation.device):
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
                    call(export, byref(fabric), memory.value, _MEM_HANDLE_TYPE_FABRIC, 0)
                    return IpcHandle(bytes(fabric.data))
                descriptor = c_int(-1)
                call(export, byref(descriptor), memory.value, _MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
                return IpcHandle(descriptor=descriptor.value)
            finally:
                call("cuMemRelease", memory.value)

    def open(self, device: int, handle_type: HandleType, handle: IpcHandle, size: int) -> ImportedAllocation:
        """Map an allocation of another process for a device of this one. Runs on the target.

        The handle's descriptor may be closed afterwards. Raises DriverError, also if the allocation has fewer
        than `size` bytes.
        """
        with self.on_device(device):
            if handle_type == "legacy":
                address = self._open_legacy(handle, size)
            else:
                address = self._map(device, handle_type, handle, size)
        return ImportedAllocation(address, size, device, handle_type)

    def close(self, opened: ImportedAllocation) -> None:
        """Undo `open`, after all copies from it have finished."""
        with self.on_device(opened.device):
            if opened.handle_type == "legacy":
                self._library.call("cuIpcCloseMemHandle", opened.address)
            else:
                self._library.call("cuMemUnmap", opened.address, opened.size)
                self._library.call("cuMemAddressFree", opened.address, opened.size)

    def copy_stream(self, device: int) -> CudaCopyStream:
        """Create a stream for copies by this device."""
        return CudaCopyStream(self, self._library, device)

    @contextlib.contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Make a device's primary context current on this thread within the context."""
        context, mode = self._context(device), c_int(_STREAM_CAPTURE_MODE_RELAXED)
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
        ipc_handle = IpcMemHandle.from_buffer_copy(handle.data)
        address = c_uint64()
        self._library.call("cuIpcOpenMemHandle_v2", byref(address), ipc_handle, _IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        # Copying beyond the end would destroy this process's context, so check the size. If the driver cannot
        # report it, trust the source.
        base, opened = c_uint64(), c_size_t()
        address_range = self._library.function("cuMemGetAddressRange_v2")
        has_size = address_range(byref(base), byref(opened), address.value) == SUCCESS
        if has_size and base.value + opened.value < address.value + size:
            self._library.call("cuIpcCloseMemHandle", address.value)
            text = f"the allocation has {opened.value} bytes, not {size}"
            raise DriverError("cuIpcOpenMemHandle_v2", INVALID_VALUE, text)
        return address.value

    def _map(self, device: int, handle_type: HandleType, handle: IpcHandle, size: int) -> int:
        """Map memory of cuMemCreate into this process; the driver rejects a size beyond the allocation."""
        call, address, memory = self._library.call, c_uint64(), c_uint64()
        import_handle = "cuMemImportFromShareableHandle"
        if handle_type == "fabric":
            fabric = FabricHandle.from_buffer_copy(handle.data)
            call(import_handle, byref(memory), byref(fabric), _MEM_HANDLE_TYPE_FABRIC)
        else:
            # The descriptor is passed by value in place of a pointer.
            call(import_handle, byref(memory), handle.descriptor, _MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
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
        location = MemLocation(_MEM_LOCATION_TYPE_DEVICE, device)
        access = MemAccessDesc(location, _MEM_ACCESS_FLAGS_PROT_READ)
        try:
            self._library.call("cuMemSetAccess", address, size, byref(access), 1)
        except DriverError:
            access.flags = _MEM_ACCESS_FLAGS_PROT_READWRITE
            self._library.call("cuMemSetAccess", address, size, byref(access), 1)


class CudaCopyStream:
    """Copies on a separate non-blocking stream, independent of all kernels. Used by one thread.

    Between two GPUs they use NVLink or PCIe.
    """

    def __init__(self, driver: CudaDriver, library: CudaDriverLibrary, device: int) -> None:
        self._driver = driver
        self._library = library
        self._device = device
        stream = c_void_p()
        with driver.on_device(device):
            library.call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
        self._stream = stream.value or 0

    def queue(self, copies: Sequence[CopyOp]) -> None:
        """Start copies. Raises DriverError; some of them may then be running.

        One call of a few µs per copy, so 20,000 copies take about 0.1 s.
        """
        copy, stream = self._library.function("cuMemcpyAsync"), self._stream
        with self._driver.on_device(self._device):
            for op in copies:
                code = copy(op.target, op.source, op.length, stream)
                if code:
                    self._library.check("cuMemcpyAsync", code)

    def done(self) -> bool:
        """Return True if all queued copies have finished.

        Raises DriverError if the device failed; they have then finished too.
        """
        with self._driver.on_device(self._device):
            code = self._library.function("cuStreamQuery")(self._stream)
        if code == NOT_READY:
            return False
        self._library.check("cuStreamQuery", code)
        return True

    def close(self) -> None:
        """Destroy the stream, after its copies have finished."""
        with self._driver.on_device(self._device):
            self._library.call("cuStreamDestroy_v2", self._stream)
