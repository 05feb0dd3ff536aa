"""The cuda_ipc transport between real processes, over GPUs of shared memory: every byte arrives."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from rfork.errors import SourceGone, TransportUnusable
from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import CudaIpcTransport
from rfork.transport.cuda_ipc.driver import Kind
from rfork.transport.same_host.dialling import Connections
from tests.fake_cuda import INVALID_CONTEXT, FakeDriver, FakeMemory, image_in
from tests.integration.cuda_ipc.sides import SETTINGS, SIZES, Elsewhere, Side, expected
from tests.integration.cuda_ipc_node import FencedGate
from tests.transport_contract import CONTRACT, MIXED, TOKEN, FakeGate, Pair, content, soon

Check = Callable[[Pair], None]


@pytest.mark.parametrize("kind", ["legacy", pytest.param("descriptor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_contract(check: Check, kind: Kind) -> None:
    """What every transport promises holds between two GPUs, for both kinds of memory."""
    memory, gate = FakeMemory(), FakeGate()
    driver = FakeDriver(memory)
    transport = CudaIpcTransport(SETTINGS, lambda: driver)
    # Two tensors are in host memory at the source, and one of them and another one here.
    source = image_in(memory, MIXED, on_host=[1, 900], filled=True, kind=kind)
    target = image_in(memory, MIXED, on_host=[1, 800], kind=kind)
    pair = Pair(transport, gate, source, target, transport.export(source, gate))
    try:
        check(pair)
    finally:
        pair.close()
    assert ([], []) == (driver.wrong, driver.opened)


@pytest.mark.parametrize("kind", ["legacy", "descriptor"])
@pytest.mark.parametrize("on_host", [[], [0, 3, 4, 20]], ids=["all-on-gpus", "some-in-host-memory"])
def test_every_byte_arrives(elsewhere: Elsewhere, kind: str, on_host: list[int]) -> None:
    """A target in another process has the source's bytes, whatever kind of memory they lie in."""
    side = Side(SIZES)
    reader = side.connect(elsewhere(SIZES, kind=kind, on_host=on_host))
    reader.read(0, side.whole, soon())
    reader.close()
    assert expected(SIZES) == content(side.image)
    assert ([], []) == (side.driver.wrong, side.driver.opened)


def test_small_tensors_that_lie_side_by_side_are_few_copies(elsewhere: Elsewhere) -> None:
    """Five thousand tensors whose sizes fill their places take as many copies as they have allocations."""
    sizes = [512] * 5000
    side = Side(sizes)
    reader = side.connect(elsewhere(sizes))
    reader.read(0, side.whole, soon())
    reader.close()
    assert expected(sizes) == content(side.image)
    assert len(side.memory.blocks) == len(side.driver.copied)


def test_two_allocators_need_not_agree(elsewhere: Elsewhere) -> None:
    """Tensors that lie otherwise here than there, over other allocations, arrive in their places."""
    side = Side(SIZES, align=64, block=1 << 16)
    reader = side.connect(elsewhere(SIZES, align=4096))
    for begin in range(0, side.whole, 700_001):
        reader.read(begin, min(begin + 700_001, side.whole), soon())
    reader.close()
    assert expected(SIZES) == content(side.image)


def test_each_allocation_is_opened_once(elsewhere: Elsewhere) -> None:
    """Reading a range again opens nothing anew; what was never read is never opened, but for one to see."""
    sizes = [1 << 20] * 4
    side = Side(sizes)
    reader = side.connect(elsewhere(sizes))
    assert 1 == len(side.driver.opened)
    for _ in range(2):
        reader.read(2 << 20, 3 << 20, soon())
    assert 2 == len(side.driver.opened)
    reader.close()


def test_memory_of_two_kinds(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """One of each is tried when the transport is chosen; what is refused later is the source's failure."""
    memory, gate = FakeMemory(), FencedGate()
    image = image_in(memory, [1 << 20] * 4, filled=True)
    memory.blocks = [
        replace(block, allocation=replace(block.allocation, kind="descriptor" if index < 2 else "legacy"))
        for index, block in enumerate(memory.blocks)
    ]
    exported = CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, gate)
    side = Side([1 << 20] * 4)
    side.driver.refuses, side.driver.refused_kinds = INVALID_CONTEXT, ("legacy",)
    with pytest.raises(TransportUnusable, match="invalid device context"):
        side.connect(exported.endpoint())
    side.driver.refuses = None
    reader = side.connect(exported.endpoint())
    side.driver.refuses = INVALID_CONTEXT
    with pytest.raises(SourceGone, match="invalid device context"):
        reader.read(0, side.whole, soon())
    reader.close()
    exported.close()


def test_what_is_lent_of_host_memory_is_taken_back() -> None:
    """A reader that keeps the file of a loan keeps no memory of the source."""
    memory, gate = FakeMemory(), FencedGate()
    image = image_in(memory, SIZES, on_host=[1], filled=True)
    exported = CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, gate)
    connections = Connections(exported.endpoint().parameters, 10.0)
    with connections.borrowed(soon()) as connection:
        connection.send({"ask": "borrow", "token": TOKEN, "begin": 0, "end": 4000}, deadline=soon())
        _, (file,) = connection.receive(soon())
        lent = os.fstat(file).st_size
        connection.send({"ask": "return"}, deadline=soon())
        connection.receive(soon())
    left = os.fstat(file).st_size
    os.close(file)
    connections.close()
    exported.close()
    assert (3997, 0) == (lent, left)
