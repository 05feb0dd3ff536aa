"""Fixtures: processes with sources for the cuda_ipc tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from rfork.transport.base import Endpoint
from tests.fake_libcuda.fake_gpu import FakeGpu
from tests.integration.cuda_ipc.harness import SIZES, CudaIpcProcess, LocalSource, MakeRemoteSource, local_source
from tests.integration.cuda_ipc_node import FencedGate


@pytest.fixture(scope="package")
def source_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaIpcProcess]:
    """A process with sources, for all tests that neither stop nor kill it."""
    process = CudaIpcProcess("sources", tmp_path_factory.mktemp("sources") / "log")
    yield process
    process.end()


@pytest.fixture
def remote_source(source_process: CudaIpcProcess) -> Iterator[MakeRemoteSource]:
    """Creates sources in another process and closes them after the test."""
    count = 0

    def make(sizes: Sequence[int], **more: object) -> Endpoint:
        nonlocal count
        count += 1
        return source_process.source(sizes, **more)

    yield make
    for _ in range(count):
        assert {"closed": 1} == source_process.request("close")


@pytest.fixture
def seed(fake_gpu: FakeGpu) -> Iterator[LocalSource]:
    """A source in this process, with a gate that tests control."""
    gate = FencedGate()
    with local_source(fake_gpu, SIZES, gate) as endpoint:
        yield gate, endpoint
