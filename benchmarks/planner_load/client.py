"""Client of `benchmarks.planner_load`: HTTP/1.1 over persistent raw sockets, on one thread.

A caller is a generator: it yields a `Call` and receives the response's body. Each caller has its own
connection and one request in flight. Requests are encoded before the clock starts, so the client costs about
20 µs per call and is never the bottleneck.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from rfork.errors import RforkError

LOOPBACK = "127.0.0.1"
RESPONSE_TIMEOUT_S = 60.0
RECEIVE_BYTES = 1 << 18
END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Call:
    """One complete request; `due` is when to send it, on the clock of `time.perf_counter`; 0 means
    immediately.
    """

    call_type: str
    request: bytes
    due: float = 0.0


Caller = Generator[Call, bytes, None]


@dataclass
class CallSamples:
    """Measurements of a drive: seconds of each call from its first byte out to its last byte in, by type."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wall_s: float = 0.0
    client_s: float = 0.0
    """CPU time of this process: compared with `wall_s`, it shows whether the client is the bottleneck."""

    def add(self, other: CallSamples) -> None:
        """Add the samples of another drive."""
        for call_type, seconds in other.seconds.items():
            self.seconds[call_type] += seconds
        self.wall_s += other.wall_s
        self.client_s += other.client_s

    def rate(self, *call_types: str) -> float:
        """Return the calls per second of these types, or of all."""
        counted = call_types or tuple(self.seconds)
        return sum(len(self.seconds[call_type]) for call_type in counted) / self.wall_s


def request(method: str, path: str, body: str = "") -> bytes:
    """Encode a request with a JSON body."""
    content = body.encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {LOOPBACK}\r\nAccept: application/json\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class _ClientConnection:
    """A caller, its socket and the call in flight."""

    def __init__(self, caller: Caller, port: int) -> None:
        self.caller = caller
        self.socket = socket.create_connection((LOOPBACK, port), RESPONSE_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.call: Call | None = None
        self._sent_at = 0.0
        self._response = b""

    def send(self, call: Call) -> None:
        self.call, self._response = call, b""
        self._sent_at = time.perf_counter()
        self.socket.sendall(call.request)

    def receive(self, samples: CallSamples) -> bytes | None:
        """Read from the socket; returns the body once it is complete. Raises RforkError for any status other
        than 2xx.
        """
        received = self.socket.recv(RECEIVE_BYTES)
        now = time.perf_counter()
        if self.call is None or not received:
            raise RforkError("the server closed a connection, or sent data without a request")
        self._response += received
        head, separator, body = self._response.partition(END_OF_HEAD)
        if not separator or len(body) < _content_length(head):
            return None
        if not head.startswith(b"HTTP/1.1 2"):
            status = head.partition(b"\r\n")[0].decode()
            raise RforkError(f"{self.call.call_type}: {status}: {body[:500].decode()}")
        samples.seconds[self.call.call_type].append(now - self._sent_at)
        self.call = None
        return body


def _content_length(head: bytes) -> int:
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if found else 0


def drive(port: int, callers: Sequence[Caller]) -> CallSamples:
    """Run all callers until each has ended. Raises RforkError for an error response or a timeout."""
    samples, order = CallSamples(), itertools.count()
    waiting: list[tuple[float, int, _ClientConnection, Call]] = []
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        connections = [_ClientConnection(caller, port) for caller in callers]
        for connection in connections:
            opened.enter_context(contextlib.closing(connection.socket))
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        began, busy = time.perf_counter(), time.process_time()
        in_flight = 0

        def go_on(connection: _ClientConnection, body: bytes | None) -> int:
            """Send the caller's next call: returns 1 if it was sent now."""
            try:
                call = next(connection.caller) if body is None else connection.caller.send(body)
            except StopIteration:
                return 0
            if call.due > time.perf_counter():
                heapq.heappush(waiting, (call.due, next(order), connection, call))
                return 0
            connection.send(call)
            return 1

        for connection in connections:
            in_flight += go_on(connection, None)
        while in_flight or waiting:
            while waiting and waiting[0][0] <= time.perf_counter():
                _, _, connection, call = heapq.heappop(waiting)
                connection.send(call)
                in_flight += 1
            pause = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else RESPONSE_TIMEOUT_S
            ready = selector.select(pause)
            if not ready and not waiting:
                raise RforkError(f"the server did not respond within {RESPONSE_TIMEOUT_S:g} s")
            for key, _ in ready:
                connection = key.data
                body = connection.receive(samples)
                if body is not None:
                    in_flight += go_on(connection, body) - 1
        samples.wall_s, samples.client_s = time.perf_counter() - began, time.process_time() - busy
    return samples
