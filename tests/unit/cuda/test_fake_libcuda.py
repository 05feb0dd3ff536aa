"""The fake driver library is as strict as a real one: each of its rules fails a program that breaks it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p

import pytest

from rfork.cuda import library
from rfork.cuda.library import CudaDriverLibrary, IpcMemHandle, MemAccessDesc, MemLocation
from tests.fake_libcuda.build import library_path
from tests.fake_libcuda.fake_gpu import GRANULARITY, CopyFailure, FakeGpu

RELAXED, DESCRIPTOR, MAPPING_SIZE = 2, 1, 18
NON_BLOCKING, LAZY_PEER_ACCESS = 1, 1


class Program:
    """A program that uses the driver on one thread. Functions return the driver's result."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "LIBRARY_PATH", gpu.path)
            self.bindings = CudaDriverLibrary()
        assert self.run("cuInit", 0) == 0

    def run(self, name: str, *arguments: object) -> int:
        if name in ("cuInit", "cuMemcpyAsync", "cuStreamQuery", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"):
            return self.bindings.function(name)(*arguments)
        function: Callable[..., int] = getattr(self.gpu.library, name)
        return function(*arguments)

    def use(self, device: int) -> None:
        context = c_void_p()
        assert self.run("cuDevicePrimaryCtxRetain", byref(context), device) == 0
        assert self.run("cuCtxPushCurrent_v2", context) == 0

    def stream(self) -> c_void_p:
        stream = c_void_p()
        assert self.run("cuStreamCreate", byref(stream), NON_BLOCKING) == 0
        return stream

    def pinned(self, size: int) -> c_void_p:
        address = c_void_p()
        assert self.run("cuMemHostAlloc", byref(address), c_size_t(size), 1) == 0
        return address

    def relax(self) -> c_int:
        mode = c_int(RELAXED)
        assert self.run("cuThreadExchangeStreamCaptureMode", byref(mode)) == 0
        return mode


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    fake = FakeGpu()
    fake.reset()
    yield fake
    fake.reset()


@pytest.fixture
def program(gpu: FakeGpu) -> Iterator[Program]:
    program = Program(gpu)
    program.use(0)
    yield program
    while gpu.thread_depth:
        program.run("cuCtxPopCurrent_v2", None)


def test_host_access_crashes() -> None:
    """A read of device memory by the host ends the process."""
    code = (
        "import ctypes, sys; fake = ctypes.CDLL(sys.argv[1]); fake.fake_allocate.restype = ctypes.c_ulonglong;"
        "ctypes.string_at(fake.fake_allocate(ctypes.c_size_t(4096), 0, ctypes.c_size_t(0)), 1)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(library_path())], check=False).returncode == -11


def test_context_is_required(gpu: FakeGpu, program: Program) -> None:
    """Without a current context, creating a stream fails with error 201."""
    assert program.run("cuCtxPopCurrent_v2", None) == 0
    assert program.run("cuStreamCreate", byref(c_void_p()), NON_BLOCKING) == 201


def test_retained_contexts_are_recorded(gpu: FakeGpu, program: Program) -> None:
    """The devices whose context was retained are known."""
    program.use(1)
    assert gpu.contexts == {0, 1}


@pytest.mark.parametrize("name", ["cuMemHostAlloc", "cuStreamQuery"])
def test_capture_forbids_unsafe_calls(gpu: FakeGpu, program: Program, name: str) -> None:
    """While another thread captures, an unsafe call fails with 900 and is recorded."""
    stream = program.stream()
    arguments = (stream,) if name == "cuStreamQuery" else (byref(c_void_p()), c_size_t(4096), 1)
    with gpu.capturing():
        assert program.run(name, *arguments) == 900
    assert [text.split()[0] for text in gpu.forbidden_calls] == [name]


def test_relaxed_thread_may_make_unsafe_calls(gpu: FakeGpu, program: Program) -> None:
    """In relaxed mode, the calls succeed during a capture."""
    stream, before = program.stream(), program.relax()
    with gpu.capturing():
        assert program.run("cuStreamQuery", stream) == 0
    program.run("cuThreadExchangeStreamCaptureMode", byref(before))
    assert gpu.forbidden_calls == []
    assert gpu.thread_capture_mode == 0


def test_legacy_stream_is_a_violation_during_capture(gpu: FakeGpu, program: Program) -> None:
    """Even a relaxed thread may not use the legacy stream during a capture."""
    before = program.relax()
    with gpu.capturing():
        assert program.run("cuStreamQuery", None) == 906
    program.run("cuThreadExchangeStreamCaptureMode", byref(before))
    assert len(gpu.violations) == 1


def test_context_synchronisation_is_a_violation(gpu: FakeGpu, program: Program) -> None:
    """A wait for all streams of a device is recorded."""
    assert program.run("cuCtxSynchronize") == 0
    assert len(gpu.violations) == 1


def test_target_is_poisoned_until_the_copy_runs(gpu: FakeGpu, program: Program) -> None:
    """A queued copy has overwritten its target with poison; it completes once copies may run."""
    source, target, stream = gpu.allocate(4096), gpu.allocate(4096), program.stream()
    gpu.write(source, b"x" * 4096)
    with gpu.paused_copies():
        assert program.run("cuMemcpyAsync", target.data_ptr(), source.data_ptr(), 4096, stream) == 0
        assert gpu.read(target) == b"\xa5" * 4096
        assert program.run("cuStreamQuery", stream) == 600
    assert program.run("cuStreamSynchronize", stream) == 0
    assert gpu.read(target) == b"x" * 4096


def test_event_orders_streams(gpu: FakeGpu, program: Program) -> None:
    """A stream that waits for an event of another stream copies after it."""
    one, two, three = (gpu.allocate(4096) for _ in range(3))
    gpu.write(one, b"x" * 4096)
    first, second, event = program.stream(), program.stream(), c_void_p()
    assert program.run("cuEventCreate", byref(event), 2) == 0
    assert program.run("cuMemcpyAsync", two.data_ptr(), one.data_ptr(), 4096, first) == 0
    assert program.run("cuEventRecord", event, first) == 0
    assert program.run("cuStreamWaitEvent", second, event, 0) == 0
    assert program.run("cuMemcpyAsync", three.data_ptr(), two.data_ptr(), 4096, second) == 0
    assert program.run("cuStreamSynchronize", second) == 0
    assert gpu.read(three) == b"x" * 4096


def test_event_and_stream_need_one_device(gpu: FakeGpu, program: Program) -> None:
    """An event cannot be recorded in a stream of another device."""
    stream, event = program.stream(), c_void_p()
    program.use(1)
    assert program.run("cuEventCreate", byref(event), 2) == 0
    assert program.run("cuEventRecord", event, stream) == 400


def test_free_under_a_copy_is_a_violation(gpu: FakeGpu, program: Program) -> None:
    """Memory that is freed while a copy from it is queued is recorded, and the copy fails with 700."""
    source, target, stream = gpu.allocate(4096), gpu.allocate(4096), program.stream()
    with gpu.paused_copies():
        program.run("cuMemcpyAsync", target.data_ptr(), source.data_ptr(), 4096, stream)
        gpu.free(source)
    assert program.run("cuStreamSynchronize", stream) == 700
    assert len(gpu.violations) == 2


def test_copy_beyond_the_end_is_a_violation(gpu: FakeGpu, program: Program) -> None:
    """A copy that ends after its source is rejected and recorded."""
    source, target, stream = gpu.allocate(4096), gpu.allocate(8192), program.stream()
    assert program.run("cuMemcpyAsync", target.data_ptr(), source.data_ptr(), 8192, stream) == 1
    assert len(gpu.violations) == 1


def test_pageable_copies_are_counted(gpu: FakeGpu, program: Program) -> None:
    """Copies of pinned memory are asynchronous; those of other host memory are counted."""
    target, stream, pinned = gpu.allocate(4096), program.stream(), program.pinned(4096)
    assert program.run("cuMemcpyAsync", target.data_ptr(), pinned.value, 4096, stream) == 0
    assert gpu.pageable_copies == 0
    host = ctypes.create_string_buffer(b"y" * 4096, 4096)
    assert program.run("cuMemcpyAsync", target.data_ptr(), ctypes.addressof(host), 4096, stream) == 0
    assert gpu.pageable_copies == 1
    assert program.run("cuStreamSynchronize", stream) == 0
    assert gpu.read(target) == b"y" * 4096
    assert program.run("cuMemFreeHost", pinned) == 0


@pytest.mark.parametrize(
    ("when", "queued", "queried"), [(CopyFailure.AT_QUEUE, 700, 0), (CopyFailure.AT_QUERY, 0, 700)]
)
def test_copies_fail_on_demand(gpu: FakeGpu, program: Program, when: CopyFailure, queued: int, queried: int) -> None:
    """Copies fail when they are queued, or when their stream is queried."""
    source, target, stream = gpu.allocate(4096), gpu.allocate(4096), program.stream()
    with gpu.failing_copies(when):
        assert program.run("cuMemcpyAsync", target.data_ptr(), source.data_ptr(), 4096, stream) == queued
        assert program.run("cuStreamSynchronize", stream) == queried


def test_address_range_of_mapped_memory_is_the_reservation(gpu: FakeGpu, program: Program) -> None:
    """The address range of mapped memory is larger than its mapping, whose size is an attribute."""
    tensor = gpu.allocate(3 * GRANULARITY, kind="expandable")
    size, mapping = c_size_t(), c_uint64()
    address = c_uint64(tensor.data_ptr())
    assert program.run("cuMemGetAddressRange_v2", None, byref(size), address) == 0
    assert program.run("cuPointerGetAttribute", byref(mapping), MAPPING_SIZE, address) == 0
    assert (size.value, mapping.value) == (4 * GRANULARITY, GRANULARITY)


def test_own_legacy_handle_cannot_be_opened(gpu: FakeGpu, program: Program) -> None:
    """A process cannot open the handle of its own memory."""
    handle = IpcMemHandle()
    assert program.run("cuIpcGetMemHandle", byref(handle), c_uint64(gpu.allocate(4096).data_ptr())) == 0
    assert program.run("cuIpcOpenMemHandle_v2", byref(c_uint64()), handle, LAZY_PEER_ACCESS) == 201


SOURCE = """
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


@pytest.fixture
def source() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SOURCE, str(library_path())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def handle_of(source: subprocess.Popen[str]) -> IpcMemHandle:
    assert source.stdout
    return IpcMemHandle.from_buffer_copy(bytes.fromhex(source.stdout.readline()))


def test_legacy_handle_has_one_address_and_a_count(
    gpu: FakeGpu, program: Program, source: subprocess.Popen[str]
) -> None:
    """Opening a handle twice returns one address, which is closed after two calls."""
    handle, first, second = handle_of(source), c_uint64(), c_uint64()
    assert program.run("cuIpcOpenMemHandle_v2", byref(first), handle, LAZY_PEER_ACCESS) == 0
    assert program.run("cuIpcOpenMemHandle_v2", byref(second), handle, LAZY_PEER_ACCESS) == 0
    assert first.value == second.value
    assert gpu.open_handles["ipc"] == 2
    assert program.run("cuIpcCloseMemHandle", first) == 0
    assert program.run("cuIpcCloseMemHandle", first) == 0
    assert program.run("cuIpcCloseMemHandle", first) == 1


def test_copy_from_memory_freed_by_its_owner_is_a_violation(
    gpu: FakeGpu, program: Program, source: subprocess.Popen[str]
) -> None:
    """Opened memory is read until its owner frees it; a later copy is recorded, and a later open fails."""
    handle, address, target, stream = handle_of(source), c_uint64(), gpu.allocate(4096), program.stream()
    assert program.run("cuIpcOpenMemHandle_v2", byref(address), handle, LAZY_PEER_ACCESS) == 0
    assert program.run("cuMemcpyAsync", target.data_ptr(), address.value, 4096, stream) == 0
    assert program.run("cuStreamSynchronize", stream) == 0
    assert gpu.read(target) == b"z" * 4096
    assert source.stdin
    assert source.stdout
    source.stdin.write("free\n")
    source.stdin.flush()
    assert source.stdout.readline() == "freed\n"
    assert program.run("cuMemcpyAsync", target.data_ptr(), address.value, 4096, stream) == 1
    assert len(gpu.violations) == 1
    assert program.run("cuIpcCloseMemHandle", address) == 0
    assert program.run("cuIpcOpenMemHandle_v2", byref(address), handle, LAZY_PEER_ACCESS) == 205


def test_mapped_memory_is_granular_and_not_read_only(gpu: FakeGpu, program: Program) -> None:
    """Reservations have complete granules, read-only access is refused, and what is not released is reported."""
    address, memory, descriptor = c_uint64(), c_uint64(), c_int()
    before = gpu.open_handles
    source = c_void_p(gpu.allocate(GRANULARITY, kind="expandable").data_ptr())
    assert program.run("cuMemRetainAllocationHandle", byref(memory), source) == 0
    assert program.run("cuMemExportToShareableHandle", byref(descriptor), memory, DESCRIPTOR, c_ulonglong(0)) == 0
    assert program.run("cuMemRelease", memory.value) == 0
    assert gpu.open_handles == before
    assert program.run("cuMemImportFromShareableHandle", byref(memory), c_void_p(descriptor.value), DESCRIPTOR) == 0
    reserve = (c_size_t(0), c_uint64(0), c_ulonglong(0))
    assert program.run("cuMemAddressReserve", byref(address), c_size_t(4096), *reserve) == 1
    assert program.run("cuMemAddressReserve", byref(address), c_size_t(GRANULARITY), *reserve) == 0
    assert program.run("cuMemMap", address, c_size_t(GRANULARITY), c_size_t(0), memory, c_ulonglong(0)) == 0
    access = MemAccessDesc(MemLocation(1, 1), 1)
    set_access = ("cuMemSetAccess", address, c_size_t(GRANULARITY), byref(access), c_size_t(1))
    assert program.run(*set_access) == 801
    access.flags = 3
    assert program.run(*set_access) == 0
    assert gpu.open_handles != before
    assert program.run("cuMemAddressFree", address.value, GRANULARITY) == 1
    assert program.run("cuMemUnmap", address.value, GRANULARITY) == 0
    assert program.run("cuMemAddressFree", address.value, GRANULARITY) == 0
    assert program.run("cuMemRelease", memory.value) == 0
    assert gpu.open_handles == before


def test_flushes_are_counted(gpu: FakeGpu, program: Program) -> None:
    """A flush of RDMA writes is counted for the current context's device, if the device supports it."""
    assert program.run("cuFlushGPUDirectRDMAWrites", 0, 100) == 0
    gpu.set_attribute(0, "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", 0)
    assert program.run("cuFlushGPUDirectRDMAWrites", 0, 100) == 801
    assert gpu.flushes == {0: 1}
