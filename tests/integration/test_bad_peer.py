"""Peers that mean harm, against a real seed: it lives, others fork from it, and nothing stays behind."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rfork.control.lease import derive_key
from rfork.peer.v1 import peer_pb2, peer_pb2_grpc
from rfork.seed.leases import MOST_CHANNELS
from rfork.transport.http.server import MOST_OF_A_FORK
from tests.integration.bad_peer_node import SEED_ID, Facts, Lease, Node, start_node
from tests.processes import RforkProcess

SIZE = 24 << 20
STALL_S = 2
FORKED = {"right": 1}
MANY = 300
READY = r"planner ready at http://127\.0\.0\.1:(\d+)"
SETTLED_S = 60.0
MIB = 1 << 20
ALONE = [("grpc.use_local_subchannel_pool", 1)]
"""A gRPC channel with a connection of its own."""


def popen(command: list[str], environment: dict[str, str], output: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True
    )


@dataclass
class Scene:
    """A seed and an honest reader."""

    seed: Node
    reader: Node
    address: str
    layout_id: str
    http: int

    @property
    def peer(self) -> int:
        """The port of the peer service."""
        return int(self.address.rpartition(":")[2])

    @property
    def ports(self) -> tuple[int, int]:
        """All that the seed listens on."""
        return self.peer, self.http

    @property
    def lease(self) -> Lease:
        """A good one, of a fork that means harm."""
        return Lease(self.layout_id, "bad")

    def fork(self) -> Facts:
        """Have the honest reader fork: whether the bytes are right."""
        opened = self.reader.ask(
            "open",
            address=self.address,
            layout_id=self.layout_id,
            token=Lease(self.layout_id, "good").token,
            size=SIZE,
            transport="http",
        )
        read = self.reader.ask("read") if "error" not in opened else opened
        self.reader.ask("close")
        return read

    @contextlib.contextmanager
    def unharmed(self, most_growth: int = 64 * MIB) -> Iterator[None]:
        """What is done in the block leaves the seed alive, able to give, and as large as it was before."""
        self.fork()
        before = self.seed.threads(), self.seed.descriptors(), self.seed.resident()
        yield
        assert FORKED == self.fork()
        wait_for(lambda: not self.left_over(before))
        grown = self.seed.resident() - before[2]
        after = self.left_over(before)
        assert (None, "", True) == (self.seed.process.poll(), after, grown < most_growth), grown

    def left_over(self, before: tuple[int, int, int]) -> str:
        """What there is more of than before, but for the few that come and go by themselves."""
        threads, descriptors = self.seed.threads() - before[0], self.seed.descriptors() - before[1]
        return f"{threads} threads, {descriptors} descriptors" if threads > 8 or descriptors > 8 else ""

    def stub(self, stack: contextlib.ExitStack) -> peer_pb2_grpc.PeerStub:
        """A connection of its own to the peer service."""
        channel = grpc.insecure_channel(self.address, ALONE)
        return peer_pb2_grpc.PeerStub(stack.enter_context(channel))


def wait_for(true: Callable[[], bool]) -> None:
    """Until it is, or for long."""
    until, pause = time.monotonic() + SETTLED_S, threading.Event()
    while not true() and time.monotonic() < until:
        pause.wait(0.1)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One seed for all attacks."""
    folder = tmp_path_factory.mktemp("nodes")
    environment = {
        "RFORK_TRANSPORTS": "http",
        "RFORK_STALL_S": str(STALL_S),
        "BAD_PEER_BYTES": str(SIZE),
    }
    with contextlib.ExitStack() as nodes:
        made = []
        for role in ("seed", "reader"):
            made.append(start_node(popen, folder, role, role, **environment))
            nodes.callback(made[-1].close)
        facts = made[0].ask("facts")
        address = str(facts["address"])
        (http,) = made[0].ports() - {int(address.rpartition(":")[2])}
        yield Scene(made[0], made[1], address, str(facts["layout_id"]), http)


