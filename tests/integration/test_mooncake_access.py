"""transfer_engine over TCP between hosts with separate addresses: a host without an open channel reaches no
port.

Mooncake itself accepts every connection, so these tests show what unauthenticated clients can do to its ports
and, as a control, that the attacks work from an admitted host.
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
from benchmarks.netlab import NetworkLab
from rfork.transport.mooncake.library import library_state
from tests.integration.bad_peer_node import (
    TIMEOUT_S,
    BadPeerNode,
    Facts,
    ForgedLease,
    accepts_connections,
    pattern,
    start_node,
)

STATE = library_state()
SKIP_REASON = f"mooncake is unavailable: {STATE.error}" if STATE.error else netlab.unavailable_reason()
pytestmark = pytest.mark.skipif(bool(SKIP_REASON), reason=SKIP_REASON or "available")

SIZE = 8 << 20
CLONE_NEWNET = 0x40000000
READ, WRITE = 0, 1
Result = TypeVar("Result")


@dataclass
class MooncakeLab:
    """A seed and a reader on separate hosts, and a third host, `intruder`."""

    lab: NetworkLab
    seed: BadPeerNode
    reader: BadPeerNode
    address: str
    layout_id: str
    memory: int
    engine_ports: list[int]
    """The ports of the seed's engine: all of its ports except the peer service's."""

    def open(self, fork_id: str = "fork-1", lifetime_s: float = 600.0) -> Facts:
        """Make the reader acquire a slot."""
        return self.reader.request(
            "open",
            address=self.address,
            layout_id=self.layout_id,
            token=ForgedLease(self.layout_id, fork_id, lifetime_s).token,
            size=SIZE,
            transport="transfer_engine",
        )

    def fork(self) -> tuple[Facts, Facts, Facts]:
        """Make the reader open a channel, read everything and close it; return its responses."""
        return self.open(), self.reader.request("read"), self.reader.request("close")

    def run_on_host(self, host: str, function: Callable[[], Result]) -> Result:
        """Call a function in a host's network namespace: sockets stay in the namespace in which they were
        created.
        """
        return in_namespace(self.lab.namespace(host), function)

    def reachable_ports(self, host: str) -> list[int]:
        """Return the ports of the seed's engine that accept a connection from this host."""
        there = self.lab.address("seed")
        return self.run_on_host(
            host, lambda: [port for port in self.engine_ports if accepts_connections(there, port, 0.5)]
        )

    def wait_locked_out(self, host: str) -> None:
        """Wait until the host reaches no port: the seed revokes access when it notices that a channel has closed."""
        until = time.monotonic() + TIMEOUT_S
        while reachable := self.reachable_ports(host):
            if time.monotonic() > until:
                raise TimeoutError(f"{host} still reaches the ports {reachable} of the seed's engine")

    def open_connections(self, host: str) -> list[socket.socket]:
        """Connect from this host to each port of the seed's engine."""
        there = self.lab.address("seed")
        return self.run_on_host(
            host, lambda: [socket.create_connection((there, port), 5.0) for port in self.engine_ports]
        )

    def send(self, host: str, message: bytes, max_response_bytes: int = 0, within_s: float = 0.3) -> bytes:
        """Send a message to both ports of the seed's engine; return up to `max_response_bytes` received in
        time.
        """
        there = self.lab.address("seed")
        return self.run_on_host(host, lambda: exchange(there, self.engine_ports, message, max_response_bytes, within_s))

    def read(self, expected: bytes) -> bytes:
        """Read the start of the weights from the reader's host until it is `expected`, and return it."""
        until = time.monotonic() + TIMEOUT_S
        while True:
            size = len(expected)
            got = self.send("reader", request(READ, self.memory, size), size, TIMEOUT_S)
            if got == expected or time.monotonic() > until:
                return got


