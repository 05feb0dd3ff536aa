"""cuda_ipc sources that send wrong data about their memory, or report that they are busy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

import pytest

from rfork.errors import SourceBusy, SourceCorrupt, TransportUnavailable
from rfork.image.memory import Segment
from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import exporter
from rfork.transport.cuda_ipc.driver import HANDLE_TYPES, HandleType, IpcDriver
from rfork.transport.same_host.client import ConnectionPool
from rfork.transport.same_host.connection import Message, UnixSocketConnection
from rfork.transport.same_host.server import LocalServer
from tests.fake_libcuda.fake_gpu import FakeGpu, OpenFailure
from tests.fake_libcuda.images import device_image, patterns
from tests.integration.cuda_ipc.harness import (
    ONE_TENSOR,
    SIZES,
    CudaIpcTarget,
    LocalSource,
    MakeRemoteSource,
    local_source,
    opened_allocations,
)
from tests.integration.cuda_ipc_node import FencedGate
from tests.transport_contract import TOKEN, soon


class MalformedSource:
    """A source whose responses the test defines."""

    def __init__(self, segments: Sequence[Segment], replies: Mapping[str, Message]) -> None:
        self._replies = replies
        self._server = LocalServer("malformed", None, self._serve, nice=0)
        parameters = {**self._server.parameters, "devices": IpcDriver().uuid(0)}
        self.endpoint = Endpoint("cuda_ipc", parameters, tuple(segments))

    def _serve(self, connection: UnixSocketConnection) -> None:
        while True:
            request, _ = connection.receive(soon())
            operation = str(request["operation"])
            descriptors = [0] if operation == "pin" else []
            connection.send(self._replies.get(operation, {"pinned": 1}), descriptors, deadline=soon())

    def close(self) -> None:
        self._server.close()


MALFORMED_REPLIES: Mapping[str, Mapping[str, Message]] = {
    "no-table": {"allocations": {"count": 1}},
    "an-endless-table": {"allocations": {"allocations": [[1, 1, 0, 0]], "count": 1 << 40}},
    "an-empty-page": {"allocations": {"allocations": [], "count": 5}},
    "words-in-the-table": {"allocations": {"allocations": [["a", 1, 0, 0]], "count": 1}},
    "no-such-device": {"allocations": {"allocations": [[1, 1, 3, 0]], "count": 1}},
    "areas-over-one-another": {"allocations": {"allocations": [[10, 10, 0, 0], [15, 10, 0, 0]], "count": 2}},
    "no-handles": {"handles": {}},
    "a-short-handle": {"handles": {"handles": ["00"]}},
    "a-handle-that-is-none": {"handles": {"handles": ["xyz"]}},
}


def table(base: int, size: int, handle_type: HandleType = "legacy") -> Message:
    """Return a table of one allocation."""
    return {"allocations": [[base, size, 0, HANDLE_TYPES.index(handle_type)]], "count": 1}


@pytest.mark.parametrize("malformed_reply", MALFORMED_REPLIES.values(), ids=MALFORMED_REPLIES)
def test_a_malformed_allocation_table_is_corrupt(fake_gpu: FakeGpu, malformed_reply: Mapping[str, Message]) -> None:
    """A malformed table or handle is the source's fault, detected before any copy."""
    side = CudaIpcTarget(fake_gpu, ONE_TENSOR)
    (segment,) = side.image.segments(0, side.image_bytes)
    replies: Mapping[str, Message] = {"allocations": table(segment.address, segment.length), **malformed_reply}
    with closing(MalformedSource([segment], replies)) as source, pytest.raises(SourceCorrupt):
        side.connect(source.endpoint)


@pytest.mark.parametrize("lent", [{"granted": 2 << 20}, {"granted": 0}, {"granted": -1}, {}], ids=str)
def test_a_loan_of_other_bytes(fake_gpu: FakeGpu, lent: Message) -> None:
    """A loan of more bytes than requested, or of none, is rejected."""
    fake_gpu.set_handle_types(OpenFailure.FABRIC)
    image, driver = device_image(fake_gpu, ONE_TENSOR, filled=True, kind="expandable"), IpcDriver()
    segments = image.segments(0, image.layout.image_bytes)
    allocation = driver.allocation(0, segments[0].address)
    replies: Mapping[str, Message] = {
        "allocations": table(allocation.base, allocation.size, allocation.handle_type),
        "handles": {"handles": [driver.export(allocation).data.hex()]},
        "acquire": lent,
    }
    side = CudaIpcTarget(fake_gpu, ONE_TENSOR)
    with (
        closing(MalformedSource(segments, replies)) as source,
        closing(side.connect(source.endpoint)) as reader,
        pytest.raises(SourceCorrupt),
    ):
        reader.read(0, side.image_bytes, soon())
    assert bytes(side.image_bytes) == side.content


def test_a_smaller_allocation_than_promised(fake_gpu: FakeGpu, remote_source: MakeRemoteSource) -> None:
    """An allocation smaller than promised is not opened: a copy out of it could crash."""
    endpoint = remote_source(ONE_TENSOR)
    request: Message = {"operation": "handles", "token": TOKEN, "allocations": [0]}
    with (
        closing(ConnectionPool(endpoint.parameters, 10.0)) as connections,
        connections.lease(soon()) as connection,
    ):
        handles, _ = connection.exchange(request, soon())
    (segment,) = endpoint.segments
    replies: Mapping[str, Message] = {"allocations": table(segment.address, 4 * segment.length), "handles": handles}
    with (
        closing(MalformedSource([segment], replies)) as source,
        pytest.raises(TransportUnavailable, match="1048576 bytes, not 4194304"),
    ):
        CudaIpcTarget(fake_gpu, ONE_TENSOR).connect(source.endpoint)
    assert 0 == opened_allocations(fake_gpu)


def test_a_loan_without_its_bytes_of_host_memory(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is too short for the bytes in host memory is the source's fault."""
    side = CudaIpcTarget(fake_gpu, SIZES)
    with local_source(fake_gpu, SIZES, FencedGate(), on_host=[1]) as endpoint:
        monkeypatch.setattr(exporter, "host_ranges", lambda allocations, segments: [(3, 4)])
        with closing(side.connect(endpoint)) as reader, pytest.raises(SourceCorrupt, match="end of a memory file"):
            reader.read(0, side.image_bytes, soon())


def test_a_busy_source_keeps_its_reader(fake_gpu: FakeGpu, seed: LocalSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal ends one read; the next permitted read succeeds on the same reader."""
    gate, endpoint = seed
    side = CudaIpcTarget(fake_gpu, SIZES)

    def busy(token: str, begin: int, end: int) -> str:
        raise SourceBusy("not verified here yet")

    with closing(side.connect(endpoint)) as reader:
        with monkeypatch.context() as patch:
            patch.setattr(gate, "authorize", busy)
            with pytest.raises(SourceBusy):
                reader.read(0, side.image_bytes, soon())
        reader.read(0, side.image_bytes, soon())
    assert patterns(SIZES) == side.content
