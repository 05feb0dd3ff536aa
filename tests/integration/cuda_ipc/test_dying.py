"""The cuda_ipc transport while one of two processes dies, stands still, or closes."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from rfork.errors import RforkError, SourceChanged, SourceGone, SourceStalled
from rfork.settings import Settings
from rfork.transport.base import Reader
from rfork.transport.cuda_ipc import CudaIpcTransport, copying, exporter
from rfork.transport.cuda_ipc.exporter import CudaIpcExporter
from tests.fake_cuda import FakeDriver, FakeMemory, image_in
from tests.integration.cuda_ipc.sides import ONE, SETTINGS, SIZES, Elsewhere, Node, Side, expected, raised_by
from tests.integration.cuda_ipc_node import FencedGate, endpoint_in, told
from tests.processes import send
from tests.transport_contract import content, soon

StartNode = Callable[..., Node]


@pytest.fixture
def start() -> Iterator[StartNode]:
    """Starts processes, which are killed after the test."""
    started: list[Node] = []

    def start(side: str, sizes: Sequence[int], **more: object) -> Node:
        wanted = {"side": side, "sizes": list(sizes), "on_host": [], "kind": "legacy", "align": 512, **more}
        started.append(Node(wanted))
        return started[-1]

    yield start
    for node in started:
        node.end()


def same(driver: FakeDriver) -> FakeDriver:
    """To make a driver that is there already."""
    return driver


def held_copy(side: Side, reader: Reader) -> tuple[threading.Thread, list[RforkError | None]]:
    """A thread that reads all, its copies queued and not let run; what it raised, in the end."""
    side.driver.running.clear()
    raised: list[RforkError | None] = []
    thread = threading.Thread(
        target=lambda: raised.append(raised_by(lambda: reader.read(0, side.whole, soon()))), daemon=True
    )
    thread.start()
    assert side.driver.queued.wait(30)
    return thread, raised


def test_a_killed_source_is_gone(start: StartNode) -> None:
    """Reads from a source that was killed raise SourceGone, and all of its memory is let go."""
    source, side = start("source", SIZES), Side(SIZES)
    reader = side.connect(endpoint_in(source.hear()))
    source.process.kill()
    source.process.wait()
    with pytest.raises(SourceGone):
        reader.read(0, side.whole, soon())
    reader.close()
    assert [] == side.driver.opened


def test_a_source_that_dies_while_bytes_are_lent(start: StartNode) -> None:
    """Copies out of its memory count only if it lived until they had ended: it may have freed the memory."""
    source, side = start("source", ONE), Side(ONE)
    reader = side.connect(endpoint_in(source.hear()))
    thread, raised = held_copy(side, reader)
    send(source.process, signal.SIGSTOP)
    side.driver.running.set()
    # A source that stands still takes the return in, as one does that is dying.
    thread.join(0.5)
    source.process.kill()
    thread.join()
    reader.close()
    assert [SourceGone] == [type(error) for error in raised]


def test_a_stopped_source_stalls(start: StartNode) -> None:
    """A source that stands still is given up after the time that an answer may take."""
    source, side = start("source", SIZES), Side(SIZES, settings=Settings(stall_s=3.0))
    reader = side.connect(endpoint_in(source.hear()))
    send(source.process, signal.SIGSTOP)
    with pytest.raises(SourceStalled):
        reader.read(0, side.whole, soon())
    reader.close()
    assert [] == side.driver.opened


def test_a_fence_does_not_wait_for_a_slow_copy(start: StartNode) -> None:
    """A read whose weights change meanwhile raises SourceChanged, though its copy was made."""
    source, side = start("source", ONE), Side(ONE)
    reader = side.connect(endpoint_in(source.hear()))
    thread, raised = held_copy(side, reader)
    source.tell("fence")
    assert {"cut": 1} == source.hear()
    side.driver.running.set()
    thread.join()
    reader.close()
    assert [SourceChanged] == [type(error) for error in raised]


def test_a_closing_source_waits_until_its_memory_is_let_go(start: StartNode) -> None:
    """`close` returns once the reader, though it reads nothing, has unmapped what it had opened."""
    source, side = start("source", SIZES), Side(SIZES)
    reader = side.connect(endpoint_in(source.hear()))
    reader.read(0, side.whole, soon())
    source.tell("close")
    assert {"closed": 1} == source.hear()
    assert [] == side.driver.opened
    with pytest.raises(SourceGone):
        reader.read(0, side.whole, soon())
    reader.close()


def test_a_reader_that_stands_still_holds_up_nobody(
    start: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in mid-copy it is cut by a fence, and without one when an answer may take no longer.

    A closing source does not wait for it for ever.
    """
    monkeypatch.setattr(exporter, "LET_GO_S", 0.1)
    target = start("target", ONE)
    gates: list[FencedGate] = []
    sources: list[CudaIpcExporter] = []
    for settings in (SETTINGS, Settings(stall_s=1.0)):
        memory = FakeMemory()
        gates.append(FencedGate())
        image, driver = image_in(memory, ONE, filled=True), FakeDriver(memory)
        sources.append(CudaIpcTransport(settings, partial(same, driver)).export(image, gates[-1]))
        target.tell(json.dumps(told(sources[-1].endpoint())))
        assert {"reading": 1} == target.hear()
    send(target.process, signal.SIGSTOP)
    assert (1, 0) == (gates[0].fence(0.05), gates[1].readings.settle(30))
    for source in sources:
        source.close()


class LateClock:
    """The time, as `copying` looks at it: once it is `late`, every deadline has passed."""

    def __init__(self) -> None:
        self.late, self.seen = threading.Event(), threading.Event()
        self.sleep = time.sleep

    def monotonic(self) -> float:
        """Seconds."""
        if not self.late.is_set():
            return time.monotonic()
        self.seen.set()
        return time.monotonic() + 3600


def test_a_deadline_that_passes_during_a_copy(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read raises only once the copy has ended, and the reader goes on after that."""
    clock = LateClock()
    monkeypatch.setattr(copying, "time", clock)
    side = Side(ONE)
    reader = side.connect(elsewhere(ONE))
    thread, raised = held_copy(side, reader)
    clock.late.set()
    assert clock.seen.wait(30)
    thread.join(0.3)
    assert thread.is_alive()
    side.driver.running.set()
    thread.join()
    assert [SourceStalled] == [type(error) for error in raised]
    clock.late.clear()
    reader.read(0, side.whole, soon())
    assert expected(ONE) == content(side.image)
    reader.close()


def test_closing_a_reader_in_mid_copy(elsewhere: Elsewhere) -> None:
    """Nothing is unmapped before the copy under way has ended."""
    side = Side(ONE)
    reader = side.connect(elsewhere(ONE))
    side.driver.running.clear()
    raised: list[RforkError | None] = []
    reading = threading.Thread(
        target=lambda: raised.append(raised_by(lambda: reader.read(0, side.whole, soon()))), daemon=True
    )
    reading.start()
    assert side.driver.queued.wait(30)
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    assert reader._broken.wait(30)  # type: ignore[attr-defined]
    closing.join(0.1)
    assert (True, 1) == (closing.is_alive(), len(side.driver.opened))
    side.driver.running.set()
    reading.join()
    closing.join()
    assert [SourceGone] == [type(error) for error in raised]
    assert ([], []) == (side.driver.wrong, side.driver.opened)
