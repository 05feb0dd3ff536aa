"""A seed and a well-behaved reader in separate processes, and helpers shared by all attacks on the seed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import grpc

from rfork.peer.v1 import peer_pb2_grpc
from tests.fork_server import PythonProcess
from tests.integration.bad_peer_node import BadPeerNode, Facts, ForgedLease

SIZE = 24 << 20
STALL_S = 2
FORKED = {"right": 1}
SETTLE_TIMEOUT_S = 60.0
MIB = 1 << 20
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
"""gRPC channel option: a separate connection for this channel."""


def start_process(command: list[str], environment: dict[str, str], output: IO[str]) -> subprocess.Popen[str]:
    return PythonProcess(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True)


@dataclass
class AttackedSeed:
    """A seed and a well-behaved reader."""

    seed: BadPeerNode
    reader: BadPeerNode
    address: str
    layout_id: str
    http_port: int

    @property
    def peer_port(self) -> int:
        """Port of the peer service."""
        return int(self.address.rpartition(":")[2])

    @property
    def ports(self) -> tuple[int, int]:
        """All ports that the seed listens on."""
        return self.peer_port, self.http_port

    @property
    def lease(self) -> ForgedLease:
        """A valid lease of a malicious fork."""
        return ForgedLease(self.layout_id, "bad")

    def fork(self) -> Facts:
        """Fork with the well-behaved reader; report if the bytes are right."""
        opened = self.reader.request(
            "open",
            address=self.address,
            layout_id=self.layout_id,
            token=ForgedLease(self.layout_id, "good").token,
            size=SIZE,
            transport="http",
        )
        read = self.reader.request("read") if "error" not in opened else opened
        self.reader.request("close")
        return read

    @contextlib.contextmanager
    def assert_unharmed(self, max_growth: int = 64 * MIB) -> Iterator[None]:
        """Assert that the seed survives the block, still serves forks, and uses as much memory as before."""
        self.fork()
        before = self.seed.threads(), self.seed.descriptors(), self.seed.resident_bytes()
        yield
        assert FORKED == self.fork()
        wait_for(lambda: not self.leaked_resources(before))
        growth = self.seed.resident_bytes() - before[2]
        after = self.leaked_resources(before)
        assert (None, "", True) == (self.seed.process.poll(), after, growth < max_growth), growth

    def leaked_resources(self, before: tuple[int, int, int]) -> str:
        """Resources that exceed the counts of `before`, except the few that come and go in normal operation."""
        threads, descriptors = self.seed.threads() - before[0], self.seed.descriptors() - before[1]
        return f"{threads} threads, {descriptors} descriptors" if threads > 8 or descriptors > 8 else ""

    def stub(self, stack: contextlib.ExitStack) -> peer_pb2_grpc.PeerStub:
        """Stub of the peer service on a separate connection."""
        channel = grpc.insecure_channel(self.address, OWN_CONNECTION)
        return peer_pb2_grpc.PeerStub(stack.enter_context(channel))


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true; fails after a long timeout."""
    until, pause = time.monotonic() + SETTLE_TIMEOUT_S, threading.Event()
    while not condition() and time.monotonic() < until:
        pause.wait(0.1)


def bearer(lease: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {lease}"),)


def http_get(token: str, extra: str = "") -> bytes:
    head = f"GET /v1/image HTTP/1.1\r\nHost: seed\r\nAuthorization: Bearer {token}\r\n{extra}\r\n"
    return head.encode("latin-1")


def open_connection(port: int, *, buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(5.0)
    connection.connect(("127.0.0.1", port))
    return connection


def receive_all(connection: socket.socket) -> bytes:
    """Return the bytes received until the other side closes the connection or is silent for five seconds."""
    received = bytearray()
    with contextlib.suppress(OSError):
        while part := connection.recv(1 << 20):
            received += part
    return bytes(received)
