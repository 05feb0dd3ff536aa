"""One connection to the image server: requests in, answers out. Runs on the source, in its own thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus

from rfork.transport.http import headers as http_fields
from rfork.transport.http.parser import MalformedHead, RequestHead, is_keep_alive, parse_request
from rfork.transport.http.responses import ImageResource, ImageResponse, error_response, respond
from rfork.transport.http.stream import Stream

MAX_HEAD_BYTES = 16 << 10
"""Bytes of a request line and its fields together, at most."""
IDLE_S = 60.0
"""Seconds a connection that was admitted may rest between two requests."""
SLICE_BYTES = 8 << 20
"""The gate is asked again after at most so many bytes of a body."""
LINGER_TIMEOUT_S = 1.0
LINGER_BYTES = 1 << 20


class ServerConnection:
    """One connection. `source_idle_timeout_s` bounds the handshake, each request's head and each slice of a body.

    `acquire_slot` is asked once the gate has admitted a token, and told its fork_id; False means that none is
    left.
    """

    def __init__(
        self,
        stream: Stream,
        file: ImageResource,
        stall_s: float,
        acquire_slot: Callable[[ServerConnection, str], bool],
    ) -> None:
        self.stream = stream
        self._file = file
        self._stall_s = stall_s
        self._acquire_slot = acquire_slot

    def run(self) -> None:
        """Answer requests until one side has had enough.

        Raises OSError when the connection fails or stalls, and what the gate raises when it takes
        back in mid-body what it had admitted: the reader then gets fewer bytes than it was promised.
        """
        self.stream.handshake(self._stall_s)
        received = b""
        timeout_s = self._stall_s
        alive = True
        while alive:
            try:
                head = read_head(self.stream, received, timeout_s, self._stall_s)
            except MalformedHead as error:
                self._send("GET", error_response(HTTPStatus(error.status), str(error)), "", alive=False)
                break
            if head is None:
                return
            request, received = head
            decided = self._handle(request)
            # The body of a refused request stays unread: what follows it cannot be told from it.
            alive = decided.status is not HTTPStatus.BAD_REQUEST and is_keep_alive(request)
            if decided.fork_id is not None:
                timeout_s = IDLE_S
                if not self._acquire_slot(self, decided.fork_id):
                    again = ("Retry-After", "1")
                    decided = error_response(HTTPStatus.SERVICE_UNAVAILABLE, "all slots are taken", again)
                    alive = False
            self._send(request.method, decided, http_fields.bearer_token(request.fields) or "", alive=alive)
        self._lingering_close()

    def _handle(self, request: RequestHead) -> ImageResponse:
        if "transfer-encoding" in request.fields or request.fields.get("content-length", "0") != "0":
            return error_response(HTTPStatus.BAD_REQUEST, "a request for an image has no body")
        return respond(request.method, request.target, request.fields, self._file)

    def _send(self, method: str, decided: ImageResponse, token: str, *, alive: bool) -> None:
        head = decided.head(alive=alive)
        if method == "HEAD" or decided.begin == decided.end:
            body = b"" if method == "HEAD" else decided.text
            self.stream.send([head, body], self._stall_s)
            return
        file, data = self._file, len(self._file.header)
        begin, fork_id = decided.begin, decided.fork_id or ""
        while begin < decided.end:
            end = begin + file.gate.acquire_bytes(min(decided.end - begin, SLICE_BYTES), fork_id)
            until = time.monotonic() + self._stall_s
            # Asked again for each slice: leases end and weights change while a body is under way. What a
            # GPU holds is fetched ahead within a slice only: never before it is admitted, and once the
            # block ends no copy is under way.
            with (
                file.reading(token, begin, end, self.stream.abort),
                file.image.reading(max(0, begin - data), max(0, end - data)) as steps,
            ):
                front = [head, file.header[begin:end]]
                for views in steps:
                    self.stream.send([*front, *views], until - time.monotonic())
                    front = []
            head, begin = b"", end

    def _lingering_close(self) -> None:
        """Let the last answer arrive: closing with bytes unread would reset the connection under it."""
        self.stream.shutdown_write()
        until = time.monotonic() + LINGER_TIMEOUT_S
        left = LINGER_BYTES
        while left > 0 and (data := self.stream.receive(1 << 16, until - time.monotonic())):
            left -= len(data)


def read_head(stream: Stream, received: bytes, idle_s: float, head_s: float) -> tuple[RequestHead, bytes] | None:
    """Read one request's head: it, and the bytes behind it that came along; None: the client is done.

    Waits `idle_seconds` seconds for the first byte and from then on `head_s` for the rest, however the
    client spreads it. Raises TimeoutError or another OSError, and MalformedHead.
    """
    begun = bool(received)
    until = time.monotonic() + (head_s if begun else idle_s)
    while (head := parse_request(received, MAX_HEAD_BYTES)) is None:
        data = stream.receive(4096, until - time.monotonic())
        if not data:
            return None
        if not begun:
            begun, until = True, time.monotonic() + head_s
        received += data
    return head
