"""Report what the CUDA driver does where rfork, and the fake driver of its tests, had to assume it.

`python -m benchmarks.gpu.probes [--device cpu] [--json FILE]`: with a GPU, the driver's result of each probe next to
that of `tests/fake_libcuda` (if it can be compiled here); without one, the fake's alone. A result is an error code
of cuda.h (0 is success) or a word. Differences do not fail: where the driver is stricter than the fake, the fake
hides errors of rfork; where it is less strict, the fake demands too much.

Allocations are torch's: of cudaMalloc, and of expandable segments. Calls that a capture forbids are made on another
thread than the capture, which each of them may invalidate: every call has a capture of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Final, Protocol

import torch

from benchmarks.gpu.result_file import ResultFile, Value
from rfork.cuda import library as cuda
from rfork.cuda.device import CudaDriver
from rfork.cuda.library import IpcMemHandle, MemAccessDesc, MemLocation
from rfork.image.host_memory import HUGE_PAGE
from rfork.image.staging import allocate_host

PIECE_BYTES: Final = 20 << 20
"""Torch maps large tensors of expandable segments in pieces of this size."""
MAPPED_BYTES: Final = 3 * PIECE_BYTES
LEGACY_BYTES: Final = 4 << 20
PINNED_BYTES: Final = 8 << 20
CHILD_S: Final = 60.0
RANGE_START, RANGE_SIZE, DEVICE_POINTER = 11, 12, 3
"""Pointer attributes that rfork does not use."""
ATTRIBUTES: Final = {
    "GPU_DIRECT_RDMA_SUPPORTED": 116,
    "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS": cuda.DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
    "GPU_DIRECT_RDMA_WRITES_ORDERING": cuda.DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 110,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 103,
    "HANDLE_TYPE_FABRIC_SUPPORTED": 128,
    "DMA_BUF_SUPPORTED": cuda.DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
}
STREAM_CAPTURE_MODE_GLOBAL: Final = 0

Result = int | str
Probe = Callable[["ProbeMachine"], Mapping[str, Result]]


class ProbeMachine(Protocol):
    """A device with its driver. Memory is kept as long as the machine."""

    name: str
    driver: CudaDriver

    def legacy(self, nbytes: int) -> int:
        """Return the address of memory of cudaMalloc."""
        ...

    def mapped(self, nbytes: int) -> int:
        """Return the address of memory of expandable segments, in several pieces."""
        ...

    def capturing(self) -> AbstractContextManager[Callable[[], bool]]:
        """Capture in global mode on another thread within the block; the function ends it: True if it was intact."""
        ...


class RealMachine:
    """The first GPU and its driver."""

    name = "driver"

    def __init__(self) -> None:
        torch.cuda.init()
        self.driver = CudaDriver()
        self._raw = ctypes.CDLL(cuda.LIBRARY_PATH)
        self._kept: list[torch.Tensor] = []

    def legacy(self, nbytes: int) -> int:
        """See `ProbeMachine`."""
        return self._allocate(nbytes, expandable=False)

    def mapped(self, nbytes: int) -> int:
        """See `ProbeMachine`."""
        return self._allocate(nbytes, expandable=True)

    def _allocate(self, nbytes: int, *, expandable: bool) -> int:
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
        try:
            self._kept.append(torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0"))
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        return self._kept[-1].data_ptr()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[Callable[[], bool]]:
        """See `ProbeMachine`."""
        begun, stop = threading.Event(), threading.Event()
        codes: list[int] = []

        def capture() -> None:
            stream, graph = c_void_p(), c_void_p()
            with self.driver.on_device(0):
                self.driver.library.call("cuStreamCreate", byref(stream), cuda.STREAM_NON_BLOCKING)
                # This thread's own mode must not be the relaxed one of on_device.
                mode = c_int(STREAM_CAPTURE_MODE_GLOBAL)
                self.driver.library.call("cuThreadExchangeStreamCaptureMode", byref(mode))
                self._raw.cuStreamBeginCapture_v2(stream, c_int(STREAM_CAPTURE_MODE_GLOBAL))
                begun.set()
                stop.wait()
                codes.append(self._raw.cuStreamEndCapture(stream, byref(graph)))
                self.driver.library.call("cuThreadExchangeStreamCaptureMode", byref(mode))
                if graph.value:
                    self._raw.cuGraphDestroy(graph)
                self.driver.library.call("cuStreamDestroy_v2", stream.value)

        thread = threading.Thread(target=capture)
        thread.start()

        def end() -> bool:
            stop.set()
            thread.join()
            return codes == [cuda.SUCCESS]

        begun.wait()
        try:
            yield end
        finally:
            end()


class FakeMachine:
    """The fake driver of the tests. Raises RuntimeError if it cannot be compiled here."""

    name = "fake"

    def __init__(self) -> None:
        from tests.fake_libcuda.fake_gpu import FakeGpu

        self._gpu = FakeGpu()
        before, cuda.LIBRARY_PATH = cuda.LIBRARY_PATH, self._gpu.path
        try:
            self.driver = CudaDriver()
        finally:
            cuda.LIBRARY_PATH = before
        self._kept: list[torch.Tensor] = []

    def legacy(self, nbytes: int) -> int:
        """See `ProbeMachine`."""
        self._kept.append(self._gpu.allocate(nbytes))
        return self._kept[-1].data_ptr()

    def mapped(self, nbytes: int) -> int:
        """See `ProbeMachine`."""
        self._kept.append(self._gpu.allocate(nbytes, kind="expandable", piece=PIECE_BYTES))
        return self._kept[-1].data_ptr()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[Callable[[], bool]]:
        """See `ProbeMachine`."""
        before = len(self._gpu.forbidden_calls)
        with self._gpu.capturing():
            yield lambda: len(self._gpu.forbidden_calls) == before


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all probes; returns the exit status: 1 if one cannot be run to its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--owner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.owner:
        own_memory(machine_of(options.device))
        return 0
    results = ResultFile(options.json, benchmark="gpu.probes")
    fake = results_of_fake() if options.device == "cuda" else None
    machine = machine_of(options.device)
    failed = 0
    for probe in PROBES:
        name = probe.__name__.replace("_", " ")
        try:
            found = probe(machine)
        except Exception as error:  # a probe must not hide the others
            failed += 1
            found = {"": f"{type(error).__name__}: {error}"}
        for case, result in found.items():
            results.add(compared(f"{name}: {case}" if case else name, machine.name, result, fake))
    return int(failed > 0)


def machine_of(device: str) -> ProbeMachine:
    """Return the machine of a device: the GPU, or the fake for the CPU."""
    return RealMachine() if device == "cuda" else FakeMachine()


def compared(name: str, machine: str, result: Result, fake: Mapping[str, Value] | None) -> dict[str, Value]:
    """Return the row of a result; with the fake's results, also that of the fake and whether they differ."""
    row: dict[str, Value] = {"probe": name, machine: result}
    if fake is None:
        return row
    return row | {"fake": fake.get(name), "differs": "" if fake.get(name) == result else "DIFFERS"}


