"""Reads of several slices over cuda_ipc: one exchange releases a slice and requests the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from rfork.errors import LeaseRejected, RforkError, SourceBusy, SourceCorrupt, SourceUnavailable, SourceWeightsChanged
from rfork.transport.cuda_ipc import protocol
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.connection import Message, UnixSocketConnection
from tests.fake_libcuda.fake_gpu import FakeGpu
from tests.fake_libcuda.images import patterns
from tests.integration.cuda_ipc.harness import CudaIpcTarget, LocalSource, local_source
from tests.integration.cuda_ipc_node import FencedGate
from tests.transport_contract import TOKEN, soon

SLICE_BYTES = 1 << 16
FOUR_SLICES = [4 * SLICE_BYTES]
OnSend = Callable[[UnixSocketConnection, Message], None]


@pytest.fixture
def source(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSource]:
    """A source of four slices, with a gate that tests control."""
    monkeypatch.setattr(protocol, "SLICE_BYTES", SLICE_BYTES)
    gate = FencedGate()
    with local_source(fake_gpu, FOUR_SLICES, gate) as endpoint:
        yield gate, endpoint


def observe_sends(monkeypatch: pytest.MonkeyPatch, on_send: OnSend) -> None:
    """Call `on_send` before each message of either side."""
    send = UnixSocketConnection.send

    def observed(
        connection: UnixSocketConnection, message: Message, descriptors: Sequence[int] = (), *, deadline: float
    ) -> None:
        on_send(connection, message)
        send(connection, message, descriptors, deadline=deadline)

    monkeypatch.setattr(UnixSocketConnection, "send", observed)


def test_a_read_of_n_slices_takes_n_plus_1_exchanges(
    fake_gpu: FakeGpu, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request after the first one also releases the previous slice."""
    side = CudaIpcTarget(fake_gpu, FOUR_SLICES)
    operations: list[tuple[object, object]] = []

    def note(_: UnixSocketConnection, message: Message) -> None:
        if message.get("operation") in ("acquire", "release"):
            operations.append((message["operation"], message.get("release")))

    reader = side.connect(source[1])
    observe_sends(monkeypatch, note)
    reader.read(0, side.image_bytes, soon())
    reader.close()
    assert [("acquire", 0), *[("acquire", 1)] * 3, ("release", None)] == operations
    assert patterns(FOUR_SLICES) == side.content


def test_a_gibibyte_takes_five_exchanges() -> None:
    """The size of a slice bounds how often a read involves the source's interpreter."""
    assert 5 == (1 << 30) // protocol.SLICE_BYTES + 1


def test_each_slice_counts_once_against_the_egress_budget(fake_gpu: FakeGpu, source: LocalSource) -> None:
    """Also under a rate limit, where the source grants less than was requested."""
    side = CudaIpcTarget(fake_gpu, FOUR_SLICES)
    gate, endpoint = source
    gate.max_bytes = SLICE_BYTES // 3
    reader = side.connect(endpoint)
    reader.read(0, side.image_bytes, soon())
    reader.close()
    assert side.image_bytes == gate.granted
    assert patterns(FOUR_SLICES) == side.content


REFUSALS = [SourceWeightsChanged("updated"), LeaseRejected("the lease has expired"), SourceBusy("suspended")]


def refuse(gate: FencedGate, error: RforkError) -> None:
    """Let the gate refuse every further range."""

    def authorize(token: str, begin: int, end: int) -> str:
        raise type(error)(str(error))  # each keeps its own traceback, and so the image

    gate.authorize = authorize  # type: ignore[method-assign]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.kind)
def test_a_refused_slice_confirms_the_release_of_the_previous_one(source: LocalSource, error: RforkError) -> None:
    """Its bytes count, no read is left that a fence would wait for, and the connection remains usable."""
    gate, endpoint = source
    admit = gate.authorize
    acquire: Message = {"operation": "acquire", "token": TOKEN, "begin": 0, "end": 100}
    connections = ConnectionPool(endpoint.parameters, 10.0)
    with connections.lease(soon()) as connection:
        assert {"released": 0, "granted": 100} == connection.exchange(acquire, soon())[0]
        refuse(gate, error)
        connection.send({**acquire, "release": 1}, deadline=soon())
        reply, _ = connection.receive(soon())
        assert 1 == reply["released"]
        assert error.kind == reply["error"]
        assert 0 == gate.inflight_reads.drain(0)
        gate.authorize = admit  # type: ignore[method-assign]
        assert {"released": 0, "granted": 100} == connection.exchange(acquire, soon())[0]
    connections.close()


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.kind)
def test_a_refusal_between_two_slices_ends_the_read(
    fake_gpu: FakeGpu, source: LocalSource, monkeypatch: pytest.MonkeyPatch, error: RforkError
) -> None:
    """The reader raises the source's reason and works again once it is admitted."""
    side = CudaIpcTarget(fake_gpu, FOUR_SLICES)
    gate, endpoint = source
    admit = gate.authorize

    def refuse_second(_: UnixSocketConnection, message: Message) -> None:
        if message.get("release") == 1:
            refuse(gate, error)

    reader = side.connect(endpoint)
    with monkeypatch.context() as observed:
        observe_sends(observed, refuse_second)
        with pytest.raises(type(error)):
            reader.read(0, side.image_bytes, soon())
    gate.authorize = admit  # type: ignore[method-assign]
    reader.read(0, side.image_bytes, soon())
    reader.close()
    assert patterns(FOUR_SLICES) == side.content


