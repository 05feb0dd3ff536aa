"""TCP proxy in front of an HTTP server whose responses fail by script.

::

    with FaultProxy(weed_port) as proxy:
        settings = StorageSettings(s3_endpoint=proxy.url)
        proxy.script.then(TruncateFault(after=1000), path="GET /bucket/model")

It can `StallFault`, `ResetFault`, `TruncateFault` and answer with an `ErrorStatus`. A script's `path` matches
the request line up to the query: ``GET /bucket/name``. Requests have a Content-Length or no body (no chunked
uploads); everything else passes through unchanged.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from typing_extensions import Self

from tests.storage_faults import (
    ErrorStatus,
    Fault,
    FaultScript,
    FullObject,
    HeaderFields,
    ReplaceObject,
    ResetFault,
    StallFault,
    TruncateFault,
)
from tests.storage_server import reset

BLOCK_BYTES = 64 << 10
_LENGTH = re.compile(rb"\r\ncontent-length:\s*([0-9]+)", re.IGNORECASE)


class FaultProxy:
    """Proxy that listens on a port of 127.0.0.1 and forwards to another one until it is closed."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.script = FaultScript()
        self._target = (host, port)
        self._lock = threading.Lock()
        self._requests: list[str] = []
        self._bytes_sent = 0
        self._open_sockets: set[socket.socket] = set()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._accept_thread = threading.Thread(target=self._accept, daemon=True)
        self._accept_thread.start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        """URL of the server through the proxy."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to clients so far, heads included."""
        with self._lock:
            return self._bytes_sent

    def requests_matching(self, part: str = "") -> list[str]:
        """Return the request lines so far, up to the query, that contain `part`."""
        with self._lock:
            return [line for line in self._requests if part in line]

    def close(self) -> None:
        """Stop the proxy and end its connections."""
        self.script.release()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accept_thread.join()  # it starts the others
        self._listener.close()
        with self._lock:
            self._closed = True
            for connection in self._open_sockets:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def record_request(self, line: str) -> None:
        """Record a request; called by connections."""
        with self._lock:
            self._requests.append(line)

    def record_sent(self, count: int) -> None:
        """Record bytes sent to a client; called by connections."""
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
                if self._closed:  # it arrived after the proxy stopped accepting
                    return
                self._open_sockets |= {client, server}
            link = _ProxiedConnection(self, client, server)
            response_thread = threading.Thread(target=link.forward_responses, daemon=True)
            response_thread.start()
            link.forward_requests()
            response_thread.join()
            with self._lock:
                self._open_sockets -= {client, server}


class _ProxiedConnection:
    """One client connection and its connection to the server."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket) -> None:
        for connection in (client, server):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._proxy = proxy
        self._client = client
        self._server = server
        self._fault: Fault | None = None
        self._new_response = False

    def forward_requests(self) -> None:
        """Forward requests until either side ends."""
        received = b""
        try:
            while True:
                while b"\r\n\r\n" not in received:
                    data = self._client.recv(BLOCK_BYTES)
                    if not data:
                        return
                    received += data
                head, _, rest = received.partition(b"\r\n\r\n")
                line = head.partition(b"?")[0].partition(b" HTTP/")[0].decode("latin-1")
                self._proxy.record_request(line)
                self._fault = self._proxy.script.next_fault(line)
                length = int(match.group(1)) if (match := _LENGTH.search(head)) else 0
                received, missing = rest[length:], length - len(rest[:length])
                if isinstance(self._fault, ErrorStatus):
                    if b"\r\nexpect:" not in head.lower():
                        self._forward_request_body(missing, None)
                    self._send_fault_response(self._fault)
                    return
                if not self._should_forward():
                    return
                self._new_response = True
                self._server.sendall(head + b"\r\n\r\n" + rest[:length])
                self._forward_request_body(missing, self._server)
        except OSError:
            return  # either side may disconnect
        finally:
            self._end(self._server)

    def forward_responses(self) -> None:
        """Forward responses, with the faults of the script."""
        head: bytes | None = b""
        body = 0
        try:
            while data := self._server.recv(BLOCK_BYTES):
                if self._new_response:
                    self._new_response, head = False, b""
                if head is not None:
                    head += data
                    if b"\r\n\r\n" not in head:
                        continue
                    complete_head, separator, data = head.partition(b"\r\n\r\n")
                    self._send(complete_head + separator)
                    head, body = (b"" if complete_head.startswith(b"HTTP/1.1 100") else None), 0
                if not self._forward_body_piece(data, body):
                    return
                body += len(data)
        except OSError:
            return  # either side may disconnect
        finally:
            with suppress(OSError):
                self._client.shutdown(socket.SHUT_RD if isinstance(self._fault, ResetFault) else socket.SHUT_RDWR)
            self._end(self._server)

    def _forward_request_body(self, missing: int, target: socket.socket | None) -> None:
        """Read the rest of a request's body and forward it."""
        while missing:
            data = self._client.recv(min(BLOCK_BYTES, missing))
            if not data:
                raise ConnectionResetError("the client disconnected")
            if target is not None:
                target.sendall(data)
            missing -= len(data)

    def _send_fault_response(self, response: ErrorStatus) -> None:
        fields = {**response.fields, "Content-Length": str(len(response.text)), "Connection": "close"}
        lines = [f"HTTP/1.1 {response.status} Fault", *(f"{name}: {value}" for name, value in fields.items())]
        self._send("\r\n".join([*lines, "", ""]).encode() + response.text)

    def _should_forward(self) -> bool:
        """Return True if a request is forwarded; apply faults that precede the response's head."""
        fault = self._fault
        if isinstance(fault, FullObject | HeaderFields | ReplaceObject):
            raise TypeError(f"a proxy does not support {fault}")
        if isinstance(fault, StallFault) and fault.after is None:
            self._proxy.script.wait_released()
        if isinstance(fault, ResetFault | TruncateFault) and fault.after is None:
            if isinstance(fault, ResetFault):
                reset(self._client)
            return False
        return True

    def _forward_body_piece(self, data: bytes, bytes_before: int) -> bool:
        """Send a piece of a body after `bytes_before` bytes; return False at the end of the response."""
        fault = self._fault
        if not isinstance(fault, StallFault | ResetFault | TruncateFault) or fault.after is None:
            self._send(data)
            return True
        if bytes_before <= fault.after < bytes_before + len(data):
            self._send(data[: fault.after - bytes_before])
            if isinstance(fault, StallFault):
                self._proxy.script.wait_released()
                self._send(data[fault.after - bytes_before :])
                return True
            if isinstance(fault, ResetFault):
                reset(self._client)
            return False
        self._send(data)
        return True

    def _send(self, data: bytes) -> None:
        self._proxy.record_sent(len(data))  # first, so that the count includes everything that the client has received
        self._client.sendall(data)

    @staticmethod
    def _end(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
