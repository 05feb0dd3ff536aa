"""The cuda_ipc transport while one of two processes dies, is stopped, or closes."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from rfork.errors import RforkError, SourceTimeout, SourceUnavailable, SourceWeightsChanged
from rfork.settings import InstanceSettings
from rfork.transport.base import Reader
from rfork.transport.cuda_ipc import CudaIpcTransport, exporter
from rfork.transport.cuda_ipc import reader as reader_module
from rfork.transport.cuda_ipc.exporter import CudaIpcExporter
from tests.fake_cuda import FakeDriver, FakeMemory, fake_device_image
from tests.integration.cuda_ipc.harness import (
    ONE_TENSOR,
    SETTINGS,
    SIZES,
    CudaIpcProcess,
    CudaIpcTarget,
    MakeRemoteSource,
    expected,
    raised_by,
)
from tests.integration.cuda_ipc_node import FencedGate, endpoint_from_json, endpoint_to_json
from tests.processes import send
from tests.transport_contract import content, soon

StartNode = Callable[..., CudaIpcProcess]


@pytest.fixture
def start() -> Iterator[StartNode]:
    """Starts processes and kills them after the test."""
    started: list[CudaIpcProcess] = []

    def start(side: str, sizes: Sequence[int], **more: object) -> CudaIpcProcess:
        arguments = {
            "side": side,
            "sizes": list(sizes),
            "on_host": [],
            "kind": "legacy",
            "align": 512,
            **more,
        }
        started.append(CudaIpcProcess(arguments))
        return started[-1]

    yield start
    for node in started:
        node.end()


def existing_driver(driver: FakeDriver) -> FakeDriver:
    """Return a driver factory that returns the existing driver."""
    return driver


def start_blocked_read(side: CudaIpcTarget, reader: Reader) -> tuple[threading.Thread, list[RforkError | None]]:
    """Start a thread that reads everything with its copies blocked; return the error it ends with."""
    side.driver.running.clear()
    raised: list[RforkError | None] = []
    thread = threading.Thread(
        target=lambda: raised.append(raised_by(lambda: reader.read(0, side.image_bytes, soon()))), daemon=True
    )
    thread.start()
    assert side.driver.queued.wait(30)
    return thread, raised


def test_a_killed_source_is_unavailable(start: StartNode) -> None:
    """Reads from a killed source raise SourceUnavailable, and all of its memory is unmapped."""
    source, side = start("source", SIZES), CudaIpcTarget(SIZES)
    reader = side.connect(endpoint_from_json(source.read_message()))
    source.process.kill()
    source.process.wait()
    with pytest.raises(SourceUnavailable):
        reader.read(0, side.image_bytes, soon())
    reader.close()
    assert [] == side.driver.opened


def test_a_source_that_dies_while_bytes_are_lent(start: StartNode) -> None:
    """Copies out of its memory count only if the source outlived them: it may have freed the memory."""
    source, side = start("source", ONE_TENSOR), CudaIpcTarget(ONE_TENSOR)
    reader = side.connect(endpoint_from_json(source.read_message()))
    thread, raised = start_blocked_read(side, reader)
    send(source.process, signal.SIGSTOP)
    side.driver.running.set()
    # A stopped source accepts the return, as a dying one does.
    thread.join(0.5)
    source.process.kill()
    thread.join()
    reader.close()
    assert [SourceUnavailable] == [type(error) for error in raised]


def test_a_stopped_source_stalls(start: StartNode) -> None:
    """A stopped source is given up after the response timeout."""
    source, side = (
        start("source", SIZES),
        CudaIpcTarget(SIZES, settings=InstanceSettings(source_idle_timeout_s=3.0)),
    )
    reader = side.connect(endpoint_from_json(source.read_message()))
    send(source.process, signal.SIGSTOP)
    with pytest.raises(SourceTimeout):
        reader.read(0, side.image_bytes, soon())
    reader.close()
    assert [] == side.driver.opened


def test_a_fence_does_not_wait_for_a_slow_copy(start: StartNode) -> None:
    """A read whose weights change meanwhile raises SourceWeightsChanged although its copy finished."""
    source, side = start("source", ONE_TENSOR), CudaIpcTarget(ONE_TENSOR)
    reader = side.connect(endpoint_from_json(source.read_message()))
    thread, raised = start_blocked_read(side, reader)
    source.send_line("fence")
    assert {"aborted": 1} == source.read_message()
    side.driver.running.set()
    thread.join()
    reader.close()
    assert [SourceWeightsChanged] == [type(error) for error in raised]


def test_a_closing_source_waits_until_its_memory_is_unmapped(start: StartNode) -> None:
    """`close` returns once the idle reader has unmapped everything it had opened."""
    source, side = start("source", SIZES), CudaIpcTarget(SIZES)
    reader = side.connect(endpoint_from_json(source.read_message()))
    reader.read(0, side.image_bytes, soon())
    source.send_line("close")
    assert {"closed": 1} == source.read_message()
    assert [] == side.driver.opened
    with pytest.raises(SourceUnavailable):
        reader.read(0, side.image_bytes, soon())
    reader.close()


def test_a_stopped_reader_blocks_no_one_else(start: StartNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader stopped during a copy is aborted by a fence, or otherwise after the response timeout.

    A closing source does not wait for it forever.
    """
    monkeypatch.setattr(exporter, "RELEASE_TIMEOUT_S", 0.1)
    target = start("target", ONE_TENSOR)
    gates: list[FencedGate] = []
    sources: list[CudaIpcExporter] = []
    for settings in (SETTINGS, InstanceSettings(source_idle_timeout_s=1.0)):
        memory = FakeMemory()
        gates.append(FencedGate())
        image, driver = fake_device_image(memory, ONE_TENSOR, filled=True), FakeDriver(memory)
        sources.append(CudaIpcTransport(settings, partial(existing_driver, driver)).export(image, gates[-1]))
        target.send_line(json.dumps(endpoint_to_json(sources[-1].endpoint())))
        assert {"reading": 1} == target.read_message()
    send(target.process, signal.SIGSTOP)
    assert 1 == gates[0].fence(0.05)
    assert 0 == gates[1].inflight_reads.drain(30)
    for source in sources:
        source.close()