def lose_replies(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Close the connection instead of confirming a release, this many times."""
    left = [None] * count

    def lose(connection: UnixSocketConnection, message: Message) -> None:
        if "granted" in message and message["released"] == 1 and left:
            left.pop()
            connection.abort()

    observe_sends(monkeypatch, lose)


def test_a_slice_whose_release_is_not_confirmed_is_read_again(
    fake_gpu: FakeGpu, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is replaced once; the source may have died and freed the memory while it was copied."""
    side = CudaIpcTarget(fake_gpu, FOUR_SLICES)
    gate, endpoint = source
    reader = side.connect(endpoint)
    lose_replies(monkeypatch, 1)
    reader.read(0, side.image_bytes, soon())
    reader.close()
    assert side.image_bytes + 2 * SLICE_BYTES == gate.granted
    assert 5 == fake_gpu.completed_copies
    assert patterns(FOUR_SLICES) == side.content


def test_a_connection_lost_twice_at_one_slice_ends_the_read(
    fake_gpu: FakeGpu, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is then unavailable."""
    side = CudaIpcTarget(fake_gpu, FOUR_SLICES)
    reader = side.connect(source[1])
    lose_replies(monkeypatch, 2)
    with pytest.raises(SourceUnavailable):
        reader.read(0, side.image_bytes, soon())
    reader.close()


def test_a_connection_lost_at_two_slices_is_replaced_twice(
    fake_gpu: FakeGpu, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress in between shows that the source works."""
    side = CudaIpcTarget(fake_gpu, FOUR_SLICES)
    lost: set[object] = set()

    def lose_once_per_slice(connection: UnixSocketConnection, message: Message) -> None:
        if message.get("release") == 1 and message["begin"] not in lost:
            lost.add(message["begin"])
            connection.abort()

    reader = side.connect(source[1])
    observe_sends(monkeypatch, lose_once_per_slice)
    reader.read(0, side.image_bytes, soon())
    reader.close()
    assert 3 == len(lost)
    assert patterns(FOUR_SLICES) == side.content


def test_an_unconfirmed_release_is_corrupt(
    fake_gpu: FakeGpu, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grant without the confirmation does not prove that the previous bytes were unchanged."""
    side = CudaIpcTarget(fake_gpu, FOUR_SLICES)

    def omit(_: UnixSocketConnection, message: Message) -> None:
        if "granted" in message and isinstance(message, dict):
            message.pop("released")

    reader = side.connect(source[1])
    observe_sends(monkeypatch, omit)
    with pytest.raises(SourceCorrupt, match="did not confirm"):
        reader.read(0, side.image_bytes, soon())
    reader.close()


@pytest.mark.parametrize("releases", [(1,), (0, 0)], ids=["nothing to release", "no release"])
def test_a_request_that_does_not_match_the_granted_range_is_rejected(
    source: LocalSource, releases: Sequence[int]
) -> None:
    """A connection has at most one granted range."""
    connections = ConnectionPool(source[1].parameters, 10.0)
    with connections.lease(soon()) as connection:
        for release in releases:
            request: Message = {"operation": "acquire", "token": TOKEN, "begin": 0, "end": 100, "release": release}
            connection.send(request, deadline=soon())
        for release in releases[1:]:
            assert {"released": release, "granted": 100} == connection.receive(soon())[0]
        with pytest.raises(SourceUnavailable):
            connection.receive(soon())
    connections.close()


def test_few_bytes_of_host_memory_are_granted_at_once(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source copies them into a file while a fence waits; a range with few of them is not divided."""
    monkeypatch.setattr(protocol, "HOST_SLICE_BYTES", 10_000)
    sizes = [5_000, 50_000, 30_000, 50_000]
    granted: list[int] = []
    side, gate = CudaIpcTarget(fake_gpu, sizes), FencedGate()
    acquire_bytes = gate.acquire_bytes

    def note(max_bytes: int, fork_id: str) -> int:
        granted.append(max_bytes)
        return acquire_bytes(max_bytes, fork_id)

    gate.acquire_bytes = note  # type: ignore[method-assign]
    with local_source(fake_gpu, sizes, gate, on_host=[0, 2]) as endpoint:
        reader = side.connect(endpoint)
        reader.read(0, 55_000, soon())
        reader.read(55_000, side.image_bytes, soon())
        reader.close()
    assert [55_000, 10_000, 10_000, 60_000] == granted
    assert patterns(sizes) == side.content
