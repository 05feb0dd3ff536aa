"""Rules of the fake driver for memory of other processes, and for memory that is mapped."""

from __future__ import annotations

from ctypes import byref, c_int, c_size_t, c_uint64

import pytest

from rfork.cuda.library import IpcMemHandle
from tests.fake_libcuda.fake_gpu import GRANULARITY, FakeGpu, OpenFailure
from tests.unit.cuda.driver_program import DESCRIPTOR, FABRIC, READ_ONLY, READ_WRITE, Program, SourceProcess

MAPPING_SIZE = 18


def test_own_legacy_handle_cannot_be_opened(gpu: FakeGpu, program: Program) -> None:
    """A process cannot open the handle of its own memory."""
    handle = IpcMemHandle()
    assert program.run("cuIpcGetMemHandle", byref(handle), c_uint64(gpu.allocate(4096).data_ptr())) == 0
    assert program.open_legacy(handle) == 201
    assert gpu.exports == 1


def test_legacy_handle_has_one_address_and_a_count(gpu: FakeGpu, program: Program, source: SourceProcess) -> None:
    """Opening a handle twice returns one address, which is closed after two calls."""
    first, second = c_uint64(), c_uint64()
    assert program.open_legacy(source.handle, first) == 0
    assert program.open_legacy(source.handle, second) == 0
    assert first.value == second.value
    assert gpu.open_handles["ipc"] == 2
    assert program.run("cuIpcCloseMemHandle", first) == 0
    assert program.run("cuIpcCloseMemHandle", first) == 0
    assert program.run("cuIpcCloseMemHandle", first) == 1


def test_invalid_handle_is_rejected(program: Program, source: SourceProcess) -> None:
    """A handle without the driver's content, or flags without lazy peer access, are invalid."""
    assert program.open_legacy(IpcMemHandle()) == 1
    assert program.open_legacy(source.handle, flags=0) == 1


def test_copy_from_memory_freed_by_its_owner_is_a_violation(
    gpu: FakeGpu, program: Program, source: SourceProcess
) -> None:
    """Opened memory is read until its owner frees it; a later copy is recorded, and a later open fails."""
    address, target = c_uint64(), gpu.allocate(4096)
    assert program.open_legacy(source.handle, address) == 0
    assert program.copy(target.data_ptr(), address.value) == 0
    found = gpu.read(target)
    assert found == b"z" * 4096
    source.free()
    assert program.copy(target.data_ptr(), address.value) == 1
    assert len(gpu.violations) == 1
    assert program.run("cuIpcCloseMemHandle", address) == 0
    assert program.open_legacy(source.handle) == 205


def test_handle_of_a_dead_process_cannot_be_opened(program: Program, source: SourceProcess) -> None:
    """Its memory ends with the process."""
    source.kill()
    assert program.open_legacy(source.handle) == 205


def test_copy_after_the_close_is_a_violation(gpu: FakeGpu, program: Program, source: SourceProcess) -> None:
    """The address is not mapped any more, and opening the memory again returns another one."""
    address, again, target = c_uint64(), c_uint64(), gpu.allocate(4096)
    assert program.open_legacy(source.handle, address) == 0
    assert program.run("cuIpcCloseMemHandle", address) == 0
    assert program.open_legacy(source.handle, again) == 0
    assert again.value != address.value
    assert program.copy(target.data_ptr(), address.value) == 1
    assert "is not mapped" in gpu.violations[0]
    assert program.run("cuIpcCloseMemHandle", again) == 0


def test_copy_into_another_process_is_a_violation(gpu: FakeGpu, program: Program, source: SourceProcess) -> None:
    """Opened memory is only read."""
    address = c_uint64()
    assert program.open_legacy(source.handle, address) == 0
    assert program.copy(address.value, gpu.allocate(4096).data_ptr()) == 1
    assert "memory of another process" in gpu.violations[0]
    assert program.run("cuIpcCloseMemHandle", address) == 0


def test_opened_memory_belongs_to_one_context(gpu: FakeGpu, program: Program, source: SourceProcess) -> None:
    """Another device can neither close nor read it."""
    address = c_uint64()
    assert program.open_legacy(source.handle, address) == 0
    program.use(1)
    assert program.run("cuIpcCloseMemHandle", address) == 201
    assert program.copy(gpu.allocate(4096, device=1).data_ptr(), address.value) == 1
    assert "has no access to its source" in gpu.violations[0]
    program.run("cuCtxPopCurrent_v2", None)
    assert program.run("cuIpcCloseMemHandle", address) == 0


