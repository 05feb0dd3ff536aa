"""transfer_engine over TCP between hosts with addresses of their own: who holds no channel reaches nothing.

Mooncake itself lets everybody in, so these tests show what its ports do to strangers and, the other way
round, that the attacks work from a host that was let in.
"""

from __future__ import annotations

import contextlib
import ctypes
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pytest

from benchmarks import netlab
from benchmarks.netlab import Lab
from rfork.transport.transfer_engine.library import library_state
from tests.integration.bad_peer_node import (
    PATIENCE_S,
    Facts,
    Lease,
    Node,
    pattern,
    start_node,
    takes_connections,
)

STATE = library_state()
WHY_NOT = f"mooncake cannot be used: {STATE.error}" if STATE.error else netlab.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "all is there")

SIZE = 8 << 20
CLONE_NEWNET = 0x40000000
READ, WRITE = 0, 1
Result = TypeVar("Result")


@dataclass
class Scene:
    """A seed and a reader on hosts of their own, and a third host, `stranger`."""

    lab: Lab
    seed: Node
    reader: Node
    address: str
    layout_id: str
    memory: int
    engine: list[int]
    """The ports of the seed's engine: all it has but that of the peer service."""

    def open(self, fork_id: str = "fork-1", lives_s: float = 600.0) -> Facts:
        """Have the reader take a place."""
        return self.reader.ask(
            "open",
            address=self.address,
            layout_id=self.layout_id,
            token=Lease(self.layout_id, fork_id, lives_s).token,
            size=SIZE,
            transport="transfer_engine",
        )

    def fork(self) -> tuple[Facts, Facts, Facts]:
        """Have the reader open a channel, read everything and close it; what it said."""
        return self.open(), self.reader.ask("read"), self.reader.ask("close")

    def at(self, host: str, do: Callable[[], Result]) -> Result:
        """Do something with the network of a host: sockets stay in the one they were made in."""
        return in_namespace(self.lab.namespace(host), do)

    def reached(self, host: str) -> list[int]:
        """The ports of the seed's engine that take a connection from this host."""
        there = self.lab.address("seed")
        return self.at(host, lambda: [port for port in self.engine if takes_connections(there, port, 0.5)])

    def connected(self, host: str) -> list[socket.socket]:
        """A connection from this host to each port of the seed's engine."""
        there = self.lab.address("seed")
        return self.at(host, lambda: [socket.create_connection((there, port), 5.0) for port in self.engine])

    def send(self, host: str, message: bytes, answer: int = 0, within_s: float = 0.3) -> bytes:
        """Send this to both ports of the seed's engine; up to so many bytes that came back in time."""
        there = self.lab.address("seed")
        return self.at(host, lambda: exchange(there, self.engine, message, answer, within_s))

    def read(self, expected: bytes) -> bytes:
        """What the reader's host reads at the start of the weights, as soon as it is that."""
        until = time.monotonic() + PATIENCE_S
        while True:
            size = len(expected)
            got = self.send("reader", request(READ, self.memory, size), size, PATIENCE_S)
            if got == expected or time.monotonic() > until:
                return got


def exchange(host: str, ports: list[int], message: bytes, most: int, within_s: float) -> bytes:
    """Send a message on a connection to each port; up to `most` bytes that came in that time."""
    received, until = b"", time.monotonic() + within_s
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as answering:
        for port in ports:
            with contextlib.suppress(OSError):
                connection = stack.enter_context(socket.create_connection((host, port), timeout=within_s))
                connection.sendall(message)
                answering.register(connection, selectors.EVENT_READ, connection)
        while len(received) < most and answering.get_map():
            ready = answering.select(max(0.0, until - time.monotonic()))
            for key, _ in ready:
                part = b""
                with contextlib.suppress(OSError):
                    part = key.data.recv(most - len(received))
                received += part
                if not part:
                    answering.unregister(key.fileobj)
            if not ready:
                break
    return received


def in_namespace(name: str, do: Callable[[], Result]) -> Result:
    """Call `do` on a thread that is in a network namespace."""
    done: list[Result] = []
    failed: list[OSError] = []

    def run() -> None:
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                failed.append(OSError(ctypes.get_errno(), "setns"))
                return
        try:
            done.append(do())
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One seed for all tests: it has to live on."""
    folder = tmp_path_factory.mktemp("nodes")
    with Lab(["seed", "reader", "stranger"]) as lab, contextlib.ExitStack() as nodes:
        made = []
        for name in ("seed", "reader"):
            environment = {
                "RFORK_BIND": lab.address(name),
                "RFORK_UNGUARDED_TCP": "1",
                "RFORK_TRANSPORTS": "transfer_engine",
                "RFORK_STALL_S": "5",
                "BAD_PEER_BYTES": str(SIZE),
            }
            made.append(start_node(partial(lab.start, name), folder, name, name, **environment))
            nodes.callback(made[-1].close)
        seed, reader = made
        facts = seed.ask("facts")
        memory = facts["memory"]
        assert isinstance(memory, list)
        address = str(facts["address"])
        engine = sorted(seed.ports() - {int(address.rpartition(":")[2])})
        yield Scene(lab, seed, reader, address, str(facts["layout_id"]), memory[0], engine)


def request(operation: int, address: int, length: int) -> bytes:
    """The head of a transfer on Mooncake's data port."""
    return struct.pack("<QQB7x", length, address, operation)


