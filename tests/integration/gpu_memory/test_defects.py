"""The strict fake driver finds defects that would end an engine's start, or corrupt weights, on a real GPU.

Each test takes one of rfork's precautions away and states what the driver reports.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes import byref, c_size_t, c_uint64
from pathlib import Path

import pytest

from rfork.cuda.device import CudaDriver, CudaEvent, CudaStream, DeviceStreams, TorchDevices, cuda_driver
from rfork.cuda.library import CudaDriverLibrary, DriverError
from rfork.image import staging
from rfork.image.memory import Image
from rfork.transport.cuda_ipc.allocations import allocations_of
from rfork.transport.cuda_ipc.driver import IpcDriver
from tests.fake_libcuda.fake_gpu import GRANULARITY, FakeGpu
from tests.fake_libcuda.images import device_image, patterns
from tests.fake_libcuda.install import installed

ROOT = Path(__file__).resolve().parents[3]
SIZES = (5 << 20, 4096)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    """The fake driver, whose reports the test reads itself."""
    with contextlib.suppress(AssertionError), installed() as fake:
        yield fake


def read(image: Image) -> bytes:
    """Return all bytes of an image, read in steps."""
    with image.reading(0, image.layout.image_bytes) as steps:
        return b"".join(b"".join(views) for views in steps)


def without(name: str) -> Callable[[CudaDriverLibrary, str], None]:
    """Return a replacement of `CudaDriverLibrary.call` that leaves one function out."""
    call = CudaDriverLibrary.call

    def filtered(self: CudaDriverLibrary, function: str, *arguments: object) -> None:
        if function != name:
            call(self, function, *arguments)  # type: ignore[arg-type]

    return filtered


def test_a_thread_that_is_not_relaxed_invalidates_a_capture(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locking memory while another thread captures a graph is refused, and ends that capture."""
    image = device_image(gpu, SIZES, filled=True)
    monkeypatch.setattr(CudaDriverLibrary, "call", without("cuThreadExchangeStreamCaptureMode"))
    with gpu.capturing(), pytest.raises(DriverError, match=r"\(900\)"):
        read(image)
    assert gpu.forbidden_calls


def test_a_thread_without_a_context_cannot_copy(gpu: FakeGpu) -> None:
    """A new thread has no context: its calls are refused."""
    image = device_image(gpu, SIZES, filled=True)

    def call(self: CudaDriverLibrary, function: str, *arguments: object) -> None:
        if function not in ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"):
            original(self, function, *arguments)  # type: ignore[arg-type]

    original = CudaDriverLibrary.call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaDriverLibrary, "call", call)
        with pytest.raises(DriverError, match=r"\(201\)"):
            read(image)


def test_page_locking_on_the_first_gpu_creates_a_context_there(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for an image on GPU 1 must not be locked by GPU 0: its context takes memory of another rank."""
    image = device_image(gpu, SIZES, filled=True, device=1)
    lock = CudaDriver.register_host
    monkeypatch.setattr(
        CudaDriver, "register_host", lambda self, address, nbytes, device: lock(self, address, nbytes, 0)
    )
    read(image)
    assert {0, 1} == gpu.contexts


def test_an_address_range_is_not_a_mapping(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """For memory in several mappings, the driver may return the reserved range, which no handle can share."""
    image, driver = device_image(gpu, SIZES, filled=True, kind="expandable"), IpcDriver()
    expected = [GRANULARITY] * 3
    assert expected == [allocation.size for allocation in allocations_of(driver, image).table]

    def address_range(self: IpcDriver, address: int) -> tuple[int, int]:
        base, size = c_uint64(), c_size_t()
        cuda_driver().library.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return base.value, size.value

    monkeypatch.setattr(IpcDriver, "_mapping", address_range)
    (found,) = allocations_of(driver, image).table
    handle = driver.export(found)
    with pytest.raises(DriverError):
        driver.open(0, found.handle_type, handle, found.size)


def test_copies_on_the_legacy_stream_are_reported(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The legacy stream waits for the engine's streams, and cannot be used during a capture."""
    create = CudaStream.__init__

    def legacy(self: CudaStream, driver: CudaDriver, device: int) -> None:
        create(self, driver, device)
        self.handle = 0

    monkeypatch.setattr(CudaStream, "__init__", legacy)
    image = device_image(gpu, SIZES, filled=True)
    with gpu.capturing(), pytest.raises(DriverError):
        read(image)
    assert gpu.violations or gpu.forbidden_calls


def test_a_buffer_that_is_used_before_its_copy_ends_has_wrong_bytes(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for an event, the host sees the poison that stands for bytes that have not arrived."""
    image = device_image(gpu, SIZES, filled=True)
    assert patterns(SIZES) == read(image)
    monkeypatch.setattr(CudaEvent, "wait", lambda self: None)
    with gpu.paused_copies():
        found = read(image)
    assert patterns(SIZES) != found


def test_pageable_memory_is_reported(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from memory that is not page-locked block the thread and go through the driver's own buffers."""
    image = device_image(gpu, SIZES, filled=True)
    monkeypatch.setattr(staging, "pinned_memory", lambda nbytes, device: staging.allocate_host(nbytes))
    assert patterns(SIZES) == read(image)
    assert gpu.pageable_copies


def test_the_host_cannot_access_device_memory(gpu: FakeGpu) -> None:
    """An access that would crash a process with a GPU crashes one with the fake."""
    program = "from tests.fake_libcuda.fake_gpu import FakeGpu; print(FakeGpu().allocate(4096)[0])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert -signal.SIGSEGV == done.returncode


def test_this_process_has_own_streams(gpu: FakeGpu) -> None:
    """Copies and digests run neither on the engine's stream nor on the legacy stream, nor on that of each other."""
    read(device_image(gpu, SIZES, filled=True))
    streams = cuda_driver().streams(0)
    handles = [getattr(streams, name).handle for name in DeviceStreams.__slots__]
    assert len({0, TorchDevices.current_stream(0), *handles}) == 2 + len(handles)


def test_a_context_is_popped(gpu: FakeGpu) -> None:
    """A thread of the engine has the contexts that it had before."""
    read(device_image(gpu, SIZES, filled=True))
    assert 0 == gpu.thread_depth
    assert 0 == gpu.thread_capture_mode  # global, the driver's default
