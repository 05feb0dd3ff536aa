"""The cuda_ipc transport between real processes, over GPUs of shared memory: contract and faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rfork.errors import (
    LeaseRefused,
    NoPeerAccess,
    NotOneHost,
    RforkError,
    SourceBusy,
    SourceChanged,
    SourceCorrupt,
    SourceGone,
    SourceStalled,
    TargetError,
    TransportUnusable,
)
from rfork.image.memory import Image
from rfork.settings import Settings
from rfork.transport.base import Endpoint, Reader
from rfork.transport.cuda_ipc import CudaIpcTransport, exporter
from rfork.transport.cuda_ipc import holding as holding_module
from rfork.transport.cuda_ipc.driver import Kind
from rfork.transport.cuda_ipc.exporter import CudaIpcExporter
from rfork.transport.same_host.connection import Connection, close_all
from rfork.transport.same_host.dialling import Connections
from rfork.transport.same_host.messages import Message
from rfork.transport.same_host.server import MOST_OF_A_FORK, LocalServer
from tests.fake_cuda import INVALID_CONTEXT, FakeDriver, FakeMemory, image_in
from tests.integration.cuda_ipc_node import FencedGate, endpoint_in, told
from tests.transport_contract import CONTRACT, MIXED, TOKEN, FakeGate, Pair, content, soon

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings()
SIZES = [3, 4096, 1 << 20, 17, *([8191] * 50), (5 << 20) + 5, 1]
ONE = [1 << 20]

Check = Callable[[Pair], None]


class Node:
    """A process of `tests.integration.cuda_ipc_node`."""

    def __init__(self, wanted: Mapping[str, object]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.cuda_ipc_node", json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def hear(self) -> dict[str, object]:
        """The next thing that it says has happened."""
        if self.process.stdout is None:
            raise ChildProcessError("no pipe")
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError("the process has ended")
        message = json.loads(line)
        return message if isinstance(message, dict) else {}

    def tell(self, line: str) -> None:
        """Send it a line."""
        if self.process.stdin is None:
            raise ChildProcessError("no pipe")
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


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


Elsewhere = Callable[..., Endpoint]


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


class Side:
    """A target in this process."""

    def __init__(self, sizes: Sequence[int], *, settings: Settings = SETTINGS, **more: int) -> None:
        self.memory = FakeMemory()
        self.driver = FakeDriver(self.memory)
        self.image = image_in(self.memory, sizes, **more)  # type: ignore[arg-type]
        self.transport = CudaIpcTransport(settings, lambda: self.driver)

    def connect(self, endpoint: Endpoint, token: str = TOKEN) -> Reader:
        return self.transport.connect(endpoint, self.image, lambda: token, soon())

    @property
    def whole(self) -> int:
        return self.image.layout.image_bytes


def expected(sizes: Sequence[int]) -> bytes:
    """The bytes that every source of these sizes has."""
    return content(image_in(FakeMemory(), sizes, filled=True))


def same(driver: FakeDriver) -> FakeDriver:
    """To make a driver that is there already."""
    return driver


def raised_by(call: Callable[[], None]) -> RforkError | None:
    """The error that a call ends with."""
    try:
        call()
    except RforkError as error:
        return error
    return None


# -- the contract of every transport ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["legacy", pytest.param("descriptor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_contract(check: Check, kind: Kind) -> None:
    """What every transport promises holds between two GPUs, for both kinds of memory."""
    memory, gate = FakeMemory(), FakeGate()
    driver = FakeDriver(memory)
    transport = CudaIpcTransport(SETTINGS, lambda: driver)
    # Two tensors are in host memory at the source, and one of them and another one here.
    source = image_in(memory, MIXED, on_host=[1, 900], filled=True, kind=kind)
    target = image_in(memory, MIXED, on_host=[1, 800], kind=kind)
    pair = Pair(transport, gate, source, target, transport.export(source, gate))
    try:
        check(pair)
    finally:
        pair.close()
    assert ([], []) == (driver.wrong, driver.opened)


# -- two processes --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["legacy", "descriptor"])
@pytest.mark.parametrize("on_host", [[], [0, 3, 4, 20]], ids=["all-on-gpus", "some-in-host-memory"])
def test_every_byte_arrives(elsewhere: Elsewhere, kind: str, on_host: list[int]) -> None:
    """A target in another process has the source's bytes, whatever kind of memory they lie in."""
    side = Side(SIZES)
    reader = side.connect(elsewhere(SIZES, kind=kind, on_host=on_host))
    reader.read(0, side.whole, soon())
    reader.close()
    assert expected(SIZES) == content(side.image)
    assert ([], []) == (side.driver.wrong, side.driver.opened)