FORKED: tuple[Facts, Facts, Facts] = ({"channel": "open"}, {"right": 1}, {})
MALFORMED = [
    b"\x03[]",
    b'\x01{"name": []}',
    b'\x00{"local_nic_path": {}, "peer_nic_path": [1]}',
    b'\x02{"name": {}}',
    b"\x01" + b"[" * 100_000,
    b"\x00" + b'{"a":' * 100_000,
]


def test_a_stranger_reaches_no_port_of_the_engine(scene: Scene) -> None:
    """While a reader reads, another host connects to neither port, and the reader's own to both."""
    scene.open()
    reached = scene.reached("stranger"), scene.reached("reader")
    right = scene.reader.ask("read")
    scene.reader.ask("close")
    assert (([], scene.engine), {"right": 1}) == (reached, right)


def test_the_targets_engine_is_reached_by_nobody(scene: Scene) -> None:
    """It listens too, but over TCP not even the source has to reach it."""
    scene.open()
    there, ports = scene.lab.address("reader"), sorted(scene.reader.ports())
    reached = {
        host: scene.at(host, lambda: [port for port in ports if takes_connections(there, port, 0.5)])
        for host in ("seed", "stranger", "reader")
    }
    scene.reader.ask("close")
    assert (2, {"seed": [], "stranger": [], "reader": []}) == (len(ports), reached)


def test_malformed_handshakes_of_a_stranger_kill_nobody(scene: Scene) -> None:
    """Messages that end a process which reads them do not get to the seed."""
    scene.open()
    for body in MALFORMED:
        scene.send("stranger", struct.pack("<Q", len(body)) + body, 1)
    right = scene.reader.ask("read")
    scene.reader.ask("close")
    assert ({"right": 1}, None, FORKED) == (right, scene.seed.process.poll(), scene.fork())


def test_idle_connections_of_a_stranger_delay_nobody(scene: Scene) -> None:
    """The engine would wait five seconds for each of them before it answers the next reader."""
    there = scene.lab.address("seed")

    def begin() -> list[socket.socket]:
        sockets = [socket.socket() for _ in range(2) for _ in scene.engine]
        for number, idle in enumerate(sockets):
            idle.setblocking(False)
            idle.connect_ex((there, scene.engine[number % len(scene.engine)]))
        return sockets

    with contextlib.ExitStack() as idle:
        for connection in scene.at("stranger", begin):
            idle.enter_context(connection)
        assert FORKED == scene.fork()


def test_a_stranger_reads_and_writes_nothing(scene: Scene) -> None:
    """A bare request to the data port gets no byte, and changes none."""
    scene.open()
    got = scene.send("stranger", request(READ, scene.memory, 64), 64)
    scene.send("stranger", request(WRITE, scene.memory, 64) + b"\xff" * 64)
    right = scene.reader.ask("read")
    scene.reader.ask("close")
    assert (b"", {"right": 1}) == (got, right)


def test_a_host_that_was_let_in_reads_and_writes(scene: Scene) -> None:
    """What is left: any process of the reader's host gets at the weights as long as a channel is open."""
    scene.open()
    whole = bytes(pattern(4).tolist())
    before = scene.read(whole)
    scene.send("reader", request(WRITE, scene.memory, 4) + b"evil")
    changed = scene.read(b"evil")
    scene.send("reader", request(WRITE, scene.memory, 4) + before)
    scene.read(before)
    right = scene.reader.ask("read")
    scene.reader.ask("close")
    assert (whole, b"evil", {"right": 1}) == (before, changed, right)


def test_a_reader_whose_channel_ended_is_out(scene: Scene) -> None:
    """Its connections are cut, and it gets no new ones."""
    before = scene.reached("reader")
    scene.open()
    held = scene.connected("reader")
    scene.reader.ask("close")
    cut = [hung_up(connection) for connection in held]
    assert ([], [True, True], []) == (before, cut, scene.reached("reader"))


def test_a_reader_whose_lease_ended_is_out(scene: Scene) -> None:
    """Nobody has to ask: the channel ends with the lease, and the way in with the channel."""
    scene.open("fork-2", lives_s=8.0)
    held = scene.connected("reader")
    ended = scene.reader.ask("wait_end")
    cut = [hung_up(connection) for connection in held]
    read = scene.reader.ask("read")
    scene.reader.ask("close")
    assert ({"ended": 1}, [True, True], []) == (ended, cut, scene.reached("reader"))
    assert "error" in read


def hung_up(connection: socket.socket) -> bool:
    """Whether the other side ends this connection."""
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
