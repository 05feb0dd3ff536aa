"""One connection to the image server. Runs on the source, on a separate thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus

from rfork.net import http_heads as http_fields
from rfork.net.http_heads import MalformedMessage, RequestHead, is_keep_alive, parse_request
from rfork.net.stream import Stream
from rfork.transport.http.responses import ImageResource, ImageResponse, error_response, respond

MAX_HEAD_BYTES = 16 << 10
"""Maximum bytes of a request line and its header fields."""
IDLE_TIMEOUT_S = 60.0
"""Maximum idle time in seconds of an authorized connection between two requests."""
SLICE_BYTES = 8 << 20
"""Maximum bytes of a body between two checks of the gate."""
LINGER_TIMEOUT_S = 1.0
LINGER_BYTES = 1 << 20


class ServerConnection:
    """One connection. `idle_timeout_s` limits the handshake, each request head and each slice of a body.

    `acquire_slot` is called with the fork_id once the gate has authorized a token; False means that no slot
    is free.
    """

    def __init__(
        self,
        stream: Stream,
        resource: ImageResource,
        idle_timeout_s: float,
        acquire_slot: Callable[[ServerConnection, str], bool],
    ) -> None:
        self.stream = stream
        self._resource = resource
        self._idle_timeout_s = idle_timeout_s
        self._acquire_slot = acquire_slot

    def run(self) -> None:
        """Serve requests until either side closes the connection.

        Raises OSError if the connection fails or stalls, and the gate's error if it revokes access while a
        body is sent: the reader then receives fewer bytes than announced.
        """
        self.stream.handshake(self._idle_timeout_s)
        received = b""
        timeout_s = self._idle_timeout_s
        alive = True
        while alive:
            try:
                head = read_head(self.stream, received, timeout_s, self._idle_timeout_s)
            except MalformedMessage as error:
                self._send("GET", error_response(HTTPStatus(error.status), str(error)), "", alive=False)
                break
            if head is None:
                return
            request, received = head
            response = self._handle(request)
            # The body of a rejected request is not read, so the next request could not be parsed.
            alive = response.status is not HTTPStatus.BAD_REQUEST and is_keep_alive(request)
            if response.fork_id is not None:
                timeout_s = IDLE_TIMEOUT_S
                if not self._acquire_slot(self, response.fork_id):
                    retry_after = ("Retry-After", "1")
                    response = error_response(HTTPStatus.SERVICE_UNAVAILABLE, "no free connection slot", retry_after)
                    alive = False
            self._send(request.method, response, http_fields.bearer_token(request.fields) or "", alive=alive)
        self._lingering_close()

    def _handle(self, request: RequestHead) -> ImageResponse:
        if "transfer-encoding" in request.fields or request.fields.get("content-length", "0") != "0":
            return error_response(HTTPStatus.BAD_REQUEST, "a request for an image must not have a body")
        return respond(request.method, request.request_target, request.fields, self._resource)

    def _send(self, method: str, response: ImageResponse, token: str, *, alive: bool) -> None:
        head = response.head(alive=alive)
        if method == "HEAD" or response.begin == response.end:
            body = b"" if method == "HEAD" else response.text
            self.stream.send([head, body], self._idle_timeout_s)
            return
        resource = self._resource
        begin, fork_id = response.begin, response.fork_id or ""
        while begin < response.end:
            end = begin + resource.gate.acquire_bytes(min(response.end - begin, SLICE_BYTES), fork_id)
            deadline = time.monotonic() + self._idle_timeout_s
            # Authorize each slice again: leases expire and weights change while a body is sent. GPU memory is
            # prefetched only within a slice: not before it is authorized, and no copy is in progress after
            # the block.
            with (
                resource.gate.read_guard(token, *response.image_range(begin, end), self.stream.abort),
                resource.image.reading(*response.image_range(begin, end)) as steps,
            ):
                prefix = [head, response.header[begin:end]]
                for views in steps:
                    self.stream.send([*prefix, *views], deadline - time.monotonic())
                    prefix = []
            head, begin = b"", end

    def _lingering_close(self) -> None:
        """Let the last response arrive: closing with unread bytes would reset the connection before it is
        delivered.
        """
        self.stream.shutdown_write()
        deadline = time.monotonic() + LINGER_TIMEOUT_S
        remaining = LINGER_BYTES
        while remaining > 0 and (data := self.stream.receive(1 << 16, deadline - time.monotonic())):
            remaining -= len(data)


def read_head(stream: Stream, received: bytes, idle_s: float, head_s: float) -> tuple[RequestHead, bytes] | None:
    """Read one request head; return it and any bytes after it, or None if the client closed the connection.

    Waits `idle_s` seconds for the first byte and from then on `head_s` for the rest in total. Raises
    TimeoutError or another OSError, and MalformedMessage.
    """
    has_started = bool(received)
    deadline = time.monotonic() + (head_s if has_started else idle_s)
    while (head := parse_request(received, MAX_HEAD_BYTES)) is None:
        data = stream.receive(4096, deadline - time.monotonic())
        if not data:
            return None
        if not has_started:
            has_started, deadline = True, time.monotonic() + head_s
        received += data
    return head
