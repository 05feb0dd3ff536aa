"""The cuda_ipc transport while one of two processes dies, is stopped, or closes."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rfork.errors import RforkError, SourceTimeout, SourceUnavailable, SourceWeightsChanged
from rfork.settings import InstanceSettings
from rfork.transport.base import Reader
from rfork.transport.cuda_ipc import exporter
from rfork.transport.cuda_ipc import reader as reader_module
from tests.fake_libcuda.fake_gpu import FakeGpu
from tests.fake_libcuda.images import patterns
from tests.integration.cuda_ipc.harness import (
    ONE_TENSOR,
    SETTINGS,
    SIZES,
    CudaIpcProcess,
    CudaIpcTarget,
    MakeRemoteSource,
    local_source,
    opened_allocations,
    raised_by,
)
from tests.integration.cuda_ipc_node import FencedGate, endpoint_to_json
from tests.processes import send
from tests.transport_contract import soon

StartNode = Callable[[str], CudaIpcProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartNode]:
    """Starts processes and kills them after the test."""
    with ExitStack() as stack:

        def start(side: str) -> CudaIpcProcess:
            process = CudaIpcProcess(side, tmp_path / "log")
            stack.callback(process.end)
            return process

        yield start


class QueuedRead:
    """A thread that reads everything, from when its copies are queued. Started while copies are paused."""

    def __init__(self, gpu: FakeGpu, side: CudaIpcTarget, reader: Reader) -> None:
        self._error: RforkError | None = None

        def read() -> None:
            self._error = raised_by(lambda: reader.read(0, side.image_bytes, soon()))

        self.thread = threading.Thread(target=read, daemon=True)
        self.thread.start()
        gpu.wait_until_queued()

    def error(self) -> type[RforkError] | None:
        """Wait until the read has ended; return the type of the error that it raised."""
        self.thread.join()
        return None if self._error is None else type(self._error)


def test_a_killed_source_is_unavailable(fake_gpu: FakeGpu, start: StartNode) -> None:
    """Reads from a killed source raise SourceUnavailable, and all of its memory is unmapped."""
    source, side = start("sources"), CudaIpcTarget(fake_gpu, SIZES)
    reader = side.connect(source.source(SIZES))
    source.kill()
    with pytest.raises(SourceUnavailable):
        reader.read(0, side.image_bytes, soon())
    reader.close()
    assert 0 == opened_allocations(fake_gpu)


def test_a_source_that_dies_while_bytes_are_lent(fake_gpu: FakeGpu, start: StartNode) -> None:
    """Copies out of its memory count only if the source outlived them: it may have freed the memory."""
    source, side = start("sources"), CudaIpcTarget(fake_gpu, ONE_TENSOR)
    reader = side.connect(source.source(ONE_TENSOR))
    with fake_gpu.paused_copies():
        read = QueuedRead(fake_gpu, side, reader)
        send(source.process, signal.SIGSTOP)
    fake_gpu.wait_until_idle()
    source.kill()
    assert SourceUnavailable is read.error()
    reader.close()


def test_a_stopped_source_stalls(fake_gpu: FakeGpu, start: StartNode) -> None:
    """A stopped source is given up after the response timeout."""
    source = start("sources")
    side = CudaIpcTarget(fake_gpu, SIZES, settings=InstanceSettings(source_idle_timeout_s=3.0))
    reader = side.connect(source.source(SIZES))
    send(source.process, signal.SIGSTOP)
    with pytest.raises(SourceTimeout):
        reader.read(0, side.image_bytes, soon())
    reader.close()
    assert 0 == opened_allocations(fake_gpu)


def test_a_fence_does_not_wait_for_a_slow_copy(fake_gpu: FakeGpu, start: StartNode) -> None:
    """A read whose weights change meanwhile raises SourceWeightsChanged although its copy finished."""
    source, side = start("sources"), CudaIpcTarget(fake_gpu, ONE_TENSOR)
    reader = side.connect(source.source(ONE_TENSOR))
    with fake_gpu.paused_copies():
        read = QueuedRead(fake_gpu, side, reader)
        assert {"aborted": 1} == source.request("fence")
    assert SourceWeightsChanged is read.error()
    reader.close()


def test_a_closing_source_waits_until_its_memory_is_unmapped(fake_gpu: FakeGpu, start: StartNode) -> None:
    """`close` returns once the idle reader has unmapped everything it had opened."""
    source, side = start("sources"), CudaIpcTarget(fake_gpu, SIZES)
    reader = side.connect(source.source(SIZES))
    reader.read(0, side.image_bytes, soon())
    assert {"closed": 1} == source.request("close")
    assert 0 == opened_allocations(fake_gpu)
    with pytest.raises(SourceUnavailable):
        reader.read(0, side.image_bytes, soon())
    reader.close()


def test_a_stopped_reader_blocks_no_one_else(
    fake_gpu: FakeGpu, start: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader stopped during a copy is aborted by a fence, or otherwise after the response timeout.

    A closing source does not wait for it forever.
    """
    monkeypatch.setattr(exporter, "RELEASE_TIMEOUT_S", 0.1)
    target, gates = start("targets"), [FencedGate(), FencedGate()]
    with ExitStack() as stack:
        for gate, settings in zip(gates, (SETTINGS, InstanceSettings(source_idle_timeout_s=1.0)), strict=True):
            source = local_source(fake_gpu, ONE_TENSOR, gate, settings=settings, kind="legacy")
            endpoint = stack.enter_context(source)
            assert {"reading": 1} == target.request(json.dumps(endpoint_to_json(endpoint)))
        send(target.process, signal.SIGSTOP)
        assert 1 == gates[0].fence(0.05)
        assert 0 == gates[1].inflight_reads.drain(30)


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


def test_a_deadline_that_passes_during_a_copy(
    fake_gpu: FakeGpu, remote_source: MakeRemoteSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read raises only once the copy has finished, and the reader still works."""
    clock = LateClock()
    monkeypatch.setattr(reader_module, "time", clock)
    side = CudaIpcTarget(fake_gpu, ONE_TENSOR)
    reader = side.connect(remote_source(ONE_TENSOR))
    with fake_gpu.paused_copies():
        read = QueuedRead(fake_gpu, side, reader)
        clock.late.set()
        assert clock.seen.wait(30)
        read.thread.join(0.3)
        assert read.thread.is_alive()
    assert SourceTimeout is read.error()
    clock.late.clear()
    reader.read(0, side.image_bytes, soon())
    reader.close()
    assert patterns(ONE_TENSOR) == side.content


def test_closing_a_reader_during_a_copy(fake_gpu: FakeGpu, remote_source: MakeRemoteSource) -> None:
    """Nothing is unmapped before the running copy has finished."""
    side = CudaIpcTarget(fake_gpu, ONE_TENSOR)
    reader = side.connect(remote_source(ONE_TENSOR))
    with fake_gpu.paused_copies():
        read = QueuedRead(fake_gpu, side, reader)
        closing = threading.Thread(target=reader.close, daemon=True)
        closing.start()
        assert reader._broken.wait(30)  # type: ignore[attr-defined]
        closing.join(0.1)
        assert closing.is_alive()
        assert 1 == opened_allocations(fake_gpu)
    assert SourceUnavailable is read.error()
    closing.join()
    assert 0 == opened_allocations(fake_gpu)