def test_handle_is_created_in_the_context_of_its_device(gpu: FakeGpu, program: Program) -> None:
    """Memory of device 1 cannot be exported in the context of device 0, nor an address within an allocation."""
    other, own = gpu.allocate(8192, device=1).data_ptr(), gpu.allocate(8192).data_ptr()
    assert program.run("cuIpcGetMemHandle", byref(IpcMemHandle()), c_uint64(other)) == 201
    assert program.run("cuIpcGetMemHandle", byref(IpcMemHandle()), c_uint64(own + 4096)) == 1


def test_without_peer_access_memory_of_another_device_is_closed(
    gpu: FakeGpu, program: Program, source: SourceProcess
) -> None:
    """It can be accessed neither by a handle nor by a mapping."""
    gpu.set_peer_access(False)
    can_access = c_int(1)
    assert program.run("cuDeviceCanAccessPeer", byref(can_access), 1, 0) == 0
    assert can_access.value == 0
    program.use(1)
    assert program.open_legacy(source.handle) == 217
    memory, address = program.map_again(gpu.allocate(GRANULARITY, kind="expandable").data_ptr())
    assert program.set_access(address, 1, READ_WRITE) == 101
    assert program.set_access(address, 0, READ_WRITE) == 0
    program.unmap(memory, address)


@pytest.mark.parametrize(("has_access", "result"), [(False, 101), (True, 0)])
def test_memory_of_a_device_that_is_not_visible(
    gpu: FakeGpu, program: Program, source: SourceProcess, has_access: bool, result: int
) -> None:
    """It can be opened if only the environment hides the device."""
    gpu.set_devices(1)
    gpu.set_uuid(0, b"another-fake-gpu")
    gpu.set_hidden_access(has_access)
    address = c_uint64()
    assert program.open_legacy(source.handle, address) == result
    if has_access:
        assert program.run("cuIpcCloseMemHandle", address) == 0


def test_opening_fails_on_demand(gpu: FakeGpu, program: Program, source: SourceProcess) -> None:
    """The code is that of the test, for the types of handles that it names."""
    memory = program.retain(gpu.allocate(GRANULARITY, kind="expandable").data_ptr())
    _, shared = program.export(memory, DESCRIPTOR)
    address = c_uint64()
    with gpu.failing_open(711, OpenFailure.LEGACY):
        assert program.open_legacy(source.handle) == 711
        result, imported = program.import_handle(shared, DESCRIPTOR)
        assert result == 0
        assert program.run("cuMemRelease", imported.value) == 0
    with gpu.failing_open(304, OpenFailure.DESCRIPTOR):
        assert program.import_handle(shared, DESCRIPTOR)[0] == 304
        assert program.open_legacy(source.handle, address) == 0
    assert program.run("cuIpcCloseMemHandle", address) == 0
    assert program.run("cuMemRelease", memory.value) == 0


@pytest.mark.parametrize(("offered", "other"), [(FABRIC, DESCRIPTOR), (DESCRIPTOR, FABRIC)], ids=["fabric", "file"])
def test_memory_has_handles_of_its_types(gpu: FakeGpu, program: Program, offered: int, other: int) -> None:
    """Mapped memory is exported by the types that it was created for, and imported memory has the same bytes."""
    gpu.set_handle_types(OpenFailure(offered))
    tensor, target = gpu.allocate(GRANULARITY, kind="expandable"), gpu.allocate(4096)
    gpu.write(tensor, b"f" * 4096)
    memory = program.retain(tensor.data_ptr())
    assert program.export(memory, other)[0] == 1
    result, shared = program.export(memory, offered)
    assert result == 0
    result, imported = program.import_handle(shared, offered)
    assert result == 0
    _, address = program.reserve()
    assert program.map(address, imported) == 0
    assert program.set_access(address, 0, READ_WRITE) == 0
    assert program.copy(target.data_ptr(), address.value) == 0
    found = gpu.read(target)
    assert found == b"f" * 4096
    program.unmap(imported, address)
    assert program.run("cuMemRelease", memory.value) == 0


