"""Fixtures: processes with sources for the cuda_ipc tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import CudaIpcTransport
from tests.fake_cuda import FakeDriver, FakeMemory, fake_device_image
from tests.integration.cuda_ipc.harness import SETTINGS, SIZES, CudaIpcProcess, MakeRemoteSource
from tests.integration.cuda_ipc_node import FencedGate, endpoint_from_json


@pytest.fixture(scope="module")
def source_process() -> Iterator[CudaIpcProcess]:
    """A process with sources, for all tests that neither stop nor kill it."""
    node = CudaIpcProcess({"side": "sources"})
    yield node
    node.end()


@pytest.fixture
def remote_source(source_process: CudaIpcProcess) -> Iterator[MakeRemoteSource]:
    """Creates sources in another process and closes them after the test."""
    count = 0

    def make(sizes: Sequence[int], **more: object) -> Endpoint:
        nonlocal count
        count += 1
        description = {"sizes": list(sizes), "on_host": [], "kind": "legacy", "align": 512, **more}
        source_process.send_line(json.dumps(description))
        return endpoint_from_json(source_process.read_message())

    yield make
    for _ in range(count):
        source_process.send_line("close")
        assert {"closed": 1} == source_process.read_message()


@pytest.fixture
def seed() -> Iterator[tuple[FencedGate, Endpoint, FakeDriver]]:
    """A source in this process, with a gate that tests control."""
    memory, gate = FakeMemory(), FencedGate()
    driver = FakeDriver(memory)
    image = fake_device_image(memory, SIZES, filled=True)
    exported = CudaIpcTransport(SETTINGS, lambda: driver).export(image, gate)
    yield gate, exported.endpoint(), driver
    exported.close()
