"""cuda_ipc sources that send wrong data about their memory, or report that they are busy."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rfork.errors import SourceBusy, SourceCorrupt, TransportUnavailable
from rfork.image.memory import Image
from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import CudaIpcTransport, exporter
from rfork.transport.same_host.connection import Message, UnixSocketConnection
from rfork.transport.same_host.server import LocalServer
from tests.fake_cuda import FakeDriver, FakeMemory, fake_device_image
from tests.integration.cuda_ipc.harness import ONE_TENSOR, SETTINGS, SIZES, CudaIpcTarget, expected
from tests.integration.cuda_ipc_node import FencedGate
from tests.transport_contract import content, soon


class MalformedSource:
    """A source whose responses the test defines."""

    def __init__(self, image: Image, replies: Mapping[str, Message]) -> None:
        self._replies = replies
        self._server = LocalServer("liar", None, self._serve, nice=0)
        parameters = {**self._server.parameters, "devices": "gpu-0"}
        segments = tuple(image.segments(0, image.layout.image_bytes))
        self.endpoint = Endpoint("cuda_ipc", parameters, segments)

    def _serve(self, connection: UnixSocketConnection) -> None:
        while True:
            request, _ = connection.receive(soon())
            operation = str(request["operation"])
            descriptors = [0] if operation == "pin" else []
            connection.send(self._replies.get(operation, {"pinned": 1}), descriptors, deadline=soon())

    def close(self) -> None:
        self._server.close()


ALLOCATION_BYTES = 1 << 20
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


@pytest.mark.parametrize("malformed_reply", MALFORMED_REPLIES.values(), ids=MALFORMED_REPLIES)
def test_a_malformed_allocation_table_is_corrupt(malformed_reply: Mapping[str, Message]) -> None:
    """A malformed table or handle is the source's fault, detected before any copy."""
    memory = FakeMemory()
    image = fake_device_image(memory, ONE_TENSOR)
    base = memory.blocks[0].allocation.base
    honest: Mapping[str, Message] = {"allocations": {"allocations": [[base, ALLOCATION_BYTES, 0, 0]], "count": 1}}
    malformed_source = MalformedSource(image, {**honest, **malformed_reply})
    with pytest.raises(SourceCorrupt):
        CudaIpcTarget(ONE_TENSOR).connect(malformed_source.endpoint)
    malformed_source.close()


@pytest.mark.parametrize("lent", [{"granted": 2 << 20}, {"granted": 0}, {"granted": -1}, {}], ids=str)
def test_a_loan_of_other_bytes(lent: Message) -> None:
    """A loan of more bytes than requested, or of none, is rejected."""
    memory = FakeMemory()
    image = fake_device_image(memory, ONE_TENSOR, filled=True)
    block = memory.blocks[0]
    name = FakeDriver(memory).export(block.allocation).data.hex()
    replies: Mapping[str, Message] = {
        "allocations": {"allocations": [[block.allocation.base, ALLOCATION_BYTES, 0, 0]], "count": 1},
        "handles": {"handles": [name]},
        "acquire": lent,
    }
    malformed_source, side = MalformedSource(image, replies), CudaIpcTarget(ONE_TENSOR)
    reader = side.connect(malformed_source.endpoint)
    with pytest.raises(SourceCorrupt):
        reader.read(0, side.image_bytes, soon())
    reader.close()
    malformed_source.close()
    assert bytes(side.image_bytes) == content(side.image)


def test_a_smaller_allocation_than_promised() -> None:
    """An allocation smaller than promised is not opened: a copy out of it could crash."""
    memory = FakeMemory()
    image = fake_device_image(memory, ONE_TENSOR, filled=True)
    block = memory.blocks[0]
    name = FakeDriver(memory).export(block.allocation).data.hex()
    replies: Mapping[str, Message] = {
        "allocations": {"allocations": [[block.allocation.base, 4 * ALLOCATION_BYTES, 0, 0]], "count": 1},
        "handles": {"handles": [name]},
    }
    malformed_source, side = MalformedSource(image, replies), CudaIpcTarget(ONE_TENSOR)
    with pytest.raises(TransportUnavailable):
        side.connect(malformed_source.endpoint)
    malformed_source.close()
    assert [] == side.driver.opened


def test_a_loan_without_its_bytes_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is too short for the bytes in host memory is the source's fault."""
    memory, gate = FakeMemory(), FencedGate()
    image = fake_device_image(memory, SIZES, on_host=[1], filled=True)
    exported = CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, gate)
    monkeypatch.setattr(exporter, "host_ranges", lambda allocations, segments: [(3, 4)])
    side = CudaIpcTarget(SIZES)
    reader = side.connect(exported.endpoint())
    with pytest.raises(SourceCorrupt, match="end of a memory file"):
        reader.read(0, side.image_bytes, soon())
    reader.close()
    exported.close()


def test_a_busy_source_keeps_its_reader(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A refusal ends one read; the next permitted read succeeds on the same reader."""
    gate, endpoint, _ = seed
    side = CudaIpcTarget(SIZES)
    reader = side.connect(endpoint)
    admit, refused = gate.authorize, [True]

    def busy(token: str, begin: int, end: int) -> str:
        if refused.pop():
            raise SourceBusy("not verified here yet")
        refused.append(False)
        return admit(token, begin, end)

    gate.authorize = busy  # type: ignore[method-assign]
    with pytest.raises(SourceBusy):
        reader.read(0, side.image_bytes, soon())
    refused.append(False)
    reader.read(0, side.image_bytes, soon())
    reader.close()
    assert expected(SIZES) == content(side.image)
