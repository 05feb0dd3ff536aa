"""Sources over cuda_ipc that lie about their memory, or say that they are busy."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rfork.errors import SourceBusy, SourceCorrupt, TransportUnusable
from rfork.image.memory import Image
from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import CudaIpcTransport, exporter
from rfork.transport.same_host.connection import Connection
from rfork.transport.same_host.messages import Message
from rfork.transport.same_host.server import LocalServer
from tests.fake_cuda import FakeDriver, FakeMemory, image_in
from tests.integration.cuda_ipc.sides import ONE, SETTINGS, SIZES, Side, expected
from tests.integration.cuda_ipc_node import FencedGate
from tests.transport_contract import content, soon


class Liar:
    """A source that answers each question as the test wants it."""

    def __init__(self, image: Image, answers: Mapping[str, Message]) -> None:
        self._answers = answers
        self._server = LocalServer("liar", None, self._serve, nice=0)
        parameters = {**self._server.parameters, "devices": "gpu-0"}
        segments = tuple(image.segments(0, image.layout.image_bytes))
        self.endpoint = Endpoint("cuda_ipc", parameters, segments)

    def _serve(self, connection: Connection) -> None:
        while True:
            question, _ = connection.receive(soon())
            asked = str(question["ask"])
            beside = [0] if asked == "hold" else []
            connection.send(self._answers.get(asked, {"held": 1}), beside, deadline=soon())

    def close(self) -> None:
        self._server.close()


AREA = 1 << 20
LIES: Mapping[str, Mapping[str, Message]] = {
    "no-table": {"areas": {"count": 1}},
    "an-endless-table": {"areas": {"areas": [[1, 1, 0, 0]], "count": 1 << 40}},
    "an-empty-page": {"areas": {"areas": [], "count": 5}},
    "words-in-the-table": {"areas": {"areas": [["a", 1, 0, 0]], "count": 1}},
    "no-such-device": {"areas": {"areas": [[1, 1, 3, 0]], "count": 1}},
    "areas-over-one-another": {"areas": {"areas": [[10, 10, 0, 0], [15, 10, 0, 0]], "count": 2}},
    "no-handles": {"handles": {}},
    "a-short-handle": {"handles": {"handles": ["00"]}},
    "a-handle-that-is-none": {"handles": {"handles": ["xyz"]}},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_source_that_lies_is_corrupt(lie: Mapping[str, Message]) -> None:
    """What is no table, or no handle, of allocations is the source's fault, and found before any copy."""
    memory = FakeMemory()
    image = image_in(memory, ONE)
    base = memory.blocks[0].allocation.base
    honest: Mapping[str, Message] = {"areas": {"areas": [[base, AREA, 0, 0]], "count": 1}}
    liar = Liar(image, {**honest, **lie})
    with pytest.raises(SourceCorrupt):
        Side(ONE).connect(liar.endpoint)
    liar.close()


@pytest.mark.parametrize("lent", [{"lent": 2 << 20}, {"lent": 0}, {"lent": -1}, {}], ids=str)
def test_a_loan_of_other_bytes(lent: Message) -> None:
    """More bytes than were asked for, or none, are no loan."""
    memory = FakeMemory()
    image = image_in(memory, ONE, filled=True)
    block = memory.blocks[0]
    name = FakeDriver(memory).export(block.allocation).data.hex()
    answers: Mapping[str, Message] = {
        "areas": {"areas": [[block.allocation.base, AREA, 0, 0]], "count": 1},
        "handles": {"handles": [name]},
        "borrow": lent,
    }
    liar, side = Liar(image, answers), Side(ONE)
    reader = side.connect(liar.endpoint)
    with pytest.raises(SourceCorrupt):
        reader.read(0, side.whole, soon())
    reader.close()
    liar.close()
    assert bytes(side.whole) == content(side.image)


def test_a_smaller_allocation_than_promised() -> None:
    """An allocation with fewer bytes than promised is not opened: a copy out of it could crash."""
    memory = FakeMemory()
    image = image_in(memory, ONE, filled=True)
    block = memory.blocks[0]
    name = FakeDriver(memory).export(block.allocation).data.hex()
    answers: Mapping[str, Message] = {
        "areas": {"areas": [[block.allocation.base, 4 * AREA, 0, 0]], "count": 1},
        "handles": {"handles": [name]},
    }
    liar, side = Liar(image, answers), Side(ONE)
    with pytest.raises(TransportUnusable):
        side.connect(liar.endpoint)
    liar.close()
    assert [] == side.driver.opened


def test_a_loan_without_its_bytes_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is too short for the bytes in host memory is the source's fault."""
    memory, gate = FakeMemory(), FencedGate()
    image = image_in(memory, SIZES, on_host=[1], filled=True)
    exported = CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, gate)
    monkeypatch.setattr(exporter, "host_ranges", lambda areas, segments: [(3, 4)])
    side = Side(SIZES)
    reader = side.connect(exported.endpoint())
    with pytest.raises(SourceCorrupt, match="fewer bytes"):
        reader.read(0, side.whole, soon())
    reader.close()
    exported.close()


def test_a_busy_source_keeps_its_reader(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A refusal ends one read, and the next one that is allowed succeeds on the same reader."""
    gate, endpoint, _ = seed
    side = Side(SIZES)
    reader = side.connect(endpoint)
    admit, refused = gate.admit, [True]

    def busy(token: str, begin: int, end: int) -> str:
        if refused.pop():
            raise SourceBusy("not verified here yet")
        refused.append(False)
        return admit(token, begin, end)

    gate.admit = busy  # type: ignore[method-assign]
    with pytest.raises(SourceBusy):
        reader.read(0, side.whole, soon())
    refused.append(False)
    reader.read(0, side.whole, soon())
    reader.close()
    assert expected(SIZES) == content(side.image)
