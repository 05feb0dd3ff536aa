"""cuda_ipc without sockets: copy planning and the driver's errors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import pytest

from rfork.cuda import library
from rfork.cuda.device import TorchDevices
from rfork.cuda.library import DriverError
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
from rfork.transport.cuda_ipc import CudaIpcTransport
from rfork.transport.cuda_ipc.allocations import AllocationTable, PlannedCopy, allocations_of, host_ranges, plan_copies
from rfork.transport.cuda_ipc.driver import Allocation, HandleType, IpcDriver
from rfork.transport.cuda_ipc.protocol import namespaces
from rfork.transport.cuda_ipc.source_memory import explain_open_error
from rfork.transport.mooncake.read_plan import ContiguousPiece
from tests.fake_libcuda.fake_gpu import GRANULARITY, FakeGpu
from tests.fake_libcuda.images import device_image

SOURCE = AllocationTable([Allocation(1000, 100, 0, "legacy"), Allocation(1100, 100, 0, "legacy")])
TARGET = AllocationTable([Allocation(5000, 1000, 2, "legacy"), Allocation(6000, 1000, 3, "legacy")])

TABLE: Sequence[tuple[str, list[ContiguousPiece], list[PlannedCopy], list[tuple[int, int]]]] = [
    ("one piece", [ContiguousPiece(1010, 5000, 20)], [PlannedCopy(0, 10, 5000, 20, 2)], []),
    (
        "pieces contiguous on both sides are one copy",
        [ContiguousPiece(1000, 5000, 20), ContiguousPiece(1020, 5020, 30)],
        [PlannedCopy(0, 0, 5000, 50, 2)],
        [],
    ),
    (
        "a gap on one side separates copies",
        [ContiguousPiece(1000, 5000, 20), ContiguousPiece(1021, 5020, 30)],
        [PlannedCopy(0, 0, 5000, 20, 2), PlannedCopy(0, 21, 5020, 30, 2)],
        [],
    ),
    (
        "a piece across two allocations of the source is two copies",
        [ContiguousPiece(1090, 5000, 20)],
        [PlannedCopy(0, 90, 5000, 10, 2), PlannedCopy(1, 0, 5010, 10, 2)],
        [],
    ),
    (
        "no copy spans two allocations of the target",
        [ContiguousPiece(1000, 5980, 20), ContiguousPiece(1020, 6000, 20)],
        [PlannedCopy(0, 0, 5980, 20, 2), PlannedCopy(0, 20, 6000, 20, 3)],
        [],
    ),
    (
        "host memory of the target is filled by the first device",
        [ContiguousPiece(1000, 90, 20), ContiguousPiece(1020, 110, 20)],
        [PlannedCopy(0, 0, 90, 20, 2), PlannedCopy(0, 20, 110, 20, 2)],
        [],
    ),
    (
        "host memory of the source is not copied by a device",
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
def test_pieces_of_a_range_become_few_copies(
    pieces: list[ContiguousPiece], copies: list[PlannedCopy], on_host: list[tuple[int, int]]
) -> None:
    """Pieces of an image range become as few copies as the allocations on both sides allow."""
    found = plan_copies(pieces, 300, SOURCE, TARGET)
    assert copies == list(found.copies)
    assert on_host == list(found.on_host)


def test_a_piece_beyond_the_last_allocation_is_source_corrupt() -> None:
    """An address map that exceeds the table of allocations is the source's fault."""
    with pytest.raises(SourceCorrupt, match="exceeds its allocations"):
        plan_copies([ContiguousPiece(1190, 5000, 20)], 0, SOURCE, TARGET)


def test_each_allocation_is_listed_once(fake_gpu: FakeGpu) -> None:
    """Tensors may share an allocation, and one tensor may span several."""
    image = device_image(fake_gpu, [100, 200, 2 * GRANULARITY, 50], kind="expandable")
    base = image.segments(0, 1)[0].address
    bases = [base, base + GRANULARITY, base + 2 * GRANULARITY]
    found = allocations_of(IpcDriver(), image)
    assert [Allocation(each, GRANULARITY, 0, "descriptor") for each in bases] == list(found.table)


def test_image_ranges_in_host_memory_are_merged() -> None:
    """Adjacent image ranges are one range, even if their addresses are not adjacent."""
    segments = [Segment(0, 7, 10), Segment(10, 900, 5), Segment(15, 1000, 100), Segment(115, 50, 1)]
    assert [(0, 15), (115, 116)] == host_ranges(SOURCE, segments)


