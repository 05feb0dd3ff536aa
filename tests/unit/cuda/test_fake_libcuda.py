"""The fake driver library is as strict as a real one: each of its rules fails a program that breaks it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from ctypes import byref, c_int, c_size_t, c_void_p

import pytest

from tests.fake_libcuda.build import library_path
from tests.fake_libcuda.fake_gpu import CopyFailure, FakeGpu
from tests.unit.cuda.driver_program import NON_BLOCKING, Program


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


def test_flushes_are_counted(gpu: FakeGpu, program: Program) -> None:
    """A flush of RDMA writes is counted for the current context's device, if the device supports it."""
    assert program.run("cuFlushGPUDirectRDMAWrites", 0, 100) == 0
    gpu.set_attribute(0, "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", 0)
    assert program.run("cuFlushGPUDirectRDMAWrites", 0, 100) == 801
    assert gpu.flushes == {0: 1}


def test_copies_of_a_stream_run_in_order(gpu: FakeGpu, program: Program) -> None:
    """The last copy into a target wins, whatever the seed."""
    one, two, target, stream = gpu.allocate(4096), gpu.allocate(4096), gpu.allocate(4096), program.stream()
    gpu.write(two, b"2" * 4096)
    for seed in range(8):
        gpu.set_seed(seed)
        with gpu.paused_copies():
            for source in (one, two):
                assert program.run("cuMemcpyAsync", target.data_ptr(), source.data_ptr(), 4096, stream) == 0
        assert program.run("cuStreamSynchronize", stream) == 0
        found = gpu.read(target)
        assert found == b"2" * 4096


def test_copies_of_two_streams_run_in_any_order(gpu: FakeGpu, program: Program) -> None:
    """The seed determines the last one."""
    one, two, target = (gpu.allocate(4096) for _ in range(3))
    gpu.write(two, b"2" * 4096)
    streams, winners = (program.stream(), program.stream()), set()
    for seed in range(16):
        gpu.set_seed(seed)
        with gpu.paused_copies():
            for source, stream in zip((one, two), streams, strict=True):
                assert program.run("cuMemcpyAsync", target.data_ptr(), source.data_ptr(), 4096, stream) == 0
            gpu.wait_until_queued(streams=2)
        gpu.wait_until_idle()
        winners.add(gpu.read(target)[:1])
    assert winners == {b"\0", b"2"}


def test_counters_of_copies(gpu: FakeGpu, program: Program) -> None:
    """Queued, completed and copied bytes are counted."""
    source, target, stream = gpu.allocate(4096), gpu.allocate(4096), program.stream()
    with gpu.paused_copies():
        assert program.run("cuMemcpyAsync", target.data_ptr(), source.data_ptr(), 1000, stream) == 0
        assert gpu.queued_copies == 1
        assert gpu.copied_bytes == 0
    gpu.wait_until_idle()
    assert gpu.completed_copies == 1
    assert gpu.copied_bytes == 1000


def test_destroyed_stream_is_invalid(gpu: FakeGpu, program: Program) -> None:
    """Its handle is rejected and recorded."""
    stream = program.stream()
    assert program.run("cuStreamDestroy_v2", stream) == 0
    assert program.run("cuStreamQuery", stream) == 400
    assert len(gpu.violations) == 1


def test_registered_memory_is_pinned(gpu: FakeGpu, program: Program) -> None:
    """Copies of registered host memory are asynchronous, and count as pageable once it is not registered."""
    host = ctypes.create_string_buffer(b"h" * 4096, 4096)
    address, target = c_void_p(ctypes.addressof(host)), gpu.allocate(4096)
    assert program.run("cuMemHostRegister_v2", address, c_size_t(4096), 1) == 0
    assert program.copy(target.data_ptr(), ctypes.addressof(host)) == 0
    assert gpu.pageable_copies == 0
    assert program.run("cuMemHostUnregister", address) == 0
    assert program.copy(target.data_ptr(), ctypes.addressof(host)) == 0
    assert gpu.pageable_copies == 1


def test_memory_is_registered_once(gpu: FakeGpu, program: Program) -> None:
    """No two registrations overlap, each is ended once and not by another function, and none is of device memory."""
    host, allocated = ctypes.create_string_buffer(8192), program.pinned(4096)
    address, size = c_void_p(ctypes.addressof(host)), c_size_t(4096)
    assert program.run("cuMemHostRegister_v2", address, size, 1) == 0
    assert program.run("cuMemHostRegister_v2", c_void_p(ctypes.addressof(host) + 1), size, 1) == 712
    assert program.run("cuMemFreeHost", address) == 1
    assert program.run("cuMemHostUnregister", allocated) == 713
    assert program.run("cuMemHostUnregister", address) == 0
    assert program.run("cuMemHostUnregister", address) == 713
    assert program.run("cuMemHostRegister_v2", c_void_p(gpu.allocate(4096).data_ptr()), size, 1) == 1
    assert program.run("cuMemFreeHost", allocated) == 0


def test_unlocking_under_a_copy_is_a_violation(gpu: FakeGpu, program: Program) -> None:
    """Host memory stays locked until the copies that use it have ended."""
    host, target, stream = ctypes.create_string_buffer(4096), gpu.allocate(4096), program.stream()
    address = c_void_p(ctypes.addressof(host))
    assert program.run("cuMemHostRegister_v2", address, c_size_t(4096), 1) == 0
    with gpu.paused_copies():
        assert program.run("cuMemcpyAsync", target.data_ptr(), ctypes.addressof(host), 4096, stream) == 0
        assert program.run("cuMemHostUnregister", address) == 0
    assert "that a queued copy uses" in gpu.violations[0]
    gpu.wait_until_idle()


def test_devices_that_are_not_visible_are_invalid(gpu: FakeGpu, program: Program) -> None:
    """Their numbers are rejected."""
    gpu.set_devices(1)
    assert program.run("cuDeviceGet", byref(c_int()), 1) == 101
    assert program.run("cuDevicePrimaryCtxRetain", byref(c_void_p()), 1) == 101
    assert program.run("cuDeviceGet", byref(c_int()), 0) == 0


CHILD = """
import ctypes, os, sys
fake, count = ctypes.CDLL(sys.argv[1]), ctypes.c_int()
assert fake.cuInit(0) == 0
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(10 * fake.cuInit(0) + fake.cuDeviceGetCount(ctypes.byref(count)))
"""


def test_forked_child_cannot_use_the_driver() -> None:
    """After its parent has initialized the driver, every call of a child fails with error 3."""
    child = subprocess.run([sys.executable, "-c", CHILD, str(library_path())], check=False, env={**os.environ})
    assert child.returncode == 33