def test_small_tensors_that_lie_side_by_side_are_few_copies(elsewhere: Elsewhere) -> None:
    """Five thousand tensors whose sizes fill their places take as many copies as they have allocations."""
    sizes = [512] * 5000
    side = Side(sizes)
    reader = side.connect(elsewhere(sizes))
    reader.read(0, side.whole, soon())
    reader.close()
    assert expected(sizes) == content(side.image)
    assert len(side.memory.blocks) == len(side.driver.copied)


def test_two_allocators_need_not_agree(elsewhere: Elsewhere) -> None:
    """Tensors that lie otherwise here than there, over other allocations, arrive in their places."""
    side = Side(SIZES, align=64, block=1 << 16)
    reader = side.connect(elsewhere(SIZES, align=4096))
    for begin in range(0, side.whole, 700_001):
        reader.read(begin, min(begin + 700_001, side.whole), soon())
    reader.close()
    assert expected(SIZES) == content(side.image)


def test_each_allocation_is_opened_once(elsewhere: Elsewhere) -> None:
    """Reading a range again opens nothing anew; what was never read is never opened, but for one to see."""
    sizes = [1 << 20] * 4
    side = Side(sizes)
    reader = side.connect(elsewhere(sizes))
    assert 1 == len(side.driver.opened)
    for _ in range(2):
        reader.read(2 << 20, 3 << 20, soon())
    assert 2 == len(side.driver.opened)
    reader.close()


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
    side.driver.running.clear()
    raised: list[RforkError | None] = []
    thread = threading.Thread(
        target=lambda: raised.append(raised_by(lambda: reader.read(0, side.whole, soon()))), daemon=True
    )
    thread.start()
    assert side.driver.queued.wait(30)
    source.process.send_signal(signal.SIGSTOP)
    side.driver.running.set()
    # A source that stands still takes the return in, as one does that is dying.
    thread.join(0.5)
    source.process.kill()
    thread.join()
    reader.close()
    assert [SourceGone] == [type(error) for error in raised]


def test_a_stopped_source_stalls(start: StartNode) -> None:
    """A source that stands still is given up after the time that an answer may take."""
    source, side = start("source", SIZES), Side(SIZES, settings=Settings(stall_s=0.3))
    reader = side.connect(endpoint_in(source.hear()))
    source.process.send_signal(signal.SIGSTOP)
    with pytest.raises(SourceStalled):
        reader.read(0, side.whole, soon())
    reader.close()
    assert [] == side.driver.opened


def test_a_fence_does_not_wait_for_a_slow_copy(start: StartNode) -> None:
    """A read whose weights change meanwhile raises SourceChanged, though its copy was made."""
    source, side = start("source", ONE), Side(ONE)
    reader = side.connect(endpoint_in(source.hear()))
    side.driver.running.clear()
    raised: list[RforkError | None] = []
    thread = threading.Thread(
        target=lambda: raised.append(raised_by(lambda: reader.read(0, side.whole, soon()))), daemon=True
    )
    thread.start()
    assert side.driver.queued.wait(30)
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
    for settings in (SETTINGS, Settings(stall_s=0.3)):
        memory = FakeMemory()
        gates.append(FencedGate())
        image, driver = image_in(memory, ONE, filled=True), FakeDriver(memory)
        sources.append(CudaIpcTransport(settings, partial(same, driver)).export(image, gates[-1]))
        target.tell(json.dumps(told(sources[-1].endpoint())))
        assert {"reading": 1} == target.hear()
    target.process.send_signal(signal.SIGSTOP)
    assert (1, 0) == (gates[0].fence(0.05), gates[1].readings.settle(30))
    for source in sources:
        source.close()


