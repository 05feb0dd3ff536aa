"""The cuda_ipc transport between real processes, over GPUs of shared memory: every byte arrives."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from rfork.errors import SourceUnavailable, TransportUnavailable
from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import CudaIpcTransport
from rfork.transport.cuda_ipc.driver import HandleType
from rfork.transport.same_host.client import ConnectionPool
from tests.fake_cuda import INVALID_CONTEXT, FakeDriver, FakeMemory, fake_device_image
from tests.integration.cuda_ipc.harness import SETTINGS, SIZES, CudaIpcTarget, MakeRemoteSource, expected
from tests.integration.cuda_ipc_node import FencedGate
from tests.transport_contract import CONTRACT, MIXED, TOKEN, FakeGate, TransportPair, content, soon

ContractCheck = Callable[[TransportPair], None]


@pytest.mark.parametrize("handle_type", ["legacy", pytest.param("descriptor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_contract(check: ContractCheck, handle_type: HandleType) -> None:
    """The transport contract holds between two GPUs, for both handle types."""
    memory, gate = FakeMemory(), FakeGate()
    driver = FakeDriver(memory)
    transport = CudaIpcTransport(SETTINGS, lambda: driver)
    # Two tensors are in host memory at the source; one of these and another one are in host memory here.
    source = fake_device_image(memory, MIXED, on_host=[1, 900], filled=True, handle_type=handle_type)
    target = fake_device_image(memory, MIXED, on_host=[1, 800], handle_type=handle_type)
    pair = TransportPair(transport, gate, source, target, transport.export(source, gate))
    try:
        check(pair)
    finally:
        pair.close()
    assert [] == driver.violations
    assert [] == driver.opened


@pytest.mark.parametrize("handle_type", ["legacy", "descriptor"])
@pytest.mark.parametrize("on_host", [[], [0, 3, 4, 20]], ids=["all-on-gpus", "some-in-host-memory"])
def test_every_byte_arrives(remote_source: MakeRemoteSource, handle_type: str, on_host: list[int]) -> None:
    """A target in another process gets the source's bytes, for every combination of memory types."""
    side = CudaIpcTarget(SIZES)
    reader = side.connect(remote_source(SIZES, kind=handle_type, on_host=on_host))
    reader.read(0, side.image_bytes, soon())
    reader.close()
    assert expected(SIZES) == content(side.image)
    assert [] == side.driver.violations
    assert [] == side.driver.opened


def test_adjacent_small_tensors_are_copied_together(remote_source: MakeRemoteSource) -> None:
    """Five thousand adjacent tensors without gaps need one copy per allocation."""
    sizes = [512] * 5000
    side = CudaIpcTarget(sizes)
    reader = side.connect(remote_source(sizes))
    reader.read(0, side.image_bytes, soon())
    reader.close()
    assert expected(sizes) == content(side.image)
    assert len(side.memory.blocks) == len(side.driver.completed_copies)


def test_allocations_may_differ(remote_source: MakeRemoteSource) -> None:
    """Tensors arrive correctly if source and target lay them out differently over different allocations."""
    side = CudaIpcTarget(SIZES, align=64, block=1 << 16)
    reader = side.connect(remote_source(SIZES, align=4096))
    for begin in range(0, side.image_bytes, 700_001):
        reader.read(begin, min(begin + 700_001, side.image_bytes), soon())
    reader.close()
    assert expected(SIZES) == content(side.image)


def test_each_allocation_is_opened_once(remote_source: MakeRemoteSource) -> None:
    """Reading a range again opens nothing; allocations that are never read are not opened, except one as a
    probe.
    """
    sizes = [1 << 20] * 4
    side = CudaIpcTarget(sizes)
    reader = side.connect(remote_source(sizes))
    assert 1 == len(side.driver.opened)
    for _ in range(2):
        reader.read(2 << 20, 3 << 20, soon())
    assert 2 == len(side.driver.opened)
    reader.close()


def test_memory_with_both_handle_types(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """One allocation per handle type is probed when the transport is selected; a later refusal is the
    source's failure.
    """
    memory, gate = FakeMemory(), FencedGate()
    image = fake_device_image(memory, [1 << 20] * 4, filled=True)
    memory.blocks = [
        replace(block, allocation=replace(block.allocation, handle_type="descriptor" if index < 2 else "legacy"))
        for index, block in enumerate(memory.blocks)
    ]
    exported = CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, gate)
    side = CudaIpcTarget([1 << 20] * 4)
    side.driver.open_error_code, side.driver.rejected_handle_types = INVALID_CONTEXT, ("legacy",)
    with pytest.raises(TransportUnavailable, match="invalid device context"):
        side.connect(exported.endpoint())
    side.driver.open_error_code = None
    reader = side.connect(exported.endpoint())
    side.driver.open_error_code = INVALID_CONTEXT
    with pytest.raises(SourceUnavailable, match="invalid device context"):
        reader.read(0, side.image_bytes, soon())
    reader.close()
    exported.close()


def test_lent_host_memory_is_reclaimed() -> None:
    """A reader that keeps the file of a loan keeps no memory of the source."""
    memory, gate = FakeMemory(), FencedGate()
    image = fake_device_image(memory, SIZES, on_host=[1], filled=True)
    exported = CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, gate)
    connections = ConnectionPool(exported.endpoint().parameters, 10.0)
    with connections.lease(soon()) as connection:
        connection.send({"operation": "acquire", "token": TOKEN, "begin": 0, "end": 4000}, deadline=soon())
        _, (file,) = connection.receive(soon())
        lent = os.fstat(file).st_size
        connection.send({"operation": "release"}, deadline=soon())
        connection.receive(soon())
    left = os.fstat(file).st_size
    os.close(file)
    connections.close()
    exported.close()
    assert 3997 == lent
    assert 0 == left
