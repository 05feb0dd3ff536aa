"""Target side of the http transport: reads image ranges from any HTTP server into the tensors' memory.

The server is a live seed, or any server of a file with Range requests, such as nginx or an object store with
a snapshot. Only the head of a response is parsed; its body is received directly into the views.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping

from rfork.errors import SourceCorrupt, SourceUnavailable, SourceWeightsChanged
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.net import http_heads as http_fields
from rfork.net.http_heads import is_keep_alive
from rfork.net.stream import ScatterCursor, Stream
from rfork.transport.base import TokenSource
from rfork.transport.http.range_request import (
    HttpLocation,
    IdleTimeout,
    error_from_response,
    open_stream,
    read_body_into,
    send_range_request,
)

log = logger(__name__)

REQUEST_BYTES = 32 << 20
"""Maximum bytes of one request. Each request carries the newest token, and the source checks it again while
sending, so a request must finish well within a lease's lifetime.
"""


class HttpReader:
    """Reads image ranges from one file. Thread-safe: each concurrent read uses a separate connection.

    The image begins at file byte `data_offset`. If `etag` is empty, the tag of the first response is used.
    `context` None: plain TCP. `idle_timeout_s`: seconds without a byte after which a source counts as
    stalled.
    """

    def __init__(
        self,
        location: HttpLocation,
        image: Image,
        token: TokenSource,
        *,
        data_offset: int,
        etag: str,
        context: ssl.SSLContext | None,
        idle_timeout_s: float,
    ) -> None:
        self._location = location
        self._image = image
        self._token = token
        self._data_offset = data_offset
        self._etag = etag
        self._context = context
        self._idle_timeout_s = idle_timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[Stream] = []
        self._streams: set[Stream] = set()
        self.has_received = False
        """True if any byte of an image has been received."""

    def open(self, deadline: float) -> None:
        """Open the first connection, to detect an unreachable server early. Raises as `read`."""
        self._release(self._connect(deadline))

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` into the image; raises as `Reader.read`.

        Raises ValueError for a range outside the image.
        """
        with self._image.writing(begin, end) as steps:
            cursor = ScatterCursor((), steps)
            while cursor.left:
                until = min(cursor.done + REQUEST_BYTES, end - begin)
                self._read_request(cursor, begin, until, deadline)

    def set_rate_limit(self, rate: int | None) -> None:
        """Does nothing: the source throttles. See `Reader.set_rate_limit`."""

    def close(self) -> None:
        """Close all connections; reads in progress raise SourceUnavailable."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            streams = list(self._streams)
        for stream in streams:
            stream.abort()
        for stream in idle:
            self._discard(stream)

    def _read_request(self, cursor: ScatterCursor, begin: int, until: int, deadline: float) -> None:
        """Fill the cursor, which starts at image offset `begin`, until it has `until` bytes.

        A lost connection is replaced once and the rest requested on the new one: servers close idle
        connections, and a source that disconnected the reader reports the reason on the next request.
        """
        began = time.monotonic()
        try:
            self._run_request(self._acquire() or self._connect(deadline), cursor, begin, until, deadline)
            return
        except OSError as error:
            first = error
        if not self._closed:
            log.info(
                "connection replaced",
                source=str(self._location),
                reason=str(first),
                missing=until - cursor.done,
                seconds=round(time.monotonic() - began, 1),
            )
        stream = self._connect(deadline)
        try:
            self._run_request(stream, cursor, begin, until, deadline)
        except OSError as error:
            self._check_open()
            raise SourceUnavailable(f"{self._location} closed the connection twice: {first}, then {error}") from error

    def _run_request(self, stream: Stream, cursor: ScatterCursor, begin: int, until: int, deadline: float) -> None:
        """Send one request and read its response; keep the stream after success, otherwise close it."""
        succeeded = False
        try:
            succeeded = self._request(stream, cursor, begin, until, deadline)
        finally:
            if succeeded:
                self._release(stream)
            else:
                self._discard(stream)

    def _request(self, stream: Stream, cursor: ScatterCursor, begin: int, until: int, deadline: float) -> bool:
        idle_timeout = IdleTimeout(self._location, self._idle_timeout_s, deadline, self._mark_received)
        first, count = self._data_offset + begin + cursor.done, until - cursor.done
        response, body = send_range_request(stream, first, first + count, self._token(), self._etag, idle_timeout)
        if response.status != 206:
            raise error_from_response(stream, response, body, idle_timeout)
        self._check(response.fields, first, first + count)
        if len(body) > count:
            raise SourceCorrupt(f"{self._location} sent more than the {count} bytes requested")
        cursor.write_bytes(body)
        if body:
            self._mark_received()
        read_body_into(stream, cursor, count - len(body), idle_timeout)
        return is_keep_alive(response)

    def _mark_received(self) -> None:
        self.has_received = True

    def _check(self, fields: Mapping[str, str], begin: int, end: int) -> None:
        """Reject a 206 response whose body is not exactly file range `[begin, end)` of the expected file."""
        etag = fields.get("etag", "")
        with self._lock:
            self._etag = self._etag or etag
        if etag and etag != self._etag:
            raise SourceWeightsChanged(
                f"the file at {self._location} has changed: its entity tag is {etag}, not {self._etag}"
            )
        try:
            got_begin, got_end, size = http_fields.parse_content_range(fields.get("content-range", ""))
        except ValueError as error:
            raise SourceCorrupt(f"{self._location}: {error}") from None
        if (got_begin, got_end) != (begin, end):
            requested_text = f"instead of [{begin}, {end})"
            raise SourceCorrupt(f"{self._location} sent bytes [{got_begin}, {got_end}) of {size} {requested_text}")
        if fields.get("content-length") != str(end - begin) or "transfer-encoding" in fields:
            raise SourceCorrupt(f"{self._location} does not report a content length of {end - begin} bytes")
        if fields.get("content-encoding", "identity") != "identity":
            raise SourceCorrupt(f"{self._location} sent an encoded response: {fields['content-encoding']}")

    def _acquire(self) -> Stream | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _connect(self, deadline: float) -> Stream:
        self._check_open()
        stream = open_stream(self._location, self._context, self._idle_timeout_s, deadline)
        with self._lock:
            if not self._closed:
                self._streams.add(stream)
                return stream
        stream.close()
        raise SourceUnavailable(f"the reader of {self._location} was closed")

    def _release(self, stream: Stream) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(stream)
                return
        self._discard(stream)

    def _discard(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)
        stream.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SourceUnavailable(f"the reader of {self._location} was closed")
