"""The functions, constants and structures of the CUDA driver (libcuda) that rfork uses, by ctypes.

The driver API and not the runtime: only the driver API can open torch's expandable segments, its errors do not
stick to the process, and the library comes with the driver, independent of torch's CUDA version. By ctypes, because
cuda-bindings would be a dependency of 31 MB whose import takes 0.23 s (version 13.5; a fork's imports and set-up
may take 0.2 s), and its newest releases do not support Python 3.10.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Final, TypeAlias

from rfork.errors import TransportUnavailable, VersionMismatch

LIBRARY_PATH = "libcuda.so.1"
"""Tests load their fake driver instead."""
HANDLE_BYTES: Final = 64
MIN_VERSION: Final = 11040
"""CUDA 11.4, driver R470: the first with all functions used here."""

# Constants of cuda.h, without the prefix CU or CUDA_ERROR.
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

DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: Final = 117
DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: Final = 118
DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: Final = 124
FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST: Final = 1
FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX: Final = 0
FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER: Final = 100
GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: Final = 100

IPC_MEM_LAZY_ENABLE_PEER_ACCESS: Final = 1
POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: Final = 10
POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: Final = 14
POINTER_ATTRIBUTE_MAPPING_SIZE: Final = 18
POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: Final = 19
MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: Final = 1
MEM_HANDLE_TYPE_FABRIC: Final = 8
MEM_LOCATION_TYPE_DEVICE: Final = 1
MEM_ACCESS_FLAGS_PROT_READ: Final = 1
MEM_ACCESS_FLAGS_PROT_READWRITE: Final = 3
MEMHOSTALLOC_PORTABLE: Final = 1
MEMHOSTREGISTER_PORTABLE: Final = 1
STREAM_NON_BLOCKING: Final = 1
STREAM_CAPTURE_MODE_RELAXED: Final = 2
EVENT_BLOCKING_SYNC: Final = 1
EVENT_DISABLE_TIMING: Final = 2


class DriverError(RuntimeError):
    """A driver call failed: its name, and the driver's error code and text.

    A RuntimeError like the errors of torch's own CUDA calls. A caller that knows which side is at fault converts
    it to one of rfork's errors.
    """

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.code = code


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
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
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
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
}

# The last type is returned by byref().
Argument: TypeAlias = "int | ctypes.Structure | ctypes._CArgObject | None"
Function = Callable[..., int]


class CudaDriverLibrary:
    """The functions of libcuda.

    Raises TransportUnavailable without a driver, and VersionMismatch if it is too old.
    """

    def __init__(self) -> None:
        try:
            # CDLL releases the GIL during calls: some of them wait for the driver.
            library = ctypes.CDLL(LIBRARY_PATH)
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