def exchange(host: str, ports: list[int], message: bytes, max_bytes: int, within_s: float) -> bytes:
    """Send a message on a connection to each port; return up to `max_bytes` bytes received in that time."""
    received, until = b"", time.monotonic() + within_s
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for port in ports:
            with contextlib.suppress(OSError):
                connection = stack.enter_context(socket.create_connection((host, port), timeout=within_s))
                connection.sendall(message)
                selector.register(connection, selectors.EVENT_READ, connection)
        while len(received) < max_bytes and selector.get_map():
            ready = selector.select(max(0.0, until - time.monotonic()))
            for key, _ in ready:
                part = b""
                with contextlib.suppress(OSError):
                    part = key.data.recv(max_bytes - len(received))
                received += part
                if not part:
                    selector.unregister(key.fileobj)
            if not ready:
                break
    return received


def in_namespace(name: str, function: Callable[[], Result]) -> Result:
    """Call `function` on a thread in a network namespace."""
    done: list[Result] = []
    failed: list[OSError] = []

    def run() -> None:
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                failed.append(OSError(ctypes.get_errno(), "setns"))
                return
        try:
            done.append(function())
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


@pytest.fixture(scope="module")
def mooncake_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeLab]:
    """One seed for all tests, which must survive them."""
    folder = tmp_path_factory.mktemp("nodes")
    with NetworkLab(["seed", "reader", "intruder"]) as lab, contextlib.ExitStack() as nodes:
        made = []
        for name in ("seed", "reader"):
            environment = {
                "RFORK_BIND": lab.address(name),
                "RFORK_ALLOW_UNAUTHENTICATED_TCP": "1",
                "RFORK_TRANSPORTS": "transfer_engine",
                "RFORK_SOURCE_IDLE_TIMEOUT_S": "5",
                "BAD_PEER_BYTES": str(SIZE),
            }
            made.append(start_node(partial(lab.start, name), folder, name, name, **environment))
            nodes.callback(made[-1].close)
        seed, reader = made
        facts = seed.request("facts")
        memory = facts["memory"]
        assert isinstance(memory, list)
        address = str(facts["address"])
        engine_ports = sorted(seed.ports() - {int(address.rpartition(":")[2])})
        yield MooncakeLab(lab, seed, reader, address, str(facts["layout_id"]), memory[0], engine_ports)


def request(operation: int, address: int, length: int) -> bytes:
    """Return the header of a transfer on Mooncake's data port."""
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


@pytest.mark.slow  # logic: tests/unit/transport/test_bpf_filter.py
def test_an_unauthenticated_client_reaches_no_port_of_the_engine(mooncake_lab: MooncakeLab) -> None:
    """While a reader reads, another host can connect to neither port, and the reader's host to both."""
    mooncake_lab.open()
    reachable_ports = mooncake_lab.reachable_ports("intruder"), mooncake_lab.reachable_ports("reader")
    right = mooncake_lab.reader.request("read")
    mooncake_lab.reader.request("close")
    assert ([], mooncake_lab.engine_ports) == reachable_ports
    assert {"right": 1} == right


def test_the_targets_engine_is_unreachable(mooncake_lab: MooncakeLab) -> None:
    """It listens too, but over TCP not even the source needs to reach it."""
    mooncake_lab.open()
    there, ports = mooncake_lab.lab.address("reader"), sorted(mooncake_lab.reader.ports())
    reachable_ports = {
        host: mooncake_lab.run_on_host(host, lambda: [port for port in ports if accepts_connections(there, port, 0.5)])
        for host in ("seed", "intruder", "reader")
    }
    mooncake_lab.reader.request("close")
    assert 2 == len(ports)
    assert {"seed": [], "intruder": [], "reader": []} == reachable_ports


