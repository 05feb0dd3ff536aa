"""cuda_ipc without sockets and GPUs: which copies fill a range, and what the driver's refusals mean."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import pytest

from rfork.errors import (
    NotSameHost,
    PeerAccessUnavailable,
    RforkError,
    SourceCorrupt,
    TransportUnavailable,
    VersionMismatch,
)
from rfork.image.memory import Segment
from rfork.settings import InstanceSettings
from rfork.transport.cuda_ipc import CudaIpcTransport, libcuda
from rfork.transport.cuda_ipc.allocations import AllocationTable, allocations_of, host_ranges
from rfork.transport.cuda_ipc.copy_plan import PlannedCopy, plan_copies
from rfork.transport.cuda_ipc.diagnostics import explain_open_error
from rfork.transport.cuda_ipc.driver import Allocation, DriverError, HandleType
from rfork.transport.cuda_ipc.namespaces import namespaces
from rfork.transport.mooncake.read_plan import ContiguousPiece
from tests.fake_cuda import FakeDriver, FakeMemory, fake_device_image

SOURCE = AllocationTable([Allocation(1000, 100, 0, "legacy"), Allocation(1100, 100, 0, "legacy")])
TARGET = AllocationTable([Allocation(5000, 1000, 2, "legacy"), Allocation(6000, 1000, 3, "legacy")])

TABLE: Sequence[tuple[str, list[ContiguousPiece], list[PlannedCopy], list[tuple[int, int]]]] = [
    ("one piece", [ContiguousPiece(1010, 5000, 20)], [PlannedCopy(0, 10, 5000, 20, 2)], []),
    (
        "pieces that go on on both sides are one copy",
        [ContiguousPiece(1000, 5000, 20), ContiguousPiece(1020, 5020, 30)],
        [PlannedCopy(0, 0, 5000, 50, 2)],
        [],
    ),
    (
        "a gap on one side parts two copies",
        [ContiguousPiece(1000, 5000, 20), ContiguousPiece(1021, 5020, 30)],
        [PlannedCopy(0, 0, 5000, 20, 2), PlannedCopy(0, 21, 5020, 30, 2)],
        [],
    ),
    (
        "a piece over two allocations of the source is two copies",
        [ContiguousPiece(1090, 5000, 20)],
        [PlannedCopy(0, 90, 5000, 10, 2), PlannedCopy(1, 0, 5010, 10, 2)],
        [],
    ),
    (
        "no copy crosses from one allocation of the target to the next",
        [ContiguousPiece(1000, 5980, 20), ContiguousPiece(1020, 6000, 20)],
        [PlannedCopy(0, 0, 5980, 20, 2), PlannedCopy(0, 20, 6000, 20, 3)],
        [],
    ),
    (
        "what lands in host memory is copied by the first device",
        [ContiguousPiece(1000, 90, 20), ContiguousPiece(1020, 110, 20)],
        [PlannedCopy(0, 0, 90, 20, 2), PlannedCopy(0, 20, 110, 20, 2)],
        [],
    ),
    (
        "host memory of the source is no copy",
        [
            ContiguousPiece(7, 5000, 10),
            ContiguousPiece(77, 5100, 5),
            ContiguousPiece(1000, 5200, 10),
            ContiguousPiece(9, 5300, 1),
        ],
        [PlannedCopy(0, 0, 5200, 10, 2)],
        [(300, 315), (325, 326)],
    ),
]


@pytest.mark.parametrize(("pieces", "copies", "on_host"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_copies_of_a_range(
    pieces: list[ContiguousPiece], copies: list[PlannedCopy], on_host: list[tuple[int, int]]
) -> None:
    """Pieces of an image range become as few copies as two allocators allow."""
    found = plan_copies(pieces, 300, SOURCE, TARGET)
    assert (copies, on_host) == (list(found.copies), list(found.on_host))


def test_a_piece_beyond_the_last_allocation() -> None:
    """An address map that goes on where the table of allocations ends is the source's fault."""
    with pytest.raises(SourceCorrupt, match="beyond"):
        plan_copies([ContiguousPiece(1190, 5000, 20)], 0, SOURCE, TARGET)


def test_each_allocation_is_found_once() -> None:
    """Tensors that share an allocation, and one that lies in several, are the allocations they lie in."""
    memory = FakeMemory()
    sizes = [100, 200, 3 << 16, 50]
    image = fake_device_image(memory, sizes, block=1 << 16)
    found = allocations_of(FakeDriver(memory), image)
    assert [block.allocation for block in memory.blocks] == list(found.table)