def results_of_fake() -> dict[str, Value]:
    """Return the fake's results by probe, from a process of its own; none if it cannot run here."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fake.json"
        command = [sys.executable, "-m", "benchmarks.gpu.probes", "--device", "cpu", "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"no results of the fake: {(done.stderr.strip().splitlines() or ['a probe failed'])[-1]}")
        return fake_rows(file) if file.exists() else {}


def fake_rows(file: Path) -> dict[str, Value]:
    """Return the fake's results in its result file, by probe."""
    import json

    return {str(row["probe"]): row["fake"] for row in json.loads(file.read_text())["rows"]}


# -- probes ---------------------------------------------------------------------------------------


def device_attributes(machine: ProbeMachine) -> Mapping[str, Result]:
    """Attributes that decide over RDMA and handles, and the flush of RDMA writes."""
    found: dict[str, Result] = {name: machine.driver.attribute(0, number) for name, number in ATTRIBUTES.items()}
    with machine.driver.on_device(0):
        found["cuFlushGPUDirectRDMAWrites"] = machine.driver.library.function("cuFlushGPUDirectRDMAWrites")(
            cuda.FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, cuda.FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
        )
    return found


def address_ranges(machine: ProbeMachine) -> Mapping[str, Result]:
    """Ranges that the driver reports for memory of both types, at an address in the second piece."""
    legacy, mapped = machine.legacy(LEGACY_BYTES), machine.mapped(MAPPED_BYTES) + PIECE_BYTES + 4096
    attribute = machine.driver.pointer_attribute
    with machine.driver.on_device(0):
        mapping = (
            attribute(cuda.POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, mapped),
            attribute(cuda.POINTER_ATTRIBUTE_MAPPING_SIZE, mapped),
        )
        reservation = attribute(RANGE_START, mapped), attribute(RANGE_SIZE, mapped)
        found = _address_range(machine, mapped)
        word = "another range"
        if found == mapping:
            word = "one mapping"
        elif found == reservation:
            word = "as RANGE_START_ADDR and RANGE_SIZE"
        legacy_range = _address_range(machine, legacy)
        return {
            "cuMemGetAddressRange, expandable": word,
            "cuMemGetAddressRange, cudaMalloc": "contains the tensor"
            if legacy_range[0] <= legacy and legacy + LEGACY_BYTES <= sum(legacy_range)
            else "another range",
            "MAPPING_SIZE, expandable": mapping[1],
            "RANGE_SIZE, expandable, is larger": str(reservation[1] > mapping[1]),
            "ALLOWED_HANDLE_TYPES, expandable": attribute(cuda.POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, mapped),
            "IS_LEGACY_CUDA_IPC_CAPABLE, expandable": attribute(
                cuda.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, mapped
            ),
            "IS_LEGACY_CUDA_IPC_CAPABLE, cudaMalloc": attribute(
                cuda.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, legacy
            ),
        }


