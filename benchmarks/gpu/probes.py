"""Report what the CUDA driver does where rfork, and the fake driver of its tests, had to assume it.

`python -m benchmarks.gpu.probes [--device cpu] [--json FILE]`: with a GPU, the driver's result of each probe next to
that of `tests/fake_libcuda`, if it can be compiled here; without one, the fake's alone. A result is an error code of
cuda.h (0 is success), a word, or the signal that ended the probe's process. Differences are no failure: where the
driver is stricter than the fake, the fake hides errors of rfork; where it is less strict, the fake demands too much.

Each probe has a process of its own, since some of them crash it or leave its GPU context unusable.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Final, Literal, Protocol

import torch

from benchmarks.gpu.result_file import ResultFile, Value
from rfork.cuda import library as cuda
from rfork.cuda.device import CudaDriver
from rfork.cuda.library import DriverError, IpcMemHandle, MemAccessDesc, MemLocation, Uuid
from rfork.image.host_memory import HUGE_PAGE
from rfork.image.staging import allocate_host

PIECE_BYTES: Final = 20 << 20
"""Torch maps large tensors of expandable segments in pieces of this size."""
MAPPED_BYTES: Final = 3 * PIECE_BYTES
LEGACY_BYTES: Final = 4 << 20
HOST_BYTES: Final = 16 << 20
QUEUED_COPIES: Final = 32
"""Copies of `HOST_BYTES` that take several ms together."""
PAGE: Final = 4096
FILL: Final = 7
"""Byte of which all memory of an owner consists."""
PROBE_S: Final = 30.0
"""Time limit of a probe."""
RANGE_START_ADDR: Final = 11
RANGE_SIZE: Final = 12
"""Pointer attributes that rfork does not use."""
STREAM_CAPTURE_MODE_GLOBAL: Final = 0
PROCESSES: Final = multiprocessing.get_context("forkserver")
"""Its server imports torch once, and never uses a GPU."""
PRELOADED: Final = ["torch", "rfork.image.staging", "tests.fake_libcuda.fake_gpu"]

DIFFERS: Final = "DIFFERS"
FAILED: Final = "FAILED: see the output"

MachineName = Literal["driver", "fake"]
Result = int | str
Results = Iterator[tuple[str, Result]]
"""Cases of a probe and their results, in order."""
Probe = Callable[["ProbeMachine", "Owner"], Results]
Call = Callable[[], int]


class ProbeMachine(Protocol):
    """A device with its driver, and memory of it that is kept until `free`."""

    name: MachineName
    driver: CudaDriver

    def legacy(self, nbytes: int) -> int:
        """Return the address of memory of cudaMalloc, or cuMemAlloc."""
        ...

    def mapped(self, nbytes: int) -> int:
        """Return the address of memory in pieces of `PIECE_BYTES`, as of torch's expandable segments."""
        ...

    def free(self) -> None:
        """Free all memory."""
        ...

    def capturing(self) -> AbstractContextManager[Callable[[], bool]]:
        """Capture a graph in global mode on this thread within the block; afterwards, the function returns True if no
        call has invalidated the capture.
        """
        ...

    def queueing(self) -> AbstractContextManager[None]:
        """Let copies wait until the end of the block where they would be faster than this program."""
        ...