def test_image_ranges_in_host_memory() -> None:
    """Neighbours in the image are one range, wherever they lie."""
    segments = [Segment(0, 7, 10), Segment(10, 900, 5), Segment(15, 1000, 100), Segment(115, 50, 1)]
    assert [(0, 15), (115, 116)] == host_ranges(SOURCE, segments)


@pytest.mark.parametrize("table", [[(0, 5)], [(10, 0)], [(10, -1)], [(10, 10), (19, 5)], [(20, 5), (10, 5)]], ids=str)
def test_tables_that_are_none(table: list[tuple[int, int]]) -> None:
    """Allocations at no address, of no bytes, over one another or out of order are refused."""
    with pytest.raises(SourceCorrupt):
        AllocationTable([Allocation(base, size, 0, "legacy") for base, size in table])


SAME_NAMESPACE, OTHER_NAMESPACE = namespaces()["processes"], "pid:[1]"
REFUSALS: Sequence[tuple[int, HandleType, str, str, type[RforkError]]] = [
    (libcuda.PEER_ACCESS_UNSUPPORTED, "legacy", "gpu-0", SAME_NAMESPACE, PeerAccessUnavailable),
    (libcuda.TOO_MANY_PEERS, "descriptor", "gpu-0", OTHER_NAMESPACE, PeerAccessUnavailable),
    (libcuda.SYSTEM_DRIVER_MISMATCH, "legacy", "gpu-0", OTHER_NAMESPACE, VersionMismatch),
    (libcuda.INVALID_CONTEXT, "legacy", "gpu-0", OTHER_NAMESPACE, NotSameHost),
    (libcuda.INVALID_CONTEXT, "legacy", "gpu-0", SAME_NAMESPACE, TransportUnavailable),
    (libcuda.INVALID_VALUE, "descriptor", "gpu-0", OTHER_NAMESPACE, TransportUnavailable),
    (libcuda.INVALID_DEVICE, "legacy", "another", SAME_NAMESPACE, TransportUnavailable),
    (libcuda.NOT_PERMITTED, "fabric", "gpu-0", SAME_NAMESPACE, TransportUnavailable),
]


@pytest.mark.parametrize(("code", "handle_type", "uuid", "namespace", "expected"), REFUSALS)
def test_what_a_refusal_means(
    code: int, handle_type: HandleType, uuid: str, namespace: str, expected: type[RforkError]
) -> None:
    """The driver's number, the kind of memory and what the two share say what has to be changed."""
    error = DriverError("cuIpcOpenMemHandle_v2", code, "said the driver")
    found = explain_open_error(
        error, handle_type, uuid, FakeDriver(FakeMemory()), {**namespaces(), "processes": namespace}
    )
    assert (expected, True, True) == (type(found), "said the driver" in str(found), bool(found.hint))


def test_structures_are_as_large_as_in_cuda_h() -> None:
    """Handles are 64 bytes, UUIDs 16, and an access is three numbers."""
    sizes = [
        ctypes.sizeof(structure)
        for structure in (
            libcuda.IpcMemHandle,
            libcuda.FabricHandle,
            libcuda.Uuid,
            libcuda.MemLocation,
            libcuda.MemAccessDesc,
        )
    ]
    assert [64, 64, 16, 8, 12] == sizes


def test_a_machine_without_a_driver() -> None:
    """Where the library is not there, the transport cannot be used, and says so."""
    with pytest.raises(TransportUnavailable, match="cannot be loaded"):
        libcuda.CudaDriverLibrary("libcuda-that-is-not-there.so.1")


def test_a_driver_that_lacks_a_function() -> None:
    """A library without one of the functions is a driver that is too old."""
    with pytest.raises(VersionMismatch, match="no cuInit"):
        libcuda.CudaDriverLibrary("libc.so.6")


def test_without_a_gpu_it_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch without a CUDA device makes it unusable, without a word of the driver."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    available = CudaIpcTransport(InstanceSettings()).availability()
    assert (False, "torch finds no CUDA device") == (available.usable, available.reason)


def test_on_another_system_it_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs Linux."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert (False, "needs Linux") == (
        CudaIpcTransport(InstanceSettings()).availability().usable,
        CudaIpcTransport(InstanceSettings()).availability().reason,
    )