def imported_mappings(machine: ProbeMachine) -> Mapping[str, Result]:
    """Access, sizes and parts of memory that is imported by a file descriptor."""
    function = machine.driver.library.function
    address = machine.mapped(MAPPED_BYTES)
    found: dict[str, Result] = {}
    with machine.driver.on_device(0), contextlib.ExitStack() as cleanup:
        size = machine.driver.pointer_attribute(cuda.POINTER_ATTRIBUTE_MAPPING_SIZE, address)
        exported, imported, again = c_uint64(), c_uint64(), c_uint64()
        found["cuMemRetainAllocationHandle"] = function("cuMemRetainAllocationHandle")(byref(exported), address)
        function("cuMemRetainAllocationHandle")(byref(again), address)
        found["cuMemRetainAllocationHandle twice"] = "equal" if exported.value == again.value else "different"
        for handle in (exported, again):
            cleanup.callback(function("cuMemRelease"), handle.value)
        descriptor = c_int(-1)
        found["cuMemExportToShareableHandle"] = function("cuMemExportToShareableHandle")(
            byref(descriptor), exported.value, cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0
        )
        if descriptor.value < 0:
            return found
        cleanup.callback(os.close, descriptor.value)
        found["cuMemImportFromShareableHandle, own process"] = function("cuMemImportFromShareableHandle")(
            byref(imported), descriptor.value, cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        cleanup.callback(function("cuMemRelease"), imported.value)
        target, unit = c_uint64(), HUGE_PAGE
        found["cuMemAddressReserve, not a multiple of 2 MiB"] = _undone(
            function("cuMemAddressReserve")(byref(target), size + 4096, 0, 0, 0),
            lambda: function("cuMemAddressFree")(target.value, size + 4096),
        )
        found["cuMemAddressReserve"] = function("cuMemAddressReserve")(byref(target), size + unit, 0, 0, 0)
        cleanup.callback(function("cuMemAddressFree"), target.value, size + unit)

        def map_bytes(nbytes: int) -> int:
            return function("cuMemMap")(target.value, nbytes, 0, imported.value, 0)

        def unmap(nbytes: int) -> int:
            return function("cuMemUnmap")(target.value, nbytes)

        for name, nbytes in (("more than the allocation", size + unit), ("less than it", size - unit)):
            found[f"cuMemMap, {name}"] = _undone(map_bytes(nbytes), lambda nbytes=nbytes: unmap(nbytes))  # type: ignore[misc]
        found["cuMemMap"] = map_bytes(size)
        for name, flags in (
            ("PROT_READ", cuda.MEM_ACCESS_FLAGS_PROT_READ),
            ("PROT_READWRITE", cuda.MEM_ACCESS_FLAGS_PROT_READWRITE),
        ):
            access = MemAccessDesc(MemLocation(cuda.MEM_LOCATION_TYPE_DEVICE, 0), flags)
            found[f"cuMemSetAccess, {name}"] = function("cuMemSetAccess")(target.value, size, byref(access), 1)
        found["cuMemUnmap, a part"] = unmap(unit)
        found["cuMemUnmap"] = unmap(size)
    return found


def legacy_handles(machine: ProbeMachine) -> Mapping[str, Result]:
    """Handles of cudaMalloc: of this process, of another one, opened twice, and of a process that has ended."""
    function = machine.driver.library.function
    found: dict[str, Result] = {}
    with machine.driver.on_device(0), Owner(machine) as owner:
        own, address = IpcMemHandle(), machine.legacy(LEGACY_BYTES)
        base = _address_range(machine, address)[0]
        found["cuIpcGetMemHandle, base"] = function("cuIpcGetMemHandle")(byref(own), base)
        found["cuIpcGetMemHandle, within the allocation"] = function("cuIpcGetMemHandle")(byref(IpcMemHandle()), base + 512)
        first, second = c_uint64(), c_uint64()
        flags = cuda.IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        found["cuIpcOpenMemHandle, own process"] = _undone(
            function("cuIpcOpenMemHandle_v2")(byref(first), own, flags),
            lambda: function("cuIpcCloseMemHandle")(first.value),
        )
        found["cuIpcOpenMemHandle"] = function("cuIpcOpenMemHandle_v2")(byref(first), owner.handle, flags)
        found["cuIpcOpenMemHandle twice"] = function("cuIpcOpenMemHandle_v2")(byref(second), owner.handle, flags)
        found["addresses of both"] = "equal" if first.value == second.value else "different"
        opened = _address_range(machine, first.value)
        found["cuMemGetAddressRange, opened"] = "base" if opened[0] == first.value else "another base"
        found["its size is that of the source"] = str(opened[1] == owner.size)
        found["cuIpcCloseMemHandle"] = function("cuIpcCloseMemHandle")(first.value)
        found["after one close of two"] = "mapped" if _address_range(machine, second.value)[1] else "unmapped"
        found["cuIpcCloseMemHandle again"] = function("cuIpcCloseMemHandle")(second.value)
        found["after both"] = "mapped" if _address_range(machine, second.value)[1] else "unmapped"
        owner.end()
        found["cuIpcOpenMemHandle, process has ended"] = _undone(
            function("cuIpcOpenMemHandle_v2")(byref(first), owner.handle, flags),
            lambda: function("cuIpcCloseMemHandle")(first.value),
        )
    return found


def registered_memory(machine: ProbeMachine) -> Mapping[str, Result]:
    """Registration of host memory in huge pages, in pages of 4 KiB, and of parts of pages."""
    function = machine.driver.library.function
    found: dict[str, Result] = {}
    with machine.driver.on_device(0):
        huge = allocate_host(PINNED_BYTES)
        huge.fill_(1)
        small = mmap.mmap(-1, PINNED_BYTES)
        small_address = ctypes.addressof(ctypes.c_char.from_buffer(small))

        def register(address: int, nbytes: int) -> int:
            return function("cuMemHostRegister_v2")(address, nbytes, cuda.MEMHOSTREGISTER_PORTABLE)

        def unregister(address: int) -> int:
            return function("cuMemHostUnregister")(address)

        for name, address in (("huge pages", huge.data_ptr()), ("pages of 4 KiB", small_address)):
            found[f"cuMemHostRegister, {name}"] = register(address, PINNED_BYTES)
            pointer = c_uint64()
            code = function("cuPointerGetAttribute")(byref(pointer), DEVICE_POINTER, address)
            found[f"device address, {name}"] = code or ("equal" if pointer.value == address else "different")
            found[f"cuMemHostRegister again, {name}"] = register(address, PINNED_BYTES)
            found[f"cuMemHostUnregister, {name}"] = unregister(address)
        found["cuMemHostRegister, parts of pages"] = _undone(
            register(small_address + 100, 5000), lambda: unregister(small_address + 100)
        )
        found["cuMemHostUnregister, not registered"] = unregister(small_address)
    return found


def without_a_context(machine: ProbeMachine) -> Mapping[str, Result]:
    """Calls on a new thread, which has no current context."""
    with machine.driver.on_device(0):
        calls = _calls(machine)
    found: dict[str, Result] = {}

    def run() -> None:
        for name, call, undo in calls:
            code = call()
            with machine.driver.on_device(0):
                undo(code == cuda.SUCCESS)
            found[name] = code

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


def during_a_global_capture(machine: ProbeMachine) -> Mapping[str, Result]:
    """Calls of a thread in the default mode, while another thread captures in global mode."""
    return _during_a_capture(machine, STREAM_CAPTURE_MODE_GLOBAL)


def relaxed_during_a_global_capture(machine: ProbeMachine) -> Mapping[str, Result]:
    """Calls of a thread in relaxed mode, as all of rfork's are."""
    return _during_a_capture(machine, cuda.STREAM_CAPTURE_MODE_RELAXED)


def _during_a_capture(machine: ProbeMachine, capture_mode: int) -> Mapping[str, Result]:
    exchange = machine.driver.library.function("cuThreadExchangeStreamCaptureMode")
    found: dict[str, Result] = {}
    with machine.driver.on_device(0):
        for index in range(len(_calls(machine, names_only=True))):
            name, call, undo = _calls(machine)[index]
            with machine.capturing() as end:
                mode = c_int(capture_mode)
                exchange(byref(mode))
                code = call()
                exchange(byref(mode))
                intact = end()
            undo(code == cuda.SUCCESS)
            found[name] = f"{code}, capture {'intact' if intact else 'invalidated'}"
    return found