@pytest.mark.parametrize("table", [[(0, 5)], [(10, 0)], [(10, -1)], [(10, 10), (19, 5)], [(20, 5), (10, 5)]], ids=str)
def test_an_invalid_table_is_source_corrupt(table: list[tuple[int, int]]) -> None:
    """Allocations without an address or bytes, overlapping or out of order, are rejected."""
    with pytest.raises(SourceCorrupt):
        AllocationTable([Allocation(base, size, 0, "legacy") for base, size in table])


SAME_NAMESPACE, OTHER_NAMESPACE = namespaces()["processes"], "pid:[1]"
VISIBLE, HIDDEN = b"fake-gpu".ljust(16, b"\0").hex(), b"another".ljust(16, b"\0").hex()
OPEN_ERRORS: Sequence[tuple[int, HandleType, str, str, type[RforkError]]] = [
    (library.PEER_ACCESS_UNSUPPORTED, "legacy", VISIBLE, SAME_NAMESPACE, PeerAccessUnavailable),
    (library.TOO_MANY_PEERS, "descriptor", VISIBLE, OTHER_NAMESPACE, PeerAccessUnavailable),
    (library.SYSTEM_DRIVER_MISMATCH, "legacy", VISIBLE, OTHER_NAMESPACE, VersionMismatch),
    (library.INVALID_CONTEXT, "legacy", VISIBLE, OTHER_NAMESPACE, NotSameHost),
    (library.INVALID_CONTEXT, "legacy", VISIBLE, SAME_NAMESPACE, TransportUnavailable),
    (library.INVALID_VALUE, "descriptor", VISIBLE, OTHER_NAMESPACE, TransportUnavailable),
    (library.INVALID_DEVICE, "legacy", HIDDEN, SAME_NAMESPACE, TransportUnavailable),
    (library.NOT_PERMITTED, "fabric", VISIBLE, SAME_NAMESPACE, TransportUnavailable),
]


@pytest.mark.parametrize(("code", "handle_type", "uuid", "namespace", "expected"), OPEN_ERRORS)
@pytest.mark.usefixtures("fake_gpu")
def test_an_open_error_is_explained(
    code: int, handle_type: HandleType, uuid: str, namespace: str, expected: type[RforkError]
) -> None:
    """The driver's error code, the handle type and the shared namespaces determine the error and the hint."""
    error = DriverError("cuIpcOpenMemHandle_v2", code, "the driver's text")
    found = explain_open_error(error, handle_type, uuid, IpcDriver(), {**namespaces(), "processes": namespace})
    assert expected is type(found)
    assert "the driver's text" in str(found)
    assert found.hint


def test_structures_have_the_sizes_of_cuda_h() -> None:
    """Handles have 64 bytes, UUIDs 16, and an access descriptor three integers."""
    sizes = [
        ctypes.sizeof(structure)
        for structure in (
            library.IpcMemHandle,
            library.FabricHandle,
            library.Uuid,
            library.MemLocation,
            library.MemAccessDesc,
        )
    ]
    assert [64, 64, 16, 8, 12] == sizes


def test_without_a_driver_the_transport_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library raises TransportUnavailable."""
    monkeypatch.setattr(library, "LIBRARY_PATH", "libcuda-that-is-not-there.so.1")
    with pytest.raises(TransportUnavailable, match="cannot load"):
        library.CudaDriverLibrary()


def test_a_driver_without_a_required_function_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without one of the functions raises VersionMismatch."""
    monkeypatch.setattr(library, "LIBRARY_PATH", "libc.so.6")
    with pytest.raises(VersionMismatch, match="no cuInit"):
        library.CudaDriverLibrary()


def test_without_a_gpu_the_transport_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a CUDA device in torch, the driver is not loaded."""
    monkeypatch.setattr(TorchDevices, "has_gpu", lambda: False)
    available = CudaIpcTransport(InstanceSettings()).availability()
    assert not available.usable
    assert "torch finds no CUDA device" == available.reason


def test_on_another_system_the_transport_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs Linux."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not CudaIpcTransport(InstanceSettings()).availability().usable
    assert "needs Linux" == CudaIpcTransport(InstanceSettings()).availability().reason