def test_a_deadline_that_passes_during_a_copy(elsewhere: Elsewhere) -> None:
    """The read raises only once the copy has ended, and the reader goes on after that."""
    side = Side(ONE)
    reader = side.connect(elsewhere(ONE))
    side.driver.running.clear()
    raised: list[RforkError | None] = []
    thread = threading.Thread(
        target=lambda: raised.append(raised_by(lambda: reader.read(0, side.whole, soon(0.3)))), daemon=True
    )
    thread.start()
    assert side.driver.queued.wait(30)
    thread.join(0.6)
    assert thread.is_alive()
    side.driver.running.set()
    thread.join()
    assert [SourceStalled] == [type(error) for error in raised]
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
    closing.join(0.1)
    assert (True, 1) == (closing.is_alive(), len(side.driver.opened))
    side.driver.running.set()
    reading.join()
    closing.join()
    assert [SourceGone] == [type(error) for error in raised]
    assert ([], []) == (side.driver.wrong, side.driver.opened)


# -- what a lease is worth --------------------------------------------------------------------------


@pytest.fixture
def seed() -> Iterator[tuple[FencedGate, Endpoint, FakeDriver]]:
    """A source in this process, with a gate that tests turn."""
    memory, gate = FakeMemory(), FencedGate()
    driver = FakeDriver(memory)
    image = image_in(memory, SIZES, filled=True)
    exported = CudaIpcTransport(SETTINGS, lambda: driver).export(image, gate)
    yield gate, exported.endpoint(), driver
    exported.close()


