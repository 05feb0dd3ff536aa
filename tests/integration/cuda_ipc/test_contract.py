"""The cuda_ipc transport on the strict fake driver, within a process and between processes: every byte arrives."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing

import pytest

from rfork.cuda.library import INVALID_CONTEXT
from rfork.errors import SourceUnavailable, TransportUnavailable
from rfork.transport.cuda_ipc import CudaIpcTransport
from rfork.transport.same_host.client import ConnectionPool
from tests.fake_libcuda.fake_gpu import FakeGpu, OpenFailure
from tests.fake_libcuda.images import device_image, patterns
from tests.integration.cuda_ipc.harness import (
    SETTINGS,
    SIZES,
    CudaIpcTarget,
    MakeRemoteSource,
    local_source,
    opened_allocations,
)
from tests.integration.cuda_ipc_node import FencedGate
from tests.transport_contract import CONTRACT, MIXED, TOKEN, FakeGate, TransportPair, soon


@pytest.mark.parametrize(
    "handle_type",
    [
        pytest.param(OpenFailure.DESCRIPTOR, id="descriptor"),
        pytest.param(OpenFailure.FABRIC, id="fabric", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_contract(fake_gpu: FakeGpu, check: Callable[[TransportPair], None], handle_type: OpenFailure) -> None:
    """The transport contract holds between two GPUs, for both types of handles of mapped memory."""
    fake_gpu.set_handle_types(handle_type)
    fake_gpu.max_pageable_copies = 20  # tensor 800 is copied to pageable memory
    transport, gate = CudaIpcTransport(SETTINGS), FakeGate()
    # Two tensors are in host memory at the source; one of these and another one are in host memory here.
    source = device_image(fake_gpu, MIXED, on_host=[1, 900], filled=True, kind="expandable", device=1)
    target = device_image(fake_gpu, MIXED, on_host=[1, 800])
    with closing(TransportPair(transport, gate, source, target, transport.export(source, gate))) as pair:
        check(pair)


@pytest.mark.parametrize("kind", ["legacy", "expandable"])
@pytest.mark.parametrize("on_host", [[], [0, 3, 4, 20]], ids=["all-on-gpus", "some-in-host-memory"])
def test_every_byte_arrives(fake_gpu: FakeGpu, remote_source: MakeRemoteSource, kind: str, on_host: list[int]) -> None:
    """A target in another process gets the source's bytes, for every combination of memory types."""
    assert patterns(SIZES) == CudaIpcTarget(fake_gpu, SIZES).read(remote_source(SIZES, kind=kind, on_host=on_host))


def test_adjacent_small_tensors_are_copied_together(fake_gpu: FakeGpu, remote_source: MakeRemoteSource) -> None:
    """Five thousand adjacent tensors without gaps need one copy per allocation of the source."""
    sizes = [512] * 5000
    assert patterns(sizes) == CudaIpcTarget(fake_gpu, sizes).read(remote_source(sizes, kind="expandable"))
    assert 2 == fake_gpu.completed_copies


def test_allocations_may_differ(fake_gpu: FakeGpu, remote_source: MakeRemoteSource) -> None:
    """Tensors arrive correctly if source and target lay them out differently over different allocations."""
    side = CudaIpcTarget(fake_gpu, SIZES, align=64, kind="expandable")
    with closing(side.connect(remote_source(SIZES, align=4096))) as reader:
        for begin in range(0, side.image_bytes, 700_001):
            reader.read(begin, min(begin + 700_001, side.image_bytes), soon())
    assert patterns(SIZES) == side.content


def test_each_allocation_is_opened_once(fake_gpu: FakeGpu, remote_source: MakeRemoteSource) -> None:
    """Reading a range again opens nothing; allocations that are never read are not opened, except one as a
    probe.
    """
    sizes = [1 << 20] * 4
    side = CudaIpcTarget(fake_gpu, sizes)
    with closing(side.connect(remote_source(sizes, kind=["legacy"] * 4))) as reader:
        assert 1 == opened_allocations(fake_gpu)
        for _ in range(2):
            reader.read(2 << 20, 3 << 20, soon())
        assert 2 == opened_allocations(fake_gpu)


def test_memory_with_both_handle_types(fake_gpu: FakeGpu, remote_source: MakeRemoteSource) -> None:
    """One allocation per handle type is probed when the transport is selected; a later refusal is the
    source's failure.
    """
    sizes = [1 << 20] * 4
    endpoint = remote_source(sizes, kind=["expandable", "expandable", "legacy", "legacy"])
    side = CudaIpcTarget(fake_gpu, sizes)
    with (
        fake_gpu.failing_open(INVALID_CONTEXT, OpenFailure.LEGACY),
        pytest.raises(TransportUnavailable, match="invalid device context"),
    ):
        side.connect(endpoint)
    with closing(side.connect(endpoint)) as reader:
        with (
            fake_gpu.failing_open(INVALID_CONTEXT),
            pytest.raises(SourceUnavailable, match="invalid device context"),
        ):
            reader.read(0, side.image_bytes, soon())
        reader.read(0, side.image_bytes, soon())
    assert patterns(sizes) == side.content


def test_lent_host_memory_is_reclaimed(fake_gpu: FakeGpu) -> None:
    """A reader that keeps the file of a loan keeps no memory of the source."""
    with (
        local_source(fake_gpu, SIZES, FencedGate(), on_host=[1]) as endpoint,
        closing(ConnectionPool(endpoint.parameters, 10.0)) as connections,
        connections.lease(soon()) as connection,
    ):
        connection.send({"operation": "acquire", "token": TOKEN, "begin": 0, "end": 4000}, deadline=soon())
        _, (file,) = connection.receive(soon())
        lent = os.fstat(file).st_size
        connection.send({"operation": "release"}, deadline=soon())
        connection.receive(soon())
        left = os.fstat(file).st_size
        os.close(file)
    assert 3997 == lent
    assert 0 == left