class LateClock:
    """Clock for `copying`: once it is `late`, every deadline has passed."""

    def __init__(self) -> None:
        self.late, self.seen = threading.Event(), threading.Event()
        self.sleep = time.sleep

    def monotonic(self) -> float:
        """Return seconds."""
        if not self.late.is_set():
            return time.monotonic()
        self.seen.set()
        return time.monotonic() + 3600


def test_a_deadline_that_passes_during_a_copy(remote_source: MakeRemoteSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read raises only once the copy has finished, and the reader still works."""
    clock = LateClock()
    monkeypatch.setattr(reader_module, "time", clock)
    side = CudaIpcTarget(ONE_TENSOR)
    reader = side.connect(remote_source(ONE_TENSOR))
    thread, raised = start_blocked_read(side, reader)
    clock.late.set()
    assert clock.seen.wait(30)
    thread.join(0.3)
    assert thread.is_alive()
    side.driver.running.set()
    thread.join()
    assert [SourceTimeout] == [type(error) for error in raised]
    clock.late.clear()
    reader.read(0, side.image_bytes, soon())
    assert expected(ONE_TENSOR) == content(side.image)
    reader.close()


def test_closing_a_reader_during_a_copy(remote_source: MakeRemoteSource) -> None:
    """Nothing is unmapped before the running copy has finished."""
    side = CudaIpcTarget(ONE_TENSOR)
    reader = side.connect(remote_source(ONE_TENSOR))
    side.driver.running.clear()
    raised: list[RforkError | None] = []
    reading = threading.Thread(
        target=lambda: raised.append(raised_by(lambda: reader.read(0, side.image_bytes, soon()))), daemon=True
    )
    reading.start()
    assert side.driver.queued.wait(30)
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    assert reader._broken.wait(30)  # type: ignore[attr-defined]
    closing.join(0.1)
    assert closing.is_alive()
    assert 1 == len(side.driver.opened)
    side.driver.running.set()
    reading.join()
    closing.join()
    assert [SourceUnavailable] == [type(error) for error in raised]
    assert [] == side.driver.violations
    assert [] == side.driver.opened
