"""Transfers of nixl: merged, split, and one type of memory on each side."""

from __future__ import annotations

import pytest

from rfork.transport.mooncake.read_plan import ContiguousPiece
from rfork.transport.nixl.agent import DeviceMemory, Fabric, MemoryMap
from rfork.transport.nixl.reader import TRANSFER_BYTES, TRANSFER_DESCRIPTORS, DescriptorBatch, plan_transfers

HOST = MemoryMap()
GPUS = MemoryMap([DeviceMemory(1 << 40, 1 << 30, 0), DeviceMemory(1 << 41, 1 << 30, 3)])


def covered(transfers: list[DescriptorBatch]) -> list[tuple[int, int, int]]:
    """Return the bytes of transfers: remote and local address, and length."""
    return [
        (remote[0], local[0], local[1])
        for transfer in transfers
        for remote, local in zip(transfer.remote, transfer.local, strict=True)
    ]


def test_small_pieces_share_a_transfer() -> None:
    """Two thousand pieces of 8 KiB are one transfer."""
    pieces = [ContiguousPiece(1 + 16384 * index, 7 + 8192 * index, 8192) for index in range(2000)]
    transfers = plan_transfers(pieces, HOST, HOST)
    assert 1 == len(transfers)
    assert [tuple(piece.__getattribute__(name) for name in ("remote", "local", "length")) for piece in pieces] == (
        covered(transfers)
    )


def test_a_large_piece_is_split() -> None:
    """No transfer exceeds the maximum, and no byte is lost."""
    transfers = plan_transfers([ContiguousPiece(100, 200, 2 * TRANSFER_BYTES + 5)], HOST, HOST)
    assert [TRANSFER_BYTES, TRANSFER_BYTES, 5] == [transfer.bytes for transfer in transfers]
    assert (100 + 2 * TRANSFER_BYTES, 200 + 2 * TRANSFER_BYTES, 5) == covered(transfers)[-1]


def test_the_number_of_descriptors_is_limited() -> None:
    """Tiny tensors fill a transfer by their number."""
    pieces = [ContiguousPiece(100 * index, 200 * index, 3) for index in range(1, TRANSFER_DESCRIPTORS + 2)]
    assert [TRANSFER_DESCRIPTORS, 1] == [len(each.local) for each in plan_transfers(pieces, HOST, HOST)]


def test_each_transfer_has_one_type_of_memory_on_each_side() -> None:
    """Pieces are grouped by the memory of both sides, and descriptors on GPUs name the GPU."""
    pieces = [
        ContiguousPiece((1 << 41) + 5, 100, 10),
        ContiguousPiece(500, 600, 10),
        ContiguousPiece((1 << 40) + 5, 200, 10),
    ]
    transfers = plan_transfers(pieces, HOST, GPUS)
    assert [(False, True), (False, False)] == [transfer.on_gpus for transfer in transfers]
    assert [3, 0] == [device for _, _, device in transfers[0].remote]


@pytest.mark.parametrize(
    ("address", "device"),
    [(5, None), (1 << 40, 0), ((1 << 40) + (1 << 30), None), ((1 << 41) + 1, 3), ((1 << 40) - 1, None)],
)
def test_the_device_of_an_address(address: int, device: int | None) -> None:
    """Regions on GPUs, and host memory between them."""
    assert device == GPUS.device(address)


def test_rdma_excludes_transports_in_software() -> None:
    """UCX would execute reads and writes over TCP at any address of the process."""
    variables = Fabric("rdma", devices="mlx5_0:1").variables
    assert "^tcp,posix,sysv" == variables["UCX_TLS"]


@pytest.mark.parametrize(("bind", "interface"), [("127.0.0.1", "lo"), ("0.0.0.0", None)])
def test_on_loopback_tcp_listens_on_loopback_only(bind: str, interface: str | None) -> None:
    """UCX listens on each interface that it uses."""
    assert interface == Fabric("tcp", bind=bind).variables["UCX_NET_DEVICES"]
