"""Leases over cuda_ipc: without one, no handle, no loan and no pin."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from rfork.errors import LeaseRejected, RforkError, SourceUnavailable
from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import exporter, source_memory
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.connection import Message, UnixSocketConnection, close_all
from rfork.transport.same_host.server import MAX_CONNECTIONS_PER_FORK
from tests.fake_libcuda.fake_gpu import GRANULARITY, FakeGpu, OpenFailure
from tests.fake_libcuda.images import patterns
from tests.integration.cuda_ipc.harness import (
    SIZES,
    CudaIpcTarget,
    LocalSource,
    local_source,
    opened_allocations,
    raised_by,
)
from tests.integration.cuda_ipc_node import FencedGate
from tests.transport_contract import TOKEN, soon


def test_no_handle_without_a_lease(fake_gpu: FakeGpu, seed: LocalSource) -> None:
    """A forged token gets no handle of any allocation, and no byte."""
    side = CudaIpcTarget(fake_gpu, SIZES)
    reader = side.connect(seed[1], token="forged")
    with pytest.raises(LeaseRejected):
        reader.read(0, side.image_bytes, soon())
    reader.close()
    assert 0 == fake_gpu.exports
    assert bytes(side.image_bytes) == side.content


def test_every_byte_is_metered(fake_gpu: FakeGpu, seed: LocalSource) -> None:
    """A source with a rate limit lends few bytes at a time and counts all of them."""
    gate, endpoint = seed
    gate.max_bytes = 100_000
    assert patterns(SIZES) == CudaIpcTarget(fake_gpu, SIZES).read(endpoint)
    assert sum(SIZES) == gate.granted


def test_handles_are_created_once(fake_gpu: FakeGpu) -> None:
    """Two readers that read everything need one handle per allocation, unless handles are descriptors."""
    fake_gpu.set_handle_types(OpenFailure.FABRIC)
    with local_source(fake_gpu, SIZES, FencedGate()) as endpoint:
        for _ in range(2):
            CudaIpcTarget(fake_gpu, SIZES).read(endpoint)
    assert -(-sum(SIZES) // GRANULARITY) == fake_gpu.exports


MALFORMED_REQUESTS: Sequence[Message] = (
    {},
    {"operation": "acquire"},
    {"operation": "acquire", "token": TOKEN, "begin": -1, "end": 5},
    {"operation": "acquire", "token": TOKEN, "begin": 5, "end": 5},
    {"operation": "acquire", "token": TOKEN, "begin": 0, "end": 1 << 70},
    {"operation": "acquire", "token": TOKEN, "begin": "0", "end": [1]},
    {"operation": "handles", "token": TOKEN, "allocations": [-1]},
    {"operation": "handles", "token": TOKEN, "allocations": [1 << 70]},
    {"operation": "handles", "token": TOKEN, "allocations": [0] * 1000},
    {"operation": "allocations", "token": TOKEN, "from": "first"},
    {"operation": "allocations", "token": 7, "from": 0},
    {"operation": "everything", "token": TOKEN},
)


@pytest.mark.parametrize("request_message", MALFORMED_REQUESTS, ids=[str(one)[:80] for one in MALFORMED_REQUESTS])
def test_malformed_requests_harm_no_other_reader(
    fake_gpu: FakeGpu, seed: LocalSource, request_message: Message
) -> None:
    """A reader with a malformed request loses its connection; the next one is served."""
    _, endpoint = seed
    connections = ConnectionPool(endpoint.parameters, 10.0)
    with connections.lease(soon()) as connection:
        connection.send(request_message, deadline=soon())
        with pytest.raises(SourceUnavailable):
            connection.receive(soon())
    connections.close()
    assert patterns(SIZES) == CudaIpcTarget(fake_gpu, SIZES).read(endpoint)


def test_a_negative_offset_is_the_first_page(seed: LocalSource) -> None:
    """Pages of the table start at the requested offset and never before the table."""
    _, endpoint = seed
    connections = ConnectionPool(endpoint.parameters, 10.0)
    pages: list[Message] = []
    with connections.lease(soon()) as connection:
        for first in (-5, 0):
            connection.send({"operation": "allocations", "token": TOKEN, "from": first}, deadline=soon())
            pages.append(connection.receive(soon())[0])
    connections.close()
    assert pages[0] == pages[1]


def open_pins(endpoint: Endpoint, count: int) -> Iterator[tuple[ConnectionPool, UnixSocketConnection]]:
    """Open connections that only pin a source."""
    for _ in range(count):
        connections = ConnectionPool(endpoint.parameters, 10.0)
        with connections.lease(soon()) as connection:
            connection.send({"operation": "pin", "token": TOKEN}, deadline=soon())
            reply, descriptors = connection.receive(soon())
            close_all(descriptors)
            if "pinned" in reply:
                yield connections, connection
        connections.close()


def test_a_pin_uses_no_reader_slot(fake_gpu: FakeGpu, seed: LocalSource) -> None:
    """A fork's pin uses none of its slots: 64 concurrent reads all proceed."""
    side = CudaIpcTarget(fake_gpu, SIZES)
    reader = side.connect(seed[1])
    step = side.image_bytes // MAX_CONNECTIONS_PER_FORK
    raised: list[RforkError | None] = []

    def read(index: int) -> None:
        raised.append(raised_by(lambda: reader.read(index * step, (index + 1) * step, soon())))

    threads = [threading.Thread(target=read, args=(index,), daemon=True) for index in range(MAX_CONNECTIONS_PER_FORK)]
    with fake_gpu.paused_copies():
        for thread in threads:
            thread.start()
        fake_gpu.wait_until_queued(streams=MAX_CONNECTIONS_PER_FORK)  # all of them copy concurrently
    for thread in threads:
        thread.join()
    reader.close()
    assert [None] * MAX_CONNECTIONS_PER_FORK == raised


def test_a_pin_ends_with_its_lease(fake_gpu: FakeGpu, seed: LocalSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader keeps presenting its latest token and unmaps the memory once the token is refused."""
    monkeypatch.setattr(source_memory, "TOKEN_REFRESH_S", 0.02)
    gate, endpoint = seed
    side, token_checks = CudaIpcTarget(fake_gpu, SIZES), threading.Semaphore(0)
    admit = gate.authorize

    def note(token: str, begin: int, end: int) -> str:
        token_checks.release()
        return admit(token, begin, end)

    reader = side.connect(endpoint)
    gate.authorize = note  # type: ignore[method-assign]
    assert all(token_checks.acquire(timeout=30) for _ in range(3))
    reader.read(0, side.image_bytes, soon())

    def refuse(token: str, begin: int, end: int) -> str:
        raise LeaseRejected("the lease has expired")

    gate.authorize = refuse  # type: ignore[method-assign]
    assert reader._released.wait(30)  # type: ignore[attr-defined]
    with pytest.raises(LeaseRejected):
        reader.read(0, side.image_bytes, soon())
    assert 0 == opened_allocations(fake_gpu)


def test_pins_of_silent_readers_end(seed: LocalSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that stops presenting a token is disconnected; a fork gets only a few pins."""
    monkeypatch.setattr(exporter, "IDLE_TIMEOUT_S", 0.3)
    _, endpoint = seed
    pins = []
    for connections, connection in open_pins(endpoint, 1):
        with pytest.raises(SourceUnavailable):
            connection.receive(soon())
        pins.append(connections)
    assert 1 == len(pins)