def bearer(lease: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {lease}"),)


def http_get(token: str, extra: str = "") -> bytes:
    head = f"GET /v1/image HTTP/1.1\r\nHost: seed\r\nAuthorization: Bearer {token}\r\n{extra}\r\n"
    return head.encode("latin-1")


def connected(port: int, *, buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(5.0)
    connection.connect(("127.0.0.1", port))
    return connection


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
BEGUN = {
    "silent": b"",
    "half a head": b"GET /v1/image HT",
    "a preface": PREFACE,
    "settings": PREFACE + SETTINGS,
}


@pytest.mark.parametrize("begun", BEGUN)
def test_silent_connections(scene: Scene, begun: str) -> None:
    """Hundreds that connect to each port and say nothing, or begin and stop, keep nobody out."""
    with scene.unharmed(), contextlib.ExitStack() as held:
        for port in scene.ports:
            for _ in range(MANY):
                held.enter_context(connected(port)).sendall(BEGUN[begun])
        assert FORKED == scene.fork()


def test_slow_readers_are_cut(scene: Scene) -> None:
    """A fork that takes less than a kilobyte a second loses its connections; others read meanwhile."""
    token = scene.lease.token
    with scene.unharmed(), contextlib.ExitStack() as held:
        slow = [held.enter_context(connected(scene.http, buffer=4096)) for _ in range(16)]
        for connection in slow:
            connection.sendall(http_get(token))
        began, pause = time.monotonic(), threading.Event()
        while time.monotonic() < began + 3 * STALL_S:
            for connection in slow:
                with contextlib.suppress(ConnectionResetError):
                    connection.recv(256)
            pause.wait(0.5)
        assert FORKED == scene.fork()
        # Whoever was not cut gets all of it now.
        assert [True] * 16 == [len(everything(connection)) < SIZE for connection in slow]


def everything(connection: socket.socket) -> bytes:
    """What comes until the other side hangs up, or says nothing for five seconds."""
    received = bytearray()
    with contextlib.suppress(OSError):
        while part := connection.recv(1 << 20):
            received += part
    return bytes(received)


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack("!I", len(body))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + body


HELLO = bytes.fromhex("16030100c0010000bc0303") + bytes(181)
GARBAGE = {
    "random bytes": os.urandom(1 << 16),
    "zeros": bytes(1 << 20),
    "no line end": b"A" * (10 << 20),
    "a TLS hello": HELLO,
    "huge headers": b"GET /v1/image HTTP/1.1\r\nHost: a\r\n" + b"X-A: " + b"a" * (4 << 20) + b"\r\n\r\n",
    "many headers": b"GET /v1/image HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 500_000 + b"\r\n",
    "two lengths": b"GET /v1/image HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 0\r\n\r\n"
    b"GET /v1/image HTTP/1.1\r\nHost: a\r\n\r\n",
    "length and chunked": b"POST /v1/image HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/image HTTP/1.1\r\nHost: a\r\n\r\n",
    "a negative length": b"GET /v1/image HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n" * 100,
    "a huge length": b"GET /v1/image HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 8000 + b"\r\n\r\n",
    "a thousand requests": b"GET /v1/image HTTP/1.1\r\nHost: a\r\n\r\n" * 1000,
    "junk frames": PREFACE + SETTINGS + os.urandom(1 << 16),
    "a frame too long": PREFACE + SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(1 << 20),
    "a thousand pings": PREFACE + SETTINGS + frame(6, 0, 0, bytes(8)) * 1000,
    "a flood of settings": PREFACE + SETTINGS * 20_000,
    "headers without end": PREFACE
    + SETTINGS
    + frame(1, 0, 1, bytes(16)).join([b""] * 2)
    + frame(9, 0, 1, b"\x00\x01a\x01b" * 1000) * 500,
    "streams opened and reset": PREFACE
    + SETTINGS
    + b"".join(frame(1, 4, n, b"\x82") + frame(3, 0, n, bytes(4)) for n in range(1, 20_000, 2)),
    "window of nothing": PREFACE + SETTINGS + frame(8, 0, 0, bytes(4)) * 100,
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage(scene: Scene, garbage: str) -> None:
    """What is no request, and what is one too many, on each port, ends with its connection."""
    with scene.unharmed():
        for port in scene.ports:
            for _ in range(3):
                with connected(port) as connection, contextlib.suppress(OSError):
                    connection.settimeout(1.0)
                    connection.sendall(GARBAGE[garbage])
                    connection.shutdown(socket.SHUT_WR)
                    everything(connection)


RANGES = {
    "a giant list": "bytes=" + ",".join(f"{n}-{n}" for n in range(1000)),
    "negative": "bytes=-99999999999999999999999999999999",
    "beyond": f"bytes={10**18}-{10**18 + 5}",
    "backwards": "bytes=5-1",
    "not a number": "bytes=a-b",
    "many digits": "bytes=0-" + "9" * 10_000,
    "nothing": "bytes=-",
}


@pytest.mark.parametrize("asked", RANGES)
def test_ranges_of_no_sense(scene: Scene, asked: str) -> None:
    """A fork with a good lease asks for ranges that cannot be: it is refused, or gets the image itself."""
    with scene.unharmed(), connected(scene.http) as connection:
        connection.sendall(http_get(scene.lease.token, f"Range: {RANGES[asked]}\r\nConnection: close\r\n"))
        answer = everything(connection)
    status = int(answer[9:12])
    body = answer.partition(b"\r\n\r\n")[2]
    assert status in (200, 416, 431)
    assert (status == 200) == (len(body) > SIZE)


def jwt(header: str, payload: str) -> str:
    """A token of these two parts, with a signature of nothing."""
    parts = (base64.urlsafe_b64encode(part.encode()).rstrip(b"=").decode() for part in (header, payload))
    return ".".join([*parts, ""])


def edited(token: str) -> str:
    """The token with another fork in it, under the old signature."""
    header, payload, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    changed = base64.urlsafe_b64encode(json.dumps({**claims, "sub": "good"}).encode()).rstrip(b"=").decode()
    return ".".join([header, changed, signature])


def claims_of(lease: Lease) -> str:
    payload = lease.token.split(".")[1]
    return base64.urlsafe_b64decode(payload + "==").decode()


TOKENS: dict[str, Callable[[Lease], str]] = {
    "none": lambda lease: "",
    "expired": lambda lease: replace(lease, lives_s=-1.0).token,
    "for another source": lambda lease: replace(lease, source_id="seed-2").token,
    "of another generation": lambda lease: replace(lease, generation=7).token,
    "signed by another key": lambda lease: replace(lease, key=derive_key(b"x" * 32, SEED_ID)).token,
    "signed for another source's key": lambda lease: replace(lease, key=derive_key(b"s" * 32, "x")).token,
    "edited": lambda lease: edited(lease.token),
    "cut": lambda lease: lease.token[:-1],
    "without a signature": lambda lease: jwt('{"alg":"none","typ":"JWT"}', claims_of(lease)),
    "with a signature of nothing": lambda lease: jwt('{"alg":"HS256","typ":"JWT"}', claims_of(lease)),
    "nested": lambda lease: jwt("[" * 5000, claims_of(lease)),
    "of null": lambda lease: jwt("null", "null"),
    "of no base64": lambda lease: "!!.??.!!",
    "of dots": lambda lease: "." * 5000,
}


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_of_no_worth(scene: Scene, token: str) -> None:
    """No byte, no manifest and no channel for a token that is not good, by either way."""
    shown = TOKENS[token](scene.lease)
    with contextlib.ExitStack() as stack, connected(scene.http) as connection:
        connection.sendall(http_get(shown, "Connection: close\r\n"))
        status = everything(connection)[9:12]
        request = peer_pb2.OpenChannelRequest(layout_id=scene.layout_id, transports=["http"])
        with pytest.raises(grpc.RpcError) as refused:
            scene.stub(stack).OpenChannel(request, metadata=bearer(shown), timeout=30)
    expected = (b"410", grpc.StatusCode.ABORTED) if "generation" in token else None
    expected = expected or (b"401" if not shown else b"403", grpc.StatusCode.PERMISSION_DENIED)
    assert expected == (status, refused.value.code())


def test_a_token_is_of_no_use_once_it_expired(scene: Scene) -> None:
    """A token that was good is refused when it is shown again later, and its channel is gone."""
    lease = replace(scene.lease, fork_id="brief", lives_s=3.0)
    shown = lease.token
    request = peer_pb2.OpenChannelRequest(layout_id=scene.layout_id, transports=["http"])
    with contextlib.ExitStack() as stack:
        stub = scene.stub(stack)
        channel = stub.OpenChannel(request, metadata=bearer(shown), timeout=30).channel_id
        watch = peer_pb2.WatchProgressRequest(channel_id=channel, keep_alive_ms=60_000)
        news = list(stub.WatchProgress(watch, metadata=bearer(shown), timeout=60))
        with pytest.raises(grpc.RpcError) as refused:
            stub.OpenChannel(request, metadata=bearer(shown), timeout=30)
    assert (1, grpc.StatusCode.PERMISSION_DENIED) == (len(news), refused.value.code())


def open_request(scene: Scene) -> peer_pb2.OpenChannelRequest:
    return peer_pb2.OpenChannelRequest(layout_id=scene.layout_id, transports=["http"])


def statuses(calls: list[Callable[[], object]]) -> Counter[grpc.StatusCode]:
    """How each call ends, made one after the other."""
    ended: Counter[grpc.StatusCode] = Counter()
    for call in calls:
        try:
            call()
            ended[grpc.StatusCode.OK] += 1
        except grpc.RpcError as error:
            ended[error.code()] += 1
    return ended


def test_500_channels_of_one_fork(scene: Scene) -> None:
    """A fork gets no more than a handful, in one place; all is given back with its lease."""
    shown = bearer(replace(scene.lease, fork_id="greedy", lives_s=10.0).token)
    with scene.unharmed(), contextlib.ExitStack() as stack:
        stub = scene.stub(stack)
        open_one = partial(stub.OpenChannel, open_request(scene), metadata=shown, timeout=30)
        ended = statuses([open_one] * 500)
        assert scene.fork() == FORKED
    expected = {grpc.StatusCode.OK: MOST_CHANNELS, grpc.StatusCode.RESOURCE_EXHAUSTED: 500 - MOST_CHANNELS}
    assert expected == ended


def test_a_hundred_leases(scene: Scene) -> None:
    """As many forks get a place as there are; they last as long as their leases, and then others fork."""
    emptied = {"readers": 0}
    wait_for(lambda: scene.seed.ask("readers") == emptied)
    leases = [replace(scene.lease, fork_id=f"many-{n}", lives_s=8.0).token for n in range(100)]
    with contextlib.ExitStack() as stack:
        stub = scene.stub(stack)
        ended = statuses(
            [
                partial(stub.OpenChannel, open_request(scene), metadata=bearer(one), timeout=30)
                for one in leases
            ]
        )
    wait_for(lambda: scene.seed.ask("readers") == emptied)
    assert {grpc.StatusCode.OK: 4, grpc.StatusCode.RESOURCE_EXHAUSTED: 96} == ended
    assert scene.fork() == FORKED


def never(stack: contextlib.ExitStack) -> Iterator[bytes]:
    """A request that does not come while the stack is open."""
    over = threading.Event()
    stack.callback(over.set)
    over.wait(SETTLED_S)
    yield from ()


HALF_OPEN = {
    "a stranger, GetManifest": ("/rfork.v1.Peer/GetManifest", False),
    "a stranger, Check": ("/grpc.health.v1.Health/Check", False),
    "a fork, WatchProgress": ("/rfork.v1.Peer/WatchProgress", True),
}


@pytest.mark.parametrize("call", HALF_OPEN)
def test_calls_whose_request_never_comes(scene: Scene, call: str) -> None:
    """Hundreds of calls that stop after their headers take no place of the calls of others."""
    method, leased = HALF_OPEN[call]
    shown = bearer(scene.lease.token) if leased else ()
    with scene.unharmed(), contextlib.ExitStack() as stack:
        for _ in range(30):
            channel = stack.enter_context(grpc.insecure_channel(scene.address, ALONE))
            begin = channel.stream_unary(method, None, None)
            for _ in range(20):
                stack.callback(begin.future(never(stack), metadata=shown).cancel)
        assert (FORKED, health_pb2.HealthCheckResponse.SERVING) == (scene.fork(), health(scene))


def health(scene: Scene) -> int:
    """What a probe hears."""
    with grpc.insecure_channel(scene.address, ALONE) as channel:
        asked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    return int(asked.status)


def test_streams_of_a_stranger(scene: Scene) -> None:
    """There is nothing to watch for who has no lease, health neither."""
    with grpc.insecure_channel(scene.address) as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        with pytest.raises(grpc.RpcError) as refused:
            next(watched)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_500_progress_streams_that_nobody_reads(scene: Scene) -> None:
    """A fork holds a few; all other calls of its own are refused, and nobody else's."""
    shown = bearer(replace(scene.lease, fork_id="watcher", lives_s=15.0).token)
    with scene.unharmed(), contextlib.ExitStack() as stack:
        stub = scene.stub(stack)
        channel = stub.OpenChannel(open_request(scene), metadata=shown, timeout=30).channel_id
        watch = peer_pb2.WatchProgressRequest(channel_id=channel, keep_alive_ms=1)
        for _ in range(500):
            stack.callback(stub.WatchProgress(watch, metadata=shown).cancel)
        assert scene.fork() == FORKED


def test_requests_of_no_sense(scene: Scene) -> None:
    """Requests over the size limit, and bytes that are no message, are refused with a status."""
    shown = bearer(scene.lease.token)
    with scene.unharmed(), grpc.insecure_channel(scene.address) as channel:
        call = channel.unary_unary("/rfork.v1.Peer/OpenChannel", None, None)
        said = [
            statuses([partial(call, body, metadata=shown, timeout=30)])
            for body in (os.urandom(MIB), b"\xff" * 100, bytes(60_000))
        ]
    refusals = (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    assert [Counter([refusal]) for refusal in refusals] == said


@pytest.mark.slow
def test_manifests_that_nobody_reads(tmp_path: Path) -> None:
    """Hundreds of streams of a manifest of 100,000 tensors make no copy each, and others get theirs."""
    environment = {"RFORK_TRANSPORTS": "http", "BAD_PEER_BYTES": "1000", "BAD_PEER_TENSORS": "100000"}
    with contextlib.ExitStack() as stack:
        seed = start_node(popen, tmp_path, "seed", "seed", **environment)
        stack.callback(seed.close)
        facts = seed.ask("facts")
        before = seed.resident()
        layout_id, address = str(facts["layout_id"]), str(facts["address"])
        shown = bearer(Lease(layout_id, "bad").token)
        request = peer_pb2.GetManifestRequest(include_tensors=True)
        for _ in range(25):
            channel = stack.enter_context(grpc.insecure_channel(address, ALONE))
            stub = peer_pb2_grpc.PeerStub(channel)
            for _ in range(20):
                stack.callback(stub.GetManifest(request, metadata=shown).cancel)
        honest = bearer(Lease(layout_id, "good").token)
        mine = peer_pb2_grpc.PeerStub(stack.enter_context(grpc.insecure_channel(address, ALONE)))
        tensors = sum(len(part.tensors) for part in mine.GetManifest(request, metadata=honest, timeout=60))
        grown = seed.resident() - before
    assert (100_001, True) == (tensors, grown < 300 * MIB), grown


def test_a_fork_does_not_take_all_connections(scene: Scene) -> None:
    """One lease has no more than its share of the image server's places; the others are for others."""
    token = scene.lease.token
    with scene.unharmed(), contextlib.ExitStack() as held:
        said = Counter(first_status(held.enter_context(connected(scene.http)), token) for _ in range(300))
        assert scene.fork() == FORKED
    assert Counter({b"206": MOST_OF_A_FORK, b"503": 300 - MOST_OF_A_FORK}) == said


def first_status(connection: socket.socket, token: str) -> bytes:
    """Ask for one byte and stay; the status."""
    connection.sendall(http_get(token, "Range: bytes=0-0\r\n"))
    return connection.recv(1 << 16)[9:12]


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RforkProcess, int]]:
    """A planner, and its port."""
    process = RforkProcess(["planner", "--port", "0"], {**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        yield process, int(process.wait_for(READY).group(1))
    finally:
        process.stop()


def healthy(port: int) -> int:
    """What the planner says to a probe."""
    return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=30).status_code


@pytest.mark.parametrize("begun", BEGUN)
def test_silent_connections_to_the_planner(planner: tuple[RforkProcess, int], begun: str) -> None:
    """Hundreds of connections that say nothing, or begin and stop, keep nobody from it."""
    with contextlib.ExitStack() as held:
        for _ in range(MANY):
            held.enter_context(connected(planner[1])).sendall(BEGUN[begun])
        assert healthy(planner[1]) == 200


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_to_the_planner(planner: tuple[RforkProcess, int], garbage: str) -> None:
    """What is no request ends with its connection."""
    with connected(planner[1]) as connection, contextlib.suppress(OSError):
        connection.settimeout(1.0)
        connection.sendall(GARBAGE[garbage])
        connection.shutdown(socket.SHUT_WR)
        everything(connection)
    assert healthy(planner[1]) == 200