def test_malformed_handshakes_of_unauthenticated_clients_are_harmless(mooncake_lab: MooncakeLab) -> None:
    """Messages that crash a process that reads them do not reach the seed."""
    mooncake_lab.open()
    for body in MALFORMED:
        mooncake_lab.send("intruder", struct.pack("<Q", len(body)) + body, 1)
    right = mooncake_lab.reader.request("read")
    mooncake_lab.reader.request("close")
    assert {"right": 1} == right
    assert mooncake_lab.seed.process.poll() is None
    assert FORKED == mooncake_lab.fork()


def test_idle_connections_of_unauthenticated_clients_delay_no_reader(mooncake_lab: MooncakeLab) -> None:
    """The engine would wait five seconds for each of them before it serves the next reader."""
    there = mooncake_lab.lab.address("seed")

    def begin() -> list[socket.socket]:
        sockets = [socket.socket() for _ in range(2) for _ in mooncake_lab.engine_ports]
        for number, idle in enumerate(sockets):
            idle.setblocking(False)
            idle.connect_ex((there, mooncake_lab.engine_ports[number % len(mooncake_lab.engine_ports)]))
        return sockets

    with contextlib.ExitStack() as idle:
        for connection in mooncake_lab.run_on_host("intruder", begin):
            idle.enter_context(connection)
        assert FORKED == mooncake_lab.fork()


def test_an_unauthenticated_client_cannot_read_or_write(mooncake_lab: MooncakeLab) -> None:
    """A bare request to the data port returns no byte, and changes none."""
    mooncake_lab.open()
    got = mooncake_lab.send("intruder", request(READ, mooncake_lab.memory, 64), 64)
    mooncake_lab.send("intruder", request(WRITE, mooncake_lab.memory, 64) + b"\xff" * 64)
    right = mooncake_lab.reader.request("read")
    mooncake_lab.reader.request("close")
    assert b"" == got
    assert {"right": 1} == right


def test_an_admitted_host_can_read_and_write(mooncake_lab: MooncakeLab) -> None:
    """The remaining risk: any process on the reader's host can access the weights while a channel is open."""
    mooncake_lab.open()
    weights_bytes = bytes(pattern(4).tolist())
    before = mooncake_lab.read(weights_bytes)
    mooncake_lab.send("reader", request(WRITE, mooncake_lab.memory, 4) + b"evil")
    changed = mooncake_lab.read(b"evil")
    mooncake_lab.send("reader", request(WRITE, mooncake_lab.memory, 4) + before)
    mooncake_lab.read(before)
    right = mooncake_lab.reader.request("read")
    mooncake_lab.reader.request("close")
    assert weights_bytes == before
    assert b"evil" == changed
    assert {"right": 1} == right


def test_a_reader_is_locked_out_after_its_channel_closes(mooncake_lab: MooncakeLab) -> None:
    """Its connections are cut, and new ones are refused."""
    mooncake_lab.wait_locked_out("reader")  # the previous test has only just closed its channel
    mooncake_lab.open()
    connections = mooncake_lab.open_connections("reader")
    mooncake_lab.reader.request("close")
    cut = [is_closed_by_peer(connection) for connection in connections]
    assert [True, True] == cut
    assert [] == mooncake_lab.reachable_ports("reader")


@pytest.mark.slow  # logic: tests/unit/source/test_channels.py
def test_a_reader_is_locked_out_after_its_lease_expires(mooncake_lab: MooncakeLab) -> None:
    """Automatically: the channel ends with the lease, and access ends with the channel."""
    mooncake_lab.open("fork-2", lifetime_s=8.0)
    connections = mooncake_lab.open_connections("reader")
    ended = mooncake_lab.reader.request("wait_end")
    cut = [is_closed_by_peer(connection) for connection in connections]
    read = mooncake_lab.reader.request("read")
    mooncake_lab.reader.request("close")
    assert {"ended": 1} == ended
    assert [True, True] == cut
    assert [] == mooncake_lab.reachable_ports("reader")
    assert "error" in read


def is_closed_by_peer(connection: socket.socket) -> bool:
    """Return True if the peer has closed this connection."""
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
