"""Web server with range support for tests, on threads of the test process, with scripted faults.

::

    with StorageServer({"model.bin": data}) as server:
        blob = HttpStore(Location.parse(server.url()), settings).open("model.bin")
        server.script.then(ResetFault(after=1000))
        blob.read(0, views)                       # its first response breaks after 1000 bytes
        server.put("model.bin", other)            # replaced: another ETag
        assert 2 == len(server.requests_matching("model.bin")[1:])

It answers GET and HEAD with one ``bytes=A-B`` range, keeps connections alive, and supports If-Match,
If-Unmodified-Since and, with `token`, Authorization. Names are decoded paths without the leading slash. For
faults in front of another server see `tests.fault_proxy`.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Literal
from urllib.parse import unquote

from typing_extensions import Self

from rfork.net.http_heads import RangeNotSatisfiable, bearer_token, etag_matches, parse_range
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

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request: path without query, query, fields by lower-case name, and its response."""

    path: str
    query: str
    fields: Mapping[str, str]
    status: int

    @property
    def range(self) -> str:
        """The Range field."""
        return self.fields.get("range", "")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object, its entity tag, and its modification time in seconds since the epoch."""

    data: bytes
    etag: str
    modified: float

    @classmethod
    def of(cls, data: bytes, modified: float) -> StoredObject:
        """Create an object with the tag that S3 would assign."""
        return cls(data, f'"{hashlib.md5(data).hexdigest()}"', modified)


class StorageServer:
    """Serve objects from memory, passed as a mapping or as a folder that is read once, until closed.

    `tags`: type of ETags; `dates`: send Last-Modified; `honours_preconditions`: evaluate conditional
    requests. `tls`: server context for https. `host`: host of the URLs.
    """

    def __init__(
        self,
        objects: Mapping[str, bytes] | Path,
        *,
        tags: Literal["strong", "weak", "none"] = "strong",
        dates: bool = True,
        honours_preconditions: bool = True,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.script = FaultScript()
        self.tags = tags
        self.dates = dates
        self.honours_preconditions = honours_preconditions
        self.token = token
        self.lock = threading.Condition()
        self._bytes_sent = 0
        self._requests: list[SeenRequest] = []
        self._written = 1_700_000_000.0
        self._objects: dict[str, StoredObject] = {}
        if isinstance(objects, Path):
            files = (path for path in objects.rglob("*") if path.is_file())
            objects = {str(path.relative_to(objects)): path.read_bytes() for path in files}
        for name, data in objects.items():
            self.put(name, data)
        self._scheme = "https" if tls is not None else "http"
        self._host = host
        self._tcp = _Tcp(self, tls)
        self._thread = threading.Thread(target=self._tcp.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on 127.0.0.1 on which it listens."""
        return self._tcp.server_port

    def url(self, name: str = "") -> str:
        """Return the URL of an object, or of the server."""
        return f"{self._scheme}://{self._host}:{self.port}/{name}"

    def put(self, name: str, data: bytes) -> None:
        """Write or replace an object, with a new tag and date."""
        with self.lock:
            self._written += 10
            self._objects[name] = StoredObject.of(data, self._written)

    def remove(self, name: str) -> None:
        """Remove an object."""
        with self.lock:
            del self._objects[name]

    def get_object(self, name: str) -> StoredObject | None:
        """Return the current object of a name."""
        with self.lock:
            return self._objects.get(name)

    def requests_matching(self, path: str = "") -> list[SeenRequest]:
        """Return the requests so far whose path contains `path`, in the order of their response heads."""
        with self.lock:
            return [request for request in self._requests if path in request.path]

    def wait_requests(self, count: int, deadline_s: float = 60.0) -> None:
        """Wait for `count` requests in total. Raises TimeoutError."""
        with self.lock:
            if not self.lock.wait_for(lambda: len(self._requests) >= count, deadline_s):
                raise TimeoutError(f"{len(self._requests)} requests instead of {count}")

    @property
    def bytes_sent(self) -> int:
        """Bytes of bodies sent so far, without heads and errors."""
        with self.lock:
            return self._bytes_sent

    @property
    def connections(self) -> int:
        """Connections accepted so far."""
        return self._tcp.accepted

    def record_request(self, request: SeenRequest) -> None:
        """Record a request; called by the handler."""
        with self.lock:
            self._requests.append(request)
            self.lock.notify_all()

    def record_sent(self, count: int) -> None:
        """Record sent bytes of a body; called by the handler."""
        with self.lock:
            self._bytes_sent += count

    def close(self) -> None:
        """Stop it and end its connections."""
        self.script.release()
        self._tcp.shutdown()
        self._tcp.end_connections()
        self._tcp.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Tcp(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128

    def __init__(self, storage: StorageServer, tls: ssl.SSLContext | None) -> None:
        self.storage = storage
        self.accepted = 0
        self._tls = tls
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connected, address = super().get_request()
        self.accepted += 1
        if self._tls is not None:
            connected = self._tls.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
        with self.storage.lock:
            self._open.add(connected)
        return connected, address

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        if isinstance(request, socket.socket):
            with self.storage.lock:
                self._open.discard(request)
            request.close()

    def handle_error(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: tuple[str, int]
    ) -> None:
        """Ignore clients that disconnect."""

    def end_connections(self) -> None:
        with self.storage.lock:
            for connected in self._open:
                try:
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)
                except OSError:
                    continue  # the client was faster


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Tcp

    def do_GET(self) -> None:
        storage = self.server.storage
        path, _, query = self.path.partition("?")
        name = unquote(path.lstrip("/"))
        fault = storage.script.next_fault(name)
        if isinstance(fault, StallFault | ResetFault | TruncateFault) and fault.after is None:
            self._note(name, query, 0)
            self._apply_connection_fault(fault)
            if not isinstance(fault, StallFault):
                return
        if isinstance(fault, ErrorStatus):
            self._note(name, query, fault.status)
            self._send_error(fault)
            return
        response = _build_response(storage, name, self._fields(), ignore_range=isinstance(fault, FullObject))
        self._note(name, query, response.status)
        if isinstance(response, ErrorStatus):
            self._send_error(response)
        else:
            self._send_body_response(response, fault)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: str) -> None:
        """Log nothing: tests use `StorageServer.requests_matching`."""

    def _note(self, name: str, query: str, status: int) -> None:
        self.server.storage.record_request(SeenRequest(name, query, self._fields(), status))

    def _fields(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items()}

    def _send_error(self, response: ErrorStatus) -> None:
        self.send_response(response.status)
        length = {"Transfer-Encoding": "chunked"} if response.chunked else {"Content-Length": str(len(response.text))}
        for name, value in {**response.fields, **length}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        chunked_body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(response.text), response.text)
        self.wfile.write(chunked_body if response.chunked else response.text)

    def _send_body_response(self, response: _BodyResponse, fault: Fault | None) -> None:
        fields = dict(response.fields)
        if isinstance(fault, HeaderFields):
            fields = {name: value for name, value in {**fields, **fault.fields}.items() if value is not None}
        self.send_response(response.status)
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = memoryview(response.data)
        if isinstance(fault, StallFault | ResetFault | TruncateFault) and fault.after is not None:
            self._send(body[: fault.after])
            self._apply_connection_fault(fault)
            body = body[fault.after :]
        if isinstance(fault, ReplaceObject):
            self._send(body[: fault.after])
            self.server.storage.put(unquote(self.path.partition("?")[0].lstrip("/")), fault.data)
            self.close_connection = True
        if not self.close_connection:
            self._send(body)

    def _send(self, body: memoryview) -> None:
        for begin in range(0, len(body), BLOCK_BYTES):
            piece = body[begin : begin + BLOCK_BYTES]
            self.server.storage.record_sent(
                len(piece)
            )  # first, so that the count includes everything that a client has received
            self.wfile.write(piece)

    def _apply_connection_fault(self, fault: StallFault | ResetFault | TruncateFault) -> None:
        if isinstance(fault, StallFault):
            self.server.storage.script.wait_released()
            return
        if isinstance(fault, ResetFault):
            reset(self.connection)
        self.close_connection = True