class GpuMachine:
    """The first GPU, with its driver and torch's allocator."""

    name: MachineName = "driver"

    def __init__(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.driver = CudaDriver()
        self._library = ctypes.CDLL(cuda.LIBRARY_PATH)
        self._tensors: list[torch.Tensor] = []

    def legacy(self, nbytes: int) -> int:
        """See `ProbeMachine`."""
        return self._allocate(nbytes, expandable=False)

    def mapped(self, nbytes: int) -> int:
        """See `ProbeMachine`."""
        return self._allocate(nbytes, expandable=True)

    def free(self) -> None:
        """See `ProbeMachine`."""
        self._tensors.clear()
        torch.cuda.empty_cache()

    def _allocate(self, nbytes: int, *, expandable: bool) -> int:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
        try:
            self._tensors.append(torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0"))
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        torch.cuda.synchronize()
        return self._tensors[-1].data_ptr()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[Callable[[], bool]]:
        """See `ProbeMachine`. The stream is non-blocking, as are those on which torch captures."""
        stream, graph, codes = c_void_p(), c_void_p(), list[int]()
        with self.driver.on_device(0):
            self.driver.library.call("cuStreamCreate", byref(stream), cuda.STREAM_NON_BLOCKING)
            begun = self._library.cuStreamBeginCapture_v2(stream, STREAM_CAPTURE_MODE_GLOBAL)
            self.driver.library.check("cuStreamBeginCapture", begun)
            try:
                yield lambda: codes == [cuda.SUCCESS]
            finally:
                codes.append(self._library.cuStreamEndCapture(stream, byref(graph)))
                if graph.value:
                    self._library.cuGraphDestroy(graph)
                self.driver.library.call("cuStreamDestroy_v2", stream.value)

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """See `ProbeMachine`. Copies between host and device are slow enough."""
        yield


class FakeMachine:
    """The fake driver of the tests, which this process uses until it ends."""

    name: MachineName = "fake"

    def __init__(self) -> None:
        from tests.fake_libcuda.fake_gpu import FakeGpu

        self._gpu = FakeGpu()
        cuda.LIBRARY_PATH = self._gpu.path
        self.driver = CudaDriver()

    def legacy(self, nbytes: int) -> int:
        """See `ProbeMachine`."""
        return self._gpu.allocate(nbytes).data_ptr()

    def mapped(self, nbytes: int) -> int:
        """See `ProbeMachine`."""
        return self._gpu.allocate(nbytes, kind="expandable", piece=PIECE_BYTES).data_ptr()

    def free(self) -> None:
        """See `ProbeMachine`."""
        self._gpu.free_all()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[Callable[[], bool]]:
        """See `ProbeMachine`."""
        before = len(self._gpu.forbidden_calls)
        with self._gpu.capturing():
            yield lambda: len(self._gpu.forbidden_calls) == before

    def queueing(self) -> AbstractContextManager[None]:
        """See `ProbeMachine`."""
        return self._gpu.paused_copies()


def machine_of(name: MachineName) -> ProbeMachine:
    """Return a new machine."""
    return GpuMachine() if name == "driver" else FakeMachine()


# -- driver calls -------------------------------------------------------------------------------------------------


class Owner:
    """Another process with device memory of `FILL` and its handles, after `allocate`. Ends with this process.

    Created before this process uses the driver.
    """

    handle: IpcMemHandle
    """Of `size` bytes of cudaMalloc."""
    size: int
    descriptor: int
    """Of the first piece of expandable memory."""

    def __init__(self, machine: MachineName, results: Connection) -> None:
        self._connection, connection = multiprocessing.Pipe()
        inherited = results, self._connection  # by which others notice that this process has ended
        arguments = machine, connection, inherited
        self._process = multiprocessing.get_context("fork").Process(target=_own_memory, args=arguments, daemon=True)
        self._process.start()
        connection.close()

    def allocate(self) -> None:
        """Let it allocate its memory."""
        self._connection.send("allocate")
        data, self.size = self._connection.recv()
        self.handle = IpcMemHandle.from_buffer_copy(data)
        self.descriptor = recv_handle(self._connection)

    def open(self, machine: ProbeMachine) -> int:
        """Let it allocate its memory, and return the address at which the handle was opened."""
        self.allocate()
        address, lazy = c_uint64(), cuda.IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        machine.driver.library.call("cuIpcOpenMemHandle_v2", byref(address), self.handle, lazy)
        return address.value

    def free(self) -> None:
        """Let it free its memory."""
        self._connection.send("free")
        self._connection.recv()

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self._process.kill()
        self._process.join()


def _own_memory(name: MachineName, connection: Connection, inherited: Sequence[Connection]) -> None:
    """Main function of an owner's process."""
    for one in inherited:
        one.close()
    with contextlib.suppress(EOFError):
        connection.recv()
        machine = machine_of(name)
        _send_handles(machine, connection)
        connection.recv()
        machine.free()
        connection.send("freed")
        connection.recv()


def _send_handles(machine: ProbeMachine, connection: Connection) -> None:
    call = machine.driver.library.call
    handle, exported, descriptor = IpcMemHandle(), c_uint64(), c_int()
    with machine.driver.on_device(0):
        legacy, mapped = machine.legacy(LEGACY_BYTES), machine.mapped(MAPPED_BYTES)
        base, size = _address_range(machine, legacy)
        for address, nbytes in ((base, size), (mapped, PIECE_BYTES)):
            _fill(machine, address, nbytes)
        call("cuIpcGetMemHandle", byref(handle), base)
        call("cuMemRetainAllocationHandle", byref(exported), mapped)
        posix = cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        call("cuMemExportToShareableHandle", byref(descriptor), exported.value, posix, 0)
    connection.send((bytes(handle.reserved), size))
    send_handle(connection, descriptor.value, os.getppid())


def _copy(machine: ProbeMachine, target: int, source: int, nbytes: int) -> int:
    """Copy on a new stream and wait; returns the first error code."""
    function, stream = machine.driver.library.function, c_void_p()
    return (
        function("cuStreamCreate")(byref(stream), cuda.STREAM_NON_BLOCKING)
        or function("cuMemcpyAsync")(target, source, nbytes, stream)
        or function("cuStreamSynchronize")(stream)
        or function("cuStreamDestroy_v2")(stream)
    )


def _fill(machine: ProbeMachine, address: int, nbytes: int, value: int = FILL) -> None:
    host = machine.driver.allocate_host(nbytes, 0)
    ctypes.memset(host, value, nbytes)
    machine.driver.library.check("cuMemcpyAsync", _copy(machine, address, host, nbytes))
    machine.driver.free_host(host, 0)


def _content(machine: ProbeMachine, address: int, nbytes: int = LEGACY_BYTES) -> Result:
    """Return if device memory contains what `_fill` wrote, or the error code of copying it."""
    host = machine.driver.allocate_host(nbytes, 0)
    code = _copy(machine, host, address, nbytes)
    return code or ("right bytes" if ctypes.string_at(host, nbytes) == bytes([FILL]) * nbytes else "wrong bytes")


def _address_range(machine: ProbeMachine, address: int) -> tuple[int, int]:
    """Return base and size by cuMemGetAddressRange; (0, 0) for an error."""
    base, size = c_uint64(), c_size_t()
    machine.driver.library.function("cuMemGetAddressRange_v2")(byref(base), byref(size), address)
    return base.value, size.value


def _attribute(machine: ProbeMachine, attribute: int, address: int) -> Result:
    try:
        return machine.driver.pointer_attribute(attribute, address)
    except DriverError as error:
        return f"error {error.code}"


def _device_access(flags: int) -> MemAccessDesc:
    return MemAccessDesc(MemLocation(cuda.MEM_LOCATION_TYPE_DEVICE, 0), flags)


def driver_calls(machine: ProbeMachine, owner: Owner) -> Iterator[tuple[str, Call]]:
    """Yield every call that rfork makes, and cuEventQuery, which torch makes. Each needs that those before it have
    succeeded.
    """
    function, legacy, mapped = machine.driver.library.function, machine.legacy(PAGE), machine.mapped(MAPPED_BYTES)
    number, context, mode = c_int(), c_void_p(), c_int(STREAM_CAPTURE_MODE_GLOBAL)

    def call(name: str, *arguments: object) -> tuple[str, Call]:
        return name, partial(function(name), *arguments)

    yield call("cuDeviceGet", byref(number), 0)
    yield call("cuDeviceGetCount", byref(number))
    yield call("cuDeviceGetUuid_v2", byref(Uuid()), 0)
    yield call("cuDeviceGetAttribute", byref(number), cuda.DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 0)
    yield call("cuDeviceCanAccessPeer", byref(number), 0, 0)
    yield call("cuDevicePrimaryCtxRetain", byref(context), 0)
    push, pop = partial(function("cuCtxPushCurrent_v2"), context), partial(function("cuCtxPopCurrent_v2"), None)
    yield "cuCtxPushCurrent_v2 and cuCtxPopCurrent_v2", lambda: push() or pop()
    exchange = partial(function("cuThreadExchangeStreamCaptureMode"), byref(mode))
    yield "cuThreadExchangeStreamCaptureMode", lambda: exchange() or exchange()

    base, size, value = c_uint64(), c_size_t(), c_uint64()
    yield call("cuMemGetAddressRange_v2", byref(base), byref(size), legacy)
    yield call("cuPointerGetAttribute", byref(value), cuda.POINTER_ATTRIBUTE_MAPPING_SIZE, mapped)
    flush = cuda.FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, cuda.FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
    yield call("cuFlushGPUDirectRDMAWrites", *flush)

    stream, event, host, huge = c_void_p(), c_void_p(), c_void_p(), allocate_host(HOST_BYTES)
    yield call("cuMemHostAlloc", byref(host), PAGE, cuda.MEMHOSTALLOC_PORTABLE)
    yield call("cuMemHostRegister_v2", huge.data_ptr(), HOST_BYTES, cuda.MEMHOSTREGISTER_PORTABLE)
    yield call("cuStreamCreate", byref(stream), cuda.STREAM_NON_BLOCKING)
    yield call("cuStreamQuery", stream)
    yield call("cuMemcpyAsync", host.value, legacy, PAGE, stream)
    yield call("cuEventCreate", byref(event), cuda.EVENT_BLOCKING_SYNC | cuda.EVENT_DISABLE_TIMING)
    name, record = call("cuEventRecord", event, None)
    yield f"{name}, legacy stream", record
    yield call("cuEventRecord", event, stream)
    yield call("cuStreamWaitEvent", stream, event, 0)
    yield call("cuStreamSynchronize", stream)
    yield call("cuEventSynchronize", event)
    yield "cuEventQuery", partial(ctypes.CDLL(cuda.LIBRARY_PATH).cuEventQuery, event)
    yield call("cuEventDestroy_v2", event)
    yield call("cuStreamDestroy_v2", stream)
    yield call("cuMemHostUnregister", huge.data_ptr())
    yield call("cuMemFreeHost", host)

    opened, imported, exported, target, descriptor = c_uint64(), c_uint64(), c_uint64(), c_uint64(), c_int(-1)
    yield call("cuIpcGetMemHandle", byref(IpcMemHandle()), base.value)
    yield call("cuIpcOpenMemHandle_v2", byref(opened), owner.handle, cuda.IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    yield call("cuIpcCloseMemHandle", opened.value)
    yield call("cuMemRetainAllocationHandle", byref(exported), mapped)
    posix = cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    yield call("cuMemExportToShareableHandle", byref(descriptor), exported.value, posix, 0)
    yield call("cuMemImportFromShareableHandle", byref(imported), owner.descriptor, posix)
    yield call("cuMemAddressReserve", byref(target), PIECE_BYTES, 0, 0, 0)
    yield call("cuMemMap", target.value, PIECE_BYTES, 0, imported.value, 0)
    access = _device_access(cuda.MEM_ACCESS_FLAGS_PROT_READWRITE)
    yield call("cuMemSetAccess", target.value, PIECE_BYTES, byref(access), 1)
    yield call("cuMemUnmap", target.value, PIECE_BYTES)
    yield call("cuMemAddressFree", target.value, PIECE_BYTES)
    yield call("cuMemRelease", imported.value)


def _on_new_thread(call: Call) -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def _without_context(machine: ProbeMachine, call: Call) -> tuple[int, str]:
    return _on_new_thread(call), ""


def _during_capture(mode: int, machine: ProbeMachine, call: Call) -> tuple[int, str]:
    """Make a call on another thread, which is in this mode, than the one that captures a graph in global mode."""
    exchange = machine.driver.library.function("cuThreadExchangeStreamCaptureMode")

    def call_in_mode() -> int:
        with machine.driver.on_device(0):
            calls_mode = c_int(mode)
            exchange(byref(calls_mode))
            code = call()
            exchange(byref(calls_mode))
        return code

    with machine.capturing() as is_intact:
        code = _on_new_thread(call_in_mode)
    return code, ", capture intact" if is_intact() else ", capture invalidated"


def _results_of_calls(
    machine: ProbeMachine, owner: Owner, make: Callable[[ProbeMachine, Call], tuple[int, str]]
) -> Results:
    """Return the results of all calls, each made by `make`. One that fails is made again as rfork makes it, since later
    ones need it.
    """
    owner.allocate()
    with machine.driver.on_device(0):
        for name, call in driver_calls(machine, owner):
            code, word = make(machine, call)
            yield name, f"{code}{word}" if word else code
            if code != cuda.SUCCESS:
                call()


# -- probes -------------------------------------------------------------------------------------------------------


def without_a_context(machine: ProbeMachine, owner: Owner) -> Results:
    """Calls on a thread that has no current context."""
    yield from _results_of_calls(machine, owner, _without_context)


def during_a_global_capture(machine: ProbeMachine, owner: Owner) -> Results:
    """Calls of a thread in the default mode, while another thread captures in global mode."""
    yield from _results_of_calls(machine, owner, partial(_during_capture, STREAM_CAPTURE_MODE_GLOBAL))


def relaxed_during_a_global_capture(machine: ProbeMachine, owner: Owner) -> Results:
    """Calls of a thread in relaxed mode, as are almost all of rfork's."""
    yield from _results_of_calls(machine, owner, partial(_during_capture, cuda.STREAM_CAPTURE_MODE_RELAXED))


def rdma_writes(machine: ProbeMachine, owner: Owner) -> Results:
    """Attributes by which rfork decides if it must flush the writes of network cards, and the flush."""
    yield "order", machine.driver.attribute(0, cuda.DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
    yield "flush options", machine.driver.attribute(0, cuda.DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)
    yield "dma-buf", machine.driver.attribute(0, cuda.DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)
    flush = machine.driver.library.function("cuFlushGPUDirectRDMAWrites")
    with machine.driver.on_device(0):
        yield (
            "cuFlushGPUDirectRDMAWrites",
            flush(cuda.FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, cuda.FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER),
        )


def address_ranges(machine: ProbeMachine, owner: Owner) -> Results:
    """Ranges and types of memory of cudaMalloc, and of an address in the second piece of expandable memory."""
    legacy, mapped = machine.legacy(LEGACY_BYTES), machine.mapped(MAPPED_BYTES) + PIECE_BYTES + PAGE
    with machine.driver.on_device(0):
        base, size = _address_range(machine, legacy)
        contains = base <= legacy and legacy + LEGACY_BYTES <= base + size
        yield "cuMemGetAddressRange, cudaMalloc", "the allocation" if contains else "another range"
        attribute = partial(_attribute, machine)
        base_of_piece = attribute(cuda.POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, mapped)
        piece = base_of_piece, attribute(cuda.POINTER_ATTRIBUTE_MAPPING_SIZE, mapped)
        reservation = attribute(RANGE_START_ADDR, mapped), attribute(RANGE_SIZE, mapped)
        found = _address_range(machine, mapped)
        words = {reservation: "the reservation", piece: "one piece"}
        yield "cuMemGetAddressRange, expandable", words.get(found, "another range")
        yield "MAPPING_SIZE, expandable", piece[1]
        yield "RANGE_SIZE, expandable", "that of one piece" if reservation[1] == piece[1] else "another size"
        for name, address in (("cudaMalloc", legacy), ("expandable", mapped)):
            legacy_capable = attribute(cuda.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)
            yield f"IS_LEGACY_CUDA_IPC_CAPABLE, {name}", legacy_capable
            yield f"ALLOWED_HANDLE_TYPES, {name}", attribute(cuda.POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address)


def mapped_memory(machine: ProbeMachine, owner: Owner) -> Results:
    """Export of expandable memory, and mappings of another process's piece of it."""
    function, unit = machine.driver.library.function, HUGE_PAGE
    posix = cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    legacy, address = machine.legacy(LEGACY_BYTES), machine.mapped(MAPPED_BYTES)
    first, second, imported, target, part = c_uint64(), c_uint64(), c_uint64(), c_uint64(), c_uint64()
    owner.allocate()
    with machine.driver.on_device(0):
        yield "cuIpcGetMemHandle", function("cuIpcGetMemHandle")(byref(IpcMemHandle()), address)
        yield "cuMemRetainAllocationHandle", function("cuMemRetainAllocationHandle")(byref(first), address)
        function("cuMemRetainAllocationHandle")(byref(second), address)
        yield "its handle, retained twice", "equal" if first.value == second.value else "different"
        retain = function("cuMemRetainAllocationHandle")(byref(second), legacy)
        yield "cuMemRetainAllocationHandle, cudaMalloc", retain
        descriptor = c_int(-1)
        export = function("cuMemExportToShareableHandle")(byref(descriptor), first.value, posix, 0)
        yield "cuMemExportToShareableHandle", export

        def open_descriptor(handle: int) -> int:
            return function("cuMemImportFromShareableHandle")(byref(imported), handle, posix)

        own = open_descriptor(descriptor.value)
        yield "cuMemImportFromShareableHandle, own process", own
        if own == cuda.SUCCESS:
            function("cuMemRelease")(imported.value)
            yield "cuMemRelease, released handle", function("cuMemRelease")(imported.value)
        owner.kill()
        yield "cuMemImportFromShareableHandle, process has ended", open_descriptor(owner.descriptor)

        reserve, free = function("cuMemAddressReserve"), function("cuMemAddressFree")
        yield "cuMemAddressReserve, not a multiple of 2 MiB", reserve(byref(part), unit + PAGE, 0, 0, 0)
        yield "cuMemAddressReserve", reserve(byref(target), PIECE_BYTES + unit, 0, 0, 0)
        map_memory, unmap = function("cuMemMap"), function("cuMemUnmap")
        for name, nbytes in (
            ("more than the memory", PIECE_BYTES + unit),
            ("less than the memory", PIECE_BYTES - unit),
        ):
            code = map_memory(target.value, nbytes, 0, imported.value, 0)
            yield f"cuMemMap, {name}", code
            if code == cuda.SUCCESS:
                unmap(target.value, nbytes)
        yield "cuMemMap", map_memory(target.value, PIECE_BYTES, 0, imported.value, 0)
        yield "cuMemMap, mapped address", map_memory(target.value, PIECE_BYTES, 0, imported.value, 0)
        for name, flags in (
            ("PROT_READ", cuda.MEM_ACCESS_FLAGS_PROT_READ),
            ("PROT_READWRITE", cuda.MEM_ACCESS_FLAGS_PROT_READWRITE),
        ):
            access = _device_access(flags)
            yield f"cuMemSetAccess, {name}", function("cuMemSetAccess")(target.value, PIECE_BYTES, byref(access), 1)
        yield "cuMemRelease, mapped memory", function("cuMemRelease")(imported.value)
        yield "copy after cuMemRelease", _content(machine, target.value, PIECE_BYTES)
        yield "cuMemAddressFree, mapped address", free(target.value, PIECE_BYTES + unit)
        yield "cuMemUnmap, a part", unmap(target.value, unit)
        yield "cuMemUnmap", unmap(target.value, PIECE_BYTES)
        yield "cuMemAddressFree", free(target.value, PIECE_BYTES + unit)


def legacy_handles(machine: ProbeMachine, owner: Owner) -> Results:
    """Handles of cudaMalloc: of this process and of another one, opened twice, and of memory that is gone."""
    function, lazy = machine.driver.library.function, cuda.IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    own, first, second, address = IpcMemHandle(), c_uint64(), c_uint64(), machine.legacy(LEGACY_BYTES)
    get, close = function("cuIpcGetMemHandle"), function("cuIpcCloseMemHandle")
    owner.allocate()

    def open_handle(address: c_uint64, handle: IpcMemHandle, flags: int = lazy) -> int:
        return function("cuIpcOpenMemHandle_v2")(byref(address), handle, flags)

    with machine.driver.on_device(0):
        base, _ = _address_range(machine, address)
        yield "cuIpcGetMemHandle", get(byref(own), base)
        yield "cuIpcGetMemHandle, within the allocation", get(byref(IpcMemHandle()), base + PAGE)
        yield "cuIpcOpenMemHandle, own process", open_handle(first, own)
        yield "cuIpcOpenMemHandle, flags 0", open_handle(first, owner.handle, 0)
        yield "cuIpcOpenMemHandle", open_handle(first, owner.handle)
        yield "copy", _content(machine, first.value)
        yield "cuIpcOpenMemHandle, again", open_handle(second, owner.handle)
        yield "its address, opened twice", "equal" if first.value == second.value else "different"
        expected = first.value, owner.size
        yield (
            "cuMemGetAddressRange",
            "the allocation" if _address_range(machine, first.value) == expected else "another range",
        )
        legacy_capable = _attribute(machine, cuda.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, first.value)
        yield "IS_LEGACY_CUDA_IPC_CAPABLE", legacy_capable
        for name in ("cuIpcCloseMemHandle", "cuIpcCloseMemHandle, again"):
            yield name, close(first.value)
            yield f"memory after {name}", "mapped" if _address_range(machine, first.value)[1] else "not mapped"
        yield "cuIpcCloseMemHandle, closed handle", close(first.value)
        yield "cuIpcOpenMemHandle, after it was closed", open_handle(first, owner.handle)
        close(first.value)
        owner.free()
        yield "cuIpcOpenMemHandle, freed memory", open_handle(first, owner.handle)


def handle_of_a_dead_owner(machine: ProbeMachine, owner: Owner) -> Results:
    """A handle that is opened after its owner was killed."""
    owner.allocate()
    owner.kill()
    function, lazy = machine.driver.library.function, cuda.IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    with machine.driver.on_device(0):
        yield "", function("cuIpcOpenMemHandle_v2")(byref(c_uint64()), owner.handle, lazy)


def host_memory(machine: ProbeMachine, owner: Owner) -> Results:
    """Registration of host memory, and copies by its host address."""
    function, memory, device = machine.driver.library.function, allocate_host(HOST_BYTES), machine.legacy(LEGACY_BYTES)
    address = memory.data_ptr()
    register, unregister = function("cuMemHostRegister_v2"), function("cuMemHostUnregister")
    with machine.driver.on_device(0):
        yield "cuMemHostRegister", register(address, HOST_BYTES, cuda.MEMHOSTREGISTER_PORTABLE)
        memory.fill_(FILL)
        yield "copy from it", _copy(machine, device, address, LEGACY_BYTES) or _content(machine, device)
        yield "cuMemHostRegister, a part again", register(address, PAGE, cuda.MEMHOSTREGISTER_PORTABLE)
        yield "cuMemHostUnregister, a part", unregister(address + PAGE)
        yield "cuMemHostUnregister", unregister(address)
        yield "cuMemHostUnregister, again", unregister(address)
        code = register(address + 100, 5000, cuda.MEMHOSTREGISTER_PORTABLE)
        yield "cuMemHostRegister, parts of pages", code
        if code == cuda.SUCCESS:
            unregister(address + 100)


def copies(machine: ProbeMachine, owner: Owner) -> Results:
    """Order of copies on two streams, and a copy of memory in several pieces."""
    device, last, mapped = machine.legacy(HOST_BYTES), machine.legacy(PAGE), machine.mapped(MAPPED_BYTES)
    driver = machine.driver
    with driver.on_device(0):
        host, read = driver.allocate_host(HOST_BYTES, 0), driver.allocate_host(PAGE, 0)
        ctypes.memset(host, FILL, HOST_BYTES)
        function, streams, event = driver.library.function, (c_void_p(), c_void_p()), c_void_p()
        for stream in streams:
            driver.library.call("cuStreamCreate", byref(stream), cuda.STREAM_NON_BLOCKING)
        driver.library.call("cuEventCreate", byref(event), cuda.EVENT_DISABLE_TIMING)
        first, second = streams
        copy, query = function("cuMemcpyAsync"), function("cuStreamQuery")
        yield "cuMemcpyAsync, 0 bytes", copy(device, host, 0, first)
        for name in ("two streams", "two streams, with an event"):
            _fill(machine, last, PAGE, 0)
            with machine.queueing():
                for _ in range(QUEUED_COPIES):
                    copy(device, host, HOST_BYTES, first)
                copy(last, host, PAGE, first)
                if name.endswith("event"):
                    function("cuEventRecord")(event, first)
                    function("cuStreamWaitEvent")(second, event, 0)
                copy(read, last, PAGE, second)
                busy = query(first)
            for stream in streams:
                function("cuStreamSynchronize")(stream)
            yield f"cuStreamQuery, {name}", busy
            yield name, "in order" if ctypes.string_at(read, PAGE) == bytes([FILL]) * PAGE else "the later one is first"
        yield "cuStreamQuery, complete", query(first)
        address = mapped + PIECE_BYTES - HOST_BYTES // 2
        yield (
            "memory in two pieces",
            _copy(machine, address, host, HOST_BYTES) or _content(machine, address, HOST_BYTES),
        )


def driver_in_a_forked_child(machine: ProbeMachine, owner: Owner) -> Results:
    """A call in a child of os.fork, whose parent has used the driver."""
    get_count = machine.driver.library.function("cuDeviceGetCount")
    child = os.fork()
    if child == 0:
        os._exit(get_count(byref(c_int())))
    yield "", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def host_access(machine: ProbeMachine, owner: Owner) -> Results:
    """A read of device memory by the host."""
    address = machine.legacy(LEGACY_BYTES)
    yield "", f"read {len(ctypes.string_at(address, 1))} byte"


def copy_after_close(machine: ProbeMachine, owner: Owner) -> Results:
    """A copy from a handle that this process has closed."""
    with machine.driver.on_device(0):
        address = owner.open(machine)
        machine.driver.library.call("cuIpcCloseMemHandle", address)
        yield "", _content(machine, address)


def copy_of_freed_memory(machine: ProbeMachine, owner: Owner) -> Results:
    """A copy from an open handle whose owner has freed the memory."""
    with machine.driver.on_device(0):
        address = owner.open(machine)
        owner.free()
        yield "", _content(machine, address)


def copy_of_a_dead_owner(machine: ProbeMachine, owner: Owner) -> Results:
    """A copy from an open handle whose owner was killed."""
    with machine.driver.on_device(0):
        address = owner.open(machine)
        owner.kill()
        yield "", _content(machine, address)


PROBES: Final[tuple[Probe, ...]] = (
    rdma_writes, address_ranges, mapped_memory, legacy_handles, handle_of_a_dead_owner, host_memory, copies,
    without_a_context, during_a_global_capture, relaxed_during_a_global_capture, driver_in_a_forked_child,
    host_access, copy_after_close, copy_of_freed_memory, copy_of_a_dead_owner,
)  # fmt: skip


# -- processes and results ----------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all probes; returns the exit status: 1 if one raised an error or reached its time limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    PROCESSES.set_forkserver_preload(PRELOADED)
    has_fake = options.device == "cpu" or _can_compile_fake()
    results, has_failed, differences = ResultFile(options.json, benchmark="gpu.probes"), False, 0
    for probe in PROBES:
        fake = dict(run_probe(probe, "fake")) if has_fake else {}
        found = iter(fake.items()) if options.device == "cpu" else run_probe(probe, "driver")
        for row in rows_of(found, fake, "fake" if options.device == "cpu" else "driver"):
            results.add(row)
            has_failed |= FAILED in row.values()
            differences += row.get("differs") == DIFFERS
    if options.device == "cuda" and has_fake:
        print(f"{differences} of {len(results.rows)} results differ between the driver and the fake")
    return int(has_failed)


def _can_compile_fake() -> bool:
    from tests.fake_libcuda.build import library_path

    try:
        library_path()
    except RuntimeError as error:
        print(f"without the fake's results: {error}")
        return False
    return True


def rows_of(found: Results, fake: Mapping[str, Result], machine: MachineName) -> Iterator[dict[str, Value]]:
    """Return a row for each result that a machine found, with the fake's if there are any, and for each result that
    only the fake has.
    """
    missing = dict(fake)
    for case, result in found:
        row: dict[str, Value] = {"probe": case, machine: result}
        if machine == "driver" and fake:
            expected = missing.get(case)
            row |= {"fake": expected, "differs": "" if expected == result else DIFFERS}
        missing.pop(case, None)
        yield row
    for case, expected in missing.items():
        yield {"probe": case, machine: None, "fake": expected, "differs": DIFFERS}


def run_probe(probe: Probe, machine: MachineName) -> Results:
    """Run a probe in a process of its own; yields its cases with the probe's name, as they come.

    If the process does not end normally, the last result states why.
    """
    name = getattr(probe, "__name__", "").replace("_", " ")
    results, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_send_results, args=(probe, machine, sender))
    process.start()
    sender.close()
    until = time.monotonic() + PROBE_S
    try:
        while results.poll(max(0.0, until - time.monotonic())):
            case, result = results.recv()
            yield f"{name}: {case}" if case else name, result
        yield f"{name}: not complete within {PROBE_S:.0f} s", FAILED
    except EOFError:
        process.join(max(0.0, until - time.monotonic()))
        if process.exitcode:
            yield name, FAILED if process.exitcode > 0 else f"signal {-process.exitcode}"
    finally:
        process.kill()
        process.join()
        results.close()


def _send_results(probe: Probe, machine: MachineName, results: Connection) -> None:
    """Main function of a probe's process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    owner = Owner(machine, results)
    try:
        for result in probe(machine_of(machine), owner):
            results.send(result)
    except DriverError as error:
        results.send(("unexpected error", str(error)))


if __name__ == "__main__":
    raise SystemExit(main())