def test_no_handle_without_a_lease(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A forged token brings no handle of any allocation, and no byte."""
    _, endpoint, driver = seed
    side = Side(SIZES)
    reader = side.connect(endpoint, token="forged")
    with pytest.raises(LeaseRefused):
        reader.read(0, side.whole, soon())
    reader.close()
    assert ([], bytes(side.whole)) == (driver.exports, content(side.image))


def test_every_byte_is_metered(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A source that gives little at a time lends little at a time, and counts it all."""
    gate, endpoint, _ = seed
    gate.most = 100_000
    side = Side(SIZES)
    reader = side.connect(endpoint)
    reader.read(0, side.whole, soon())
    reader.close()
    assert (expected(SIZES), side.whole) == (content(side.image), gate.granted)


def test_names_of_allocations_are_made_once(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """Two readers that read everything cost one handle for each allocation."""
    _, endpoint, driver = seed
    for _ in range(2):
        side = Side(SIZES)
        reader = side.connect(endpoint)
        reader.read(0, side.whole, soon())
        reader.close()
    assert len(driver.memory.blocks) == len(driver.exports)


BAD_QUESTIONS: Sequence[Message] = (
    {},
    {"ask": "borrow"},
    {"ask": "borrow", "token": TOKEN, "begin": -1, "end": 5},
    {"ask": "borrow", "token": TOKEN, "begin": 5, "end": 5},
    {"ask": "borrow", "token": TOKEN, "begin": 0, "end": 1 << 70},
    {"ask": "borrow", "token": TOKEN, "begin": "0", "end": [1]},
    {"ask": "handles", "token": TOKEN, "areas": [-1]},
    {"ask": "handles", "token": TOKEN, "areas": [1 << 70]},
    {"ask": "handles", "token": TOKEN, "areas": [0] * 1000},
    {"ask": "areas", "token": TOKEN, "from": "first"},
    {"ask": "areas", "token": 7, "from": 0},
    {"ask": "everything", "token": TOKEN},
)


@pytest.mark.parametrize("question", BAD_QUESTIONS, ids=str)
def test_bad_questions_harm_nobody(seed: tuple[FencedGate, Endpoint, FakeDriver], question: Message) -> None:
    """A reader that asks nonsense loses its connection; the next one is served."""
    _, endpoint, _ = seed
    connections = Connections(endpoint.parameters, 10.0)
    with connections.borrowed(soon()) as connection:
        connection.send(question, deadline=soon())
        with pytest.raises(SourceGone):
            connection.receive(soon())
    connections.close()
    side = Side(SIZES)
    reader = side.connect(endpoint)
    reader.read(0, side.whole, soon())
    reader.close()
    assert expected(SIZES) == content(side.image)


def test_a_negative_start_is_the_first_page(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """Pages of the table begin where they are asked for, and nowhere before it."""
    _, endpoint, _ = seed
    connections = Connections(endpoint.parameters, 10.0)
    pages: list[Message] = []
    with connections.borrowed(soon()) as connection:
        for first in (-5, 0):
            connection.send({"ask": "areas", "token": TOKEN, "from": first}, deadline=soon())
            pages.append(connection.receive(soon())[0])
    connections.close()
    assert pages[0] == pages[1]


def holding(endpoint: Endpoint, count: int) -> Iterator[tuple[Connections, Connection]]:
    """Connections that hold on to a source by themselves."""
    for _ in range(count):
        connections = Connections(endpoint.parameters, 10.0)
        with connections.borrowed(soon()) as connection:
            connection.send({"ask": "hold", "token": TOKEN}, deadline=soon())
            answer, descriptors = connection.receive(soon())
            close_all(descriptors)
            if "held" in answer:
                yield connections, connection
        connections.close()


def test_as_many_reads_as_places(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A fork's hold takes none of its places: 64 reads at once all go on."""
    _, endpoint, _ = seed
    side = Side(SIZES)
    reader = side.connect(endpoint)
    side.driver.running.clear()
    step = side.whole // MOST_OF_A_FORK
    raised: list[RforkError | None] = []

    def read(index: int) -> None:
        raised.append(raised_by(lambda: reader.read(index * step, (index + 1) * step, soon())))

    threads = [threading.Thread(target=read, args=(index,), daemon=True) for index in range(MOST_OF_A_FORK)]
    for thread in threads:
        thread.start()
    # All of them copy at once.
    assert all(side.driver.streams.acquire(timeout=30) for _ in range(MOST_OF_A_FORK))
    side.driver.running.set()
    for thread in threads:
        thread.join()
    reader.close()
    assert [None] * MOST_OF_A_FORK == raised


def test_a_hold_ends_with_its_lease(
    seed: tuple[FencedGate, Endpoint, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader shows its newest token again and again, and lets go once that is refused."""
    monkeypatch.setattr(holding_module, "SHOW_S", 0.02)
    gate, endpoint, _ = seed
    side, shown = Side(SIZES), threading.Semaphore(0)
    admit = gate.admit

    def note(token: str, begin: int, end: int) -> str:
        shown.release()
        return admit(token, begin, end)

    reader = side.connect(endpoint)
    gate.admit = note  # type: ignore[method-assign]
    assert all(shown.acquire(timeout=30) for _ in range(3))
    reader.read(0, side.whole, soon())

    def refuse(token: str, begin: int, end: int) -> str:
        raise LeaseRefused("the lease is over")

    gate.admit = refuse  # type: ignore[method-assign]
    assert reader._down.wait(30)  # type: ignore[attr-defined]
    with pytest.raises(LeaseRefused):
        reader.read(0, side.whole, soon())
    assert [] == side.driver.opened


def test_holds_of_the_silent_end(
    seed: tuple[FencedGate, Endpoint, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who shows no token any more is put out; and a fork has a few holds, whatever it asks for."""
    monkeypatch.setattr(exporter, "IDLE_S", 0.3)
    _, endpoint, _ = seed
    held = []
    for connections, connection in holding(endpoint, 1):
        with pytest.raises(SourceGone):
            connection.receive(soon())
        held.append(connections)
    assert 1 == len(held)


def test_memory_of_two_kinds(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """One of each is tried when the transport is chosen; what is refused later is the source's failure."""
    memory, gate = FakeMemory(), FencedGate()
    image = image_in(memory, [1 << 20] * 4, filled=True)
    memory.blocks = [
        replace(block, allocation=replace(block.allocation, kind="descriptor" if index < 2 else "legacy"))
        for index, block in enumerate(memory.blocks)
    ]
    exported = CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, gate)
    side = Side([1 << 20] * 4)
    side.driver.refuses, side.driver.refused_kinds = INVALID_CONTEXT, ("legacy",)
    with pytest.raises(TransportUnusable, match="invalid device context"):
        side.connect(exported.endpoint())
    side.driver.refuses = None
    reader = side.connect(exported.endpoint())
    side.driver.refuses = INVALID_CONTEXT
    with pytest.raises(SourceGone, match="invalid device context"):
        reader.read(0, side.whole, soon())
    reader.close()
    exported.close()


def test_what_is_lent_of_host_memory_is_taken_back() -> None:
    """A reader that keeps the file of a loan keeps no memory of the source."""
    memory, gate = FakeMemory(), FencedGate()
    image = image_in(memory, SIZES, on_host=[1], filled=True)
    exported = CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, gate)
    connections = Connections(exported.endpoint().parameters, 10.0)
    with connections.borrowed(soon()) as connection:
        connection.send({"ask": "borrow", "token": TOKEN, "begin": 0, "end": 4000}, deadline=soon())
        _, (file,) = connection.receive(soon())
        lent = os.fstat(file).st_size
        connection.send({"ask": "return"}, deadline=soon())
        connection.receive(soon())
    left = os.fstat(file).st_size
    os.close(file)
    connections.close()
    exported.close()
    assert (3997, 0) == (lent, left)


# -- between which processes it works -----------------------------------------------------------------


def test_another_host(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A source that another kernel runs is on no shared host."""
    _, endpoint, _ = seed
    elsewhere = replace(endpoint, parameters={**endpoint.parameters, "boot": "another"})
    with pytest.raises(NotOneHost):
        Side(SIZES).connect(elsewhere)


def test_another_process_namespace(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A handle that is refused between two PID namespaces says so, and what to share."""
    _, endpoint, _ = seed
    side = Side(SIZES)
    side.driver.refuses = INVALID_CONTEXT
    apart = replace(endpoint, parameters={**endpoint.parameters, "processes": "pid:[1]"})
    with pytest.raises(NotOneHost, match="another PID namespace") as caught:
        side.connect(apart)
    apart = replace(endpoint, parameters={**endpoint.parameters, "ipc": "ipc:[1]"})
    with pytest.raises(NotOneHost, match="another IPC namespace"):
        side.connect(apart)
    assert all(word in caught.value.hint for word in ("hostPID", "--pid", "expandable_segments"))


def test_no_peer_access(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """Two GPUs that cannot address one another are told apart before any handle is asked for."""
    _, endpoint, driver = seed
    side = Side(SIZES)
    side.driver.uuids, side.driver.peers = ("gpu-1", "gpu-0"), False
    with pytest.raises(NoPeerAccess, match="gpu-0"):
        side.connect(endpoint)
    assert [] == driver.exports


def test_a_hidden_gpu_may_still_be_read(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A GPU that CUDA_VISIBLE_DEVICES hides is tried: its memory can be opened all the same."""
    _, endpoint, _ = seed
    side = Side(SIZES)
    side.driver.uuids = ("gpu-1",)
    reader = side.connect(endpoint)
    reader.read(0, side.whole, soon())
    reader.close()
    assert expected(SIZES) == content(side.image)


def test_a_gpu_that_the_container_was_not_given(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """Where a hidden GPU's memory cannot be opened, the hint names the variables that hide it."""
    _, endpoint, _ = seed
    side = Side(SIZES)
    side.driver.uuids, side.driver.refuses = ("gpu-1",), 101
    with pytest.raises(TransportUnusable) as caught:
        side.connect(endpoint)
    assert "NVIDIA_VISIBLE_DEVICES" in caught.value.hint


def test_an_image_of_host_memory_is_not_exported() -> None:
    """An image without a byte on a GPU is left to other transports."""
    memory = FakeMemory()
    image = image_in(memory, [100, 200], on_host=[0, 1])
    with pytest.raises(TransportUnusable, match="no byte"):
        CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, FakeGate())


def test_memory_that_cannot_be_shown_is_not_exported() -> None:
    """Memory that its allocator keeps to the process is left to other transports, with what to do."""
    memory = FakeMemory()
    image = image_in(memory, [100, 200], kind="none")
    with pytest.raises(TransportUnusable, match="cannot be shown") as caught:
        CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, FakeGate())
    assert "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC" in caught.value.hint


def test_a_target_in_host_memory(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A target without a GPU takes another transport."""
    _, endpoint, _ = seed
    with pytest.raises(TransportUnusable, match="lies on a GPU"):
        Side([*SIZES], on_host=range(len(SIZES))).connect(endpoint)  # type: ignore[arg-type]


def test_a_device_that_fails(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A copy that the device refuses is this side's failure, and blames no source."""
    _, endpoint, _ = seed
    side = Side(SIZES)
    reader = side.connect(endpoint)
    side.driver.fails = True
    with pytest.raises(TargetError, match="illegal memory access"):
        reader.read(0, side.whole, soon())
    reader.close()


# -- sources that lie ---------------------------------------------------------------------------------


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
