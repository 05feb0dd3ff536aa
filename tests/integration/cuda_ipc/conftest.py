"""Processes, and sources in them, for the tests of cuda_ipc."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import CudaIpcTransport
from tests.fake_cuda import FakeDriver, FakeMemory, image_in
from tests.integration.cuda_ipc.sides import SETTINGS, SIZES, Elsewhere, Node
from tests.integration.cuda_ipc_node import FencedGate, endpoint_in


@pytest.fixture(scope="module")
def server() -> Iterator[Node]:
    """A process of sources, for all tests that neither stop nor kill it."""
    node = Node({"side": "sources"})
    yield node
    node.end()


@pytest.fixture
def elsewhere(server: Node) -> Iterator[Elsewhere]:
    """Makes sources in another process, which are closed after the test."""
    count = 0

    def make(sizes: Sequence[int], **more: object) -> Endpoint:
        nonlocal count
        count += 1
        wanted = {"sizes": list(sizes), "on_host": [], "kind": "legacy", "align": 512, **more}
        server.tell(json.dumps(wanted))
        return endpoint_in(server.hear())

    yield make
    for _ in range(count):
        server.tell("close")
        assert {"closed": 1} == server.hear()


@pytest.fixture
def seed() -> Iterator[tuple[FencedGate, Endpoint, FakeDriver]]:
    """A source in this process, with a gate that tests turn."""
    memory, gate = FakeMemory(), FencedGate()
    driver = FakeDriver(memory)
    image = image_in(memory, SIZES, filled=True)
    exported = CudaIpcTransport(SETTINGS, lambda: driver).export(image, gate)
    yield gate, exported.endpoint(), driver
    exported.close()