def test_fabric_handles_need_support(gpu: FakeGpu, program: Program) -> None:
    """A driver without it imports none."""
    gpu.set_handle_types(OpenFailure.FABRIC)
    memory = program.retain(gpu.allocate(GRANULARITY, kind="expandable").data_ptr())
    _, shared = program.export(memory, FABRIC)
    gpu.set_handle_types(OpenFailure.DESCRIPTOR)
    assert program.import_handle(shared, FABRIC)[0] == 801
    assert program.run("cuMemRelease", memory.value) == 0


def test_read_only_mapping_is_no_target(gpu: FakeGpu, program: Program) -> None:
    """Copies from it succeed, and copies to it are violations."""
    gpu.set_read_only_mappings(True)
    tensor, other = gpu.allocate(GRANULARITY, kind="expandable"), gpu.allocate(4096)
    memory, address = program.map_again(tensor.data_ptr())
    assert program.set_access(address, 0, READ_ONLY) == 0
    assert program.copy(other.data_ptr(), address.value) == 0
    assert program.copy(address.value, other.data_ptr()) == 1
    assert "mapped read-only" in gpu.violations[0]
    program.unmap(memory, address)


def test_mapping_without_access_cannot_be_read(gpu: FakeGpu, program: Program) -> None:
    """Access is granted for each device."""
    memory, address = program.map_again(gpu.allocate(GRANULARITY, kind="expandable").data_ptr())
    assert program.set_access(address, 1, READ_WRITE) == 0
    assert program.copy(gpu.allocate(4096).data_ptr(), address.value) == 1
    assert "has no access to its source" in gpu.violations[0]
    program.unmap(memory, address)


def test_mapping_fits_memory_and_reservation(gpu: FakeGpu, program: Program) -> None:
    """A mapping is not larger than either, and overlaps no other; access is set for complete mappings."""
    memory = program.retain(gpu.allocate(GRANULARITY, kind="expandable").data_ptr())
    _, address = program.reserve(2 * GRANULARITY)
    assert program.map(address, memory, 2 * GRANULARITY) == 1
    assert program.map(address, memory) == 0
    assert program.map(address, memory) == 1
    assert program.set_access(address, 0, READ_WRITE, 2 * GRANULARITY) == 1
    assert program.run("cuMemUnmap", address.value, GRANULARITY) == 0
    assert program.run("cuMemAddressFree", address.value, GRANULARITY) == 1
    assert program.run("cuMemAddressFree", address.value, 2 * GRANULARITY) == 0
    assert program.run("cuMemRelease", memory.value) == 0


def test_copy_after_unmapping_is_a_violation(gpu: FakeGpu, program: Program) -> None:
    """Reserved addresses without memory cannot be read."""
    memory, address = program.map_again(gpu.allocate(GRANULARITY, kind="expandable").data_ptr())
    assert program.set_access(address, 0, READ_WRITE) == 0
    program.unmap(memory, address)
    assert program.copy(gpu.allocate(4096).data_ptr(), address.value) == 1
    assert "is not mapped" in gpu.violations[0]


def test_address_range_of_mapped_memory_is_the_reservation(gpu: FakeGpu, program: Program) -> None:
    """The address range of mapped memory is larger than its mapping, whose size is an attribute."""
    size, mapping = c_size_t(), c_uint64()
    address = c_uint64(gpu.allocate(3 * GRANULARITY, kind="expandable").data_ptr())
    assert program.run("cuMemGetAddressRange_v2", None, byref(size), address) == 0
    assert program.run("cuPointerGetAttribute", byref(mapping), MAPPING_SIZE, address) == 0
    assert size.value == 4 * GRANULARITY
    assert mapping.value == GRANULARITY


def test_mapped_memory_is_granular_and_released(gpu: FakeGpu, program: Program) -> None:
    """Reservations have complete granules, read-only access is refused by default, and leaks are reported."""
    before = gpu.open_handles
    assert program.reserve(4096)[0] == 1
    memory, address = program.map_again(gpu.allocate(GRANULARITY, kind="expandable").data_ptr())
    assert program.set_access(address, 1, READ_ONLY) == 801
    assert program.set_access(address, 1, READ_WRITE) == 0
    assert gpu.open_handles["memory"] == before.get("memory", 0) + 1
    assert gpu.open_handles["reservation"] == before.get("reservation", 0) + 1
    assert program.run("cuMemAddressFree", address.value, GRANULARITY) == 1
    program.unmap(memory, address)
    assert gpu.open_handles == before
