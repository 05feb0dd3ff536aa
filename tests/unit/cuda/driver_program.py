"""A program that uses the fake driver directly, and another process whose memory it opens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p

import pytest

from rfork.cuda import library
from rfork.cuda.library import CudaDriverLibrary, FabricHandle, IpcMemHandle, MemAccessDesc, MemLocation
from tests.fake_libcuda.build import library_path
from tests.fake_libcuda.fake_gpu import GRANULARITY, FakeGpu

RELAXED, NON_BLOCKING, LAZY_PEER_ACCESS = 2, 1, 1
DESCRIPTOR, FABRIC = 1, 8
READ_ONLY, READ_WRITE = 1, 3


class Program:
    """A program on one thread, with the context of device 0. `run` returns the driver's result."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "LIBRARY_PATH", gpu.path)
            self.bindings = CudaDriverLibrary()
        assert self.run("cuInit", 0) == 0
        self.use(0)

    def run(self, name: str, *arguments: object) -> int:
        if name in ("cuInit", "cuMemcpyAsync", "cuStreamQuery", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"):
            return self.bindings.function(name)(*arguments)
        function: Callable[..., int] = getattr(self.gpu.library, name)
        return function(*arguments)

    def use(self, device: int) -> None:
        """Push the context of a device."""
        context = c_void_p()
        assert self.run("cuDevicePrimaryCtxRetain", byref(context), device) == 0
        assert self.run("cuCtxPushCurrent_v2", context) == 0

    def end(self) -> None:
        """Pop all contexts."""
        while self.gpu.thread_depth:
            self.run("cuCtxPopCurrent_v2", None)

    def stream(self) -> c_void_p:
        stream = c_void_p()
        assert self.run("cuStreamCreate", byref(stream), NON_BLOCKING) == 0
        return stream

    def copy(self, target: int, source: int, nbytes: int = 4096) -> int:
        """Copy on a new stream of the current device; return the first result that is not 0."""
        stream = self.stream()
        result = self.run("cuMemcpyAsync", target, source, nbytes, stream)
        return result or self.run("cuStreamSynchronize", stream)

    def pinned(self, size: int) -> c_void_p:
        address = c_void_p()
        assert self.run("cuMemHostAlloc", byref(address), c_size_t(size), 1) == 0
        return address

    def relax(self) -> c_int:
        mode = c_int(RELAXED)
        assert self.run("cuThreadExchangeStreamCaptureMode", byref(mode)) == 0
        return mode

    def open_legacy(self, handle: IpcMemHandle, address: c_uint64 | None = None, flags: int = LAZY_PEER_ACCESS) -> int:
        """Open the handle of another process's memory; its address is stored in `address`."""
        into = c_uint64() if address is None else address  # a zero is false
        return self.run("cuIpcOpenMemHandle_v2", byref(into), handle, flags)

    def retain(self, address: int) -> c_uint64:
        """Return the handle of mapped memory, to be released."""
        memory = c_uint64()
        assert self.run("cuMemRetainAllocationHandle", byref(memory), c_void_p(address)) == 0
        return memory

    def export(self, memory: c_uint64, handle_type: int) -> tuple[int, object]:
        """Export mapped memory; return the result, and what to import."""
        shared = FabricHandle() if handle_type == FABRIC else c_int()
        result = self.run("cuMemExportToShareableHandle", byref(shared), memory, handle_type, c_ulonglong(0))
        return result, c_void_p(shared.value) if isinstance(shared, c_int) else shared

    def import_handle(self, shared: object, handle_type: int) -> tuple[int, c_uint64]:
        """Import memory; return the result, and the handle to be released."""
        memory = c_uint64()
        content = byref(shared) if isinstance(shared, FabricHandle) else shared
        return self.run("cuMemImportFromShareableHandle", byref(memory), content, handle_type), memory

    def reserve(self, size: int = GRANULARITY) -> tuple[int, c_uint64]:
        """Reserve addresses; return the result, and the first address."""
        address = c_uint64()
        arguments = (c_size_t(size), c_size_t(0), c_uint64(0), c_ulonglong(0))
        return self.run("cuMemAddressReserve", byref(address), *arguments), address

    def map(self, address: c_uint64, memory: c_uint64, size: int = GRANULARITY) -> int:
        return self.run("cuMemMap", address, c_size_t(size), c_size_t(0), memory, c_ulonglong(0))

    def set_access(self, address: c_uint64, device: int, flags: int, size: int = GRANULARITY) -> int:
        access = MemAccessDesc(MemLocation(1, device), flags)
        return self.run("cuMemSetAccess", address, c_size_t(size), byref(access), c_size_t(1))

    def map_again(self, address: int) -> tuple[c_uint64, c_uint64]:
        """Map a granule of mapped memory at a second address, without access; return the handle and the address."""
        memory, (_, reserved) = self.retain(address), self.reserve()
        assert self.map(reserved, memory) == 0
        return memory, reserved

    def unmap(self, memory: c_uint64, address: c_uint64) -> None:
        """Undo `map_again`."""
        assert self.run("cuMemUnmap", address.value, GRANULARITY) == 0
        assert self.run("cuMemAddressFree", address.value, GRANULARITY) == 0
        assert self.run("cuMemRelease", memory.value) == 0


_SOURCE = """
import ctypes, sys
fake = ctypes.CDLL(sys.argv[1])
fake.fake_allocate.restype = ctypes.c_ulonglong
context, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
address = ctypes.c_ulonglong(fake.fake_allocate(ctypes.c_size_t(4096), 0, ctypes.c_size_t(0)))
fake.fake_write(address, b"z" * 4096, ctypes.c_size_t(4096))
fake.cuInit(0)
fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
fake.cuCtxPushCurrent_v2(context)
assert fake.cuIpcGetMemHandle(handle, address) == 0
print(handle.raw.hex(), flush=True)
for line in sys.stdin:
    fake.fake_free(address)
    print("freed", flush=True)
"""


class SourceProcess:
    """A process with 4096 bytes `z` in memory of cuMemAlloc on device 0, and the handle of that memory."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _SOURCE, str(library_path())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.handle = IpcMemHandle.from_buffer_copy(bytes.fromhex(self._read()))

    def free(self) -> None:
        """Let the process free the memory."""
        assert self._process.stdin
        self._process.stdin.write("free\n")
        self._process.stdin.flush()
        assert self._read() == "freed\n"

    def kill(self) -> None:
        """Kill the process."""
        with self._process as process:
            process.kill()

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()
