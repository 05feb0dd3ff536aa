"""A TCP proxy before any HTTP server, whose answers go wrong by script.

::

    with FaultProxy(weed_port) as proxy:
        settings = StorageSettings(s3_endpoint=proxy.url)
        proxy.script.then(Truncate(after=1000), path="GET /bucket/model")

It can `Stall`, `Reset`, `Truncate` and answer a `Status`. What a script's `path` is looked for in is the
request line up to the query: ``GET /bucket/name``. Requests have a Content-Length or no body (no chunked
uploads); all that is no fault passes through as it is.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.storage_faults import Fault, Fields, Replace, Reset, Script, Stall, Status, Truncate, Whole
from tests.storage_server import reset

PIECE = 64 << 10
_LENGTH = re.compile(rb"\r\ncontent-length:\s*([0-9]+)", re.IGNORECASE)


class FaultProxy:
    """Listens on a port of 127.0.0.1 and forwards to another, until it is closed."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.script = Script()
        self._target = (host, port)
        self._lock = threading.Lock()
        self._requests: list[str] = []
        self._bytes_sent = 0
        self._open: set[socket.socket] = set()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        """The URL of the server behind it, through it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def bytes_sent(self) -> int:
        """Bytes given to clients so far, heads and all."""
        with self._lock:
            return self._bytes_sent

    def seen(self, part: str = "") -> list[str]:
        """The request lines so far, up to the query, that hold `part`."""
        with self._lock:
            return [line for line in self._requests if part in line]

    def close(self) -> None:
        """Stop it, and end its connections."""
        self.script.release()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()  # it starts the others
        self._listener.close()
        with self._lock:
            self._closed = True
            for connected in self._open:
                with suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def note(self, line: str) -> None:
        """For a connection: a request came."""
        with self._lock:
            self._requests.append(line)

    def sent(self, count: int) -> None:
        """For a connection: bytes are going to the client."""
        with self._lock:
            self._bytes_sent += count

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(lambda client=client: self._serve(client))  # type: ignore[misc]

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            with self._lock:
                if self._closed:  # it came as nobody took any more
                    return
                self._open |= {client, server}
            link = _Link(self, client, server)
            giving = threading.Thread(target=link.give, daemon=True)
            giving.start()
            link.ask()
            giving.join()
            with self._lock:
                self._open -= {client, server}


class _Link:
    """One client's connection, and the one to the server that goes with it."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket) -> None:
        for connected in (client, server):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._proxy = proxy
        self._client = client
        self._server = server
        self._fault: Fault | None = None
        self._fresh = False

    def ask(self) -> None:
        """Forward requests, until either side ends."""
        received = b""
        try:
            while True:
                while b"\r\n\r\n" not in received:
                    data = self._client.recv(PIECE)
                    if not data:
                        return
                    received += data
                head, _, rest = received.partition(b"\r\n\r\n")
                line = head.partition(b"?")[0].partition(b" HTTP/")[0].decode("latin-1")
                self._proxy.note(line)
                self._fault = self._proxy.script.take(line)
                length = int(match.group(1)) if (match := _LENGTH.search(head)) else 0
                received, missing = rest[length:], length - len(rest[:length])
                if isinstance(self._fault, Status):
                    if b"\r\nexpect:" not in head.lower():
                        self._body(missing, None)
                    self._refuse(self._fault)
                    return
                if not self._goes_on():
                    return
                self._fresh = True
                self._server.sendall(head + b"\r\n\r\n" + rest[:length])
                self._body(missing, self._server)
        except OSError:
            return  # either side left, as sides do here
        finally:
            self._end(self._server)

    def give(self) -> None:
        """Forward answers, but for what the script has go wrong with them."""
        head: bytes | None = b""
        body = 0
        try:
            while data := self._server.recv(PIECE):
                if self._fresh:
                    self._fresh, head = False, b""
                if head is not None:
                    head += data
                    if b"\r\n\r\n" not in head:
                        continue
                    whole, mark, data = head.partition(b"\r\n\r\n")
                    self._send(whole + mark)
                    head, body = (b"" if whole.startswith(b"HTTP/1.1 100") else None), 0
                if not self._pass(data, body):
                    return
                body += len(data)
        except OSError:
            return  # either side left, as sides do here
        finally:
            with suppress(OSError):
                self._client.shutdown(socket.SHUT_RD if isinstance(self._fault, Reset) else socket.SHUT_RDWR)
            self._end(self._server)

    def _body(self, missing: int, target: socket.socket | None) -> None:
        """Take so many bytes of a request's body, and pass them on."""
        while missing:
            data = self._client.recv(min(PIECE, missing))
            if not data:
                raise ConnectionResetError("the client left")
            if target is not None:
                target.sendall(data)
            missing -= len(data)

    def _refuse(self, answer: Status) -> None:
        fields = {**answer.fields, "Content-Length": str(len(answer.text)), "Connection": "close"}
        lines = [f"HTTP/1.1 {answer.status} Fault", *(f"{name}: {value}" for name, value in fields.items())]
        self._send("\r\n".join([*lines, "", ""]).encode() + answer.text)

    def _goes_on(self) -> bool:
        """Whether a request is forwarded; what is to happen before its answer's head happens here."""
        fault = self._fault
        if isinstance(fault, Whole | Fields | Replace):
            raise TypeError(f"a proxy cannot do {fault}")
        if isinstance(fault, Stall) and fault.after is None:
            self._proxy.script.stall()
        if isinstance(fault, Reset | Truncate) and fault.after is None:
            if isinstance(fault, Reset):
                reset(self._client)
            return False
        return True

    def _pass(self, data: bytes, before: int) -> bool:
        """Give the client a piece of a body, `before` bytes of which it has; whether there may be more."""
        fault = self._fault
        if not isinstance(fault, Stall | Reset | Truncate) or fault.after is None:
            self._send(data)
            return True
        if before <= fault.after < before + len(data):
            self._send(data[: fault.after - before])
            if isinstance(fault, Stall):
                self._proxy.script.stall()
                self._send(data[fault.after - before :])
                return True
            if isinstance(fault, Reset):
                reset(self._client)
            return False
        self._send(data)
        return True

    def _send(self, data: bytes) -> None:
        self._proxy.sent(len(data))  # first, so that what the client has is counted
        self._client.sendall(data)

    @staticmethod
    def _end(connected: socket.socket) -> None:
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)