@dataclass(frozen=True, slots=True)
class _BodyResponse:
    """A response with a body."""

    status: int
    fields: Mapping[str, str]
    data: bytes


def _build_response(
    storage: StorageServer, name: str, request_headers: Mapping[str, str], *, ignore_range: bool
) -> _BodyResponse | ErrorStatus:
    """Return the normal response to a request."""
    if storage.token is not None and (presented := bearer_token(request_headers)) != storage.token:
        return ErrorStatus(401 if presented is None else 403)
    stored = storage.get_object(name)
    if stored is None:
        return ErrorStatus(404)
    size = len(stored.data)
    common_headers: dict[str, str] = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    if storage.tags != "none":
        common_headers["ETag"] = ("W/" if storage.tags == "weak" else "") + stored.etag
    if storage.dates:
        common_headers["Last-Modified"] = formatdate(stored.modified, usegmt=True)
    if storage.honours_preconditions and not _is_precondition_met(stored, request_headers):
        return ErrorStatus(412, common_headers)
    try:
        wanted = (
            parse_range(request_headers["range"], size) if "range" in request_headers and not ignore_range else None
        )
    except RangeNotSatisfiable:
        return ErrorStatus(416, {**common_headers, "Content-Range": f"bytes */{size}"})
    if wanted is None:
        return _BodyResponse(200, {**common_headers, "Content-Length": str(size)}, stored.data)
    begin, end = wanted
    range_headers = {"Content-Range": f"bytes {begin}-{end - 1}/{size}", "Content-Length": str(end - begin)}
    return _BodyResponse(206, {**common_headers, **range_headers}, stored.data[begin:end])


def _is_precondition_met(stored: StoredObject, request_headers: Mapping[str, str]) -> bool:
    if "if-match" in request_headers:
        return etag_matches(request_headers["if-match"], stored.etag)
    if "if-unmodified-since" in request_headers:
        return stored.modified <= parsedate_to_datetime(request_headers["if-unmodified-since"]).timestamp()
    return True


def reset(connected: socket.socket) -> None:
    """Make a connection end with RST instead of FIN when it is closed."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
