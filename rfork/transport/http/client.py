"""The target side of the http transport: image ranges out of any HTTP server, into the tensors' memory.

The server is a live seed's, or any that serves a file with Range requests: a snapshot behind nginx or
an object store. Only an answer's head is parsed; its body goes from the socket into the views.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping

from rfork.errors import SourceCorrupt, SourceUnavailable, SourceWeightsChanged
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import TokenSource
from rfork.transport.http import headers as http_fields
from rfork.transport.http.parser import is_keep_alive
from rfork.transport.http.range_request import (
    HttpTarget,
    IdleTimeout,
    error_from_response,
    open_stream,
    read_body_into,
    send_range_request,
)
from rfork.transport.http.stream import ScatterCursor, Stream

log = logger(__name__)

REQUEST_BYTES = 32 << 20
"""Most bytes asked for at once. Each request shows the newest token, and the source looks at it again
while it sends: so one request must be done well within a lease's time."""


class HttpReader:
    """Reads image ranges from one file. Thread-safe: each read under way has a connection of its own.

    The image begins at file byte `data_offset`. `etag` empty: the first answer's is held to.
    `context` None: plain TCP. `source_idle_timeout_s`: seconds without a byte after which a source counts as stalled.
    """

    def __init__(
        self,
        http_target: HttpTarget,
        image: Image,
        token: TokenSource,
        *,
        data_offset: int,
        etag: str,
        context: ssl.SSLContext | None,
        stall_s: float,
    ) -> None:
        self._http_target = http_target
        self._image = image
        self._token = token
        self._data_offset = data_offset
        self._etag = etag
        self._context = context
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[Stream] = []
        self._streams: set[Stream] = set()
        self.answered = False
        """Whether a byte of an image has ever come from there."""

    def open(self, deadline: float) -> None:
        """Make the first connection, to learn at once whether there is a server. Raises as `read` does."""
        self._release(self._connect(deadline))

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` into the image; raises as `Reader.read` says.

        A range outside the image is a ValueError.
        """
        with self._image.writing(begin, end) as steps:
            cursor = ScatterCursor((), steps)
            while cursor.left:
                until = min(cursor.done + REQUEST_BYTES, end - begin)
                self._read_request(cursor, begin, until, deadline)

    def set_rate_limit(self, rate: int | None) -> None:
        """Nothing to do: the source sends as slowly as it likes. See `Reader.set_rate_limit`."""

    def close(self) -> None:
        """Drop all connections; reads under way raise SourceUnavailable."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            streams = list(self._streams)
        for stream in streams:
            stream.abort()
        for stream in idle:
            self._discard(stream)

    def _read_request(self, cursor: ScatterCursor, begin: int, until: int, deadline: float) -> None:
        """Fill the cursor, which began at image offset `begin`, until it has `until` bytes.

        A connection that drops is replaced once, and the rest asked for on the new one: servers close
        idle connections, and a source that cut a reader off says why when it is asked again.
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
                source=str(self._http_target),
                because=str(first),
                missing=until - cursor.done,
                seconds=round(time.monotonic() - began, 1),
            )
        stream = self._connect(deadline)
        try:
            self._run_request(stream, cursor, begin, until, deadline)
        except OSError as error:
            self._check_open()
            raise SourceUnavailable(
                f"{self._http_target} dropped the connection twice: {first}, then {error}"
            ) from error

    def _run_request(self, stream: Stream, cursor: ScatterCursor, begin: int, until: int, deadline: float) -> None:
        """One request and its answer; the stream is kept after a good one, and closed after any other."""
        good = False
        try:
            good = self._request(stream, cursor, begin, until, deadline)
        finally:
            if good:
                self._release(stream)
            else:
                self._discard(stream)

    def _request(self, stream: Stream, cursor: ScatterCursor, begin: int, until: int, deadline: float) -> bool:
        idle_timeout = IdleTimeout(self._http_target, self._stall_s, deadline, self._mark_answered)
        first, count = self._data_offset + begin + cursor.done, until - cursor.done
        response, body = send_range_request(stream, first, first + count, self._token(), self._etag, idle_timeout)
        if response.status != 206:
            raise error_from_response(stream, response, body, idle_timeout)
        self._check(response.fields, first, first + count)
        if len(body) > count:
            raise SourceCorrupt(f"{self._http_target} sends more than the {count} bytes it was asked for")
        cursor.write_bytes(body)
        if body:
            self._mark_answered()
        read_body_into(stream, cursor, count - len(body), idle_timeout)
        return is_keep_alive(response)

    def _mark_answered(self) -> None:
        self.answered = True

    def _check(self, fields: Mapping[str, str], begin: int, end: int) -> None:
        """Refuse a 206 answer whose body is not exactly file range `[begin, end)` of this very file."""
        etag = fields.get("etag", "")
        with self._lock:
            self._etag = self._etag or etag
        if etag and etag != self._etag:
            raise SourceWeightsChanged(
                f"{self._http_target} has another file by now: its tag is {etag}, not {self._etag}"
            )
        try:
            got_begin, got_end, size = http_fields.parse_content_range(fields.get("content-range", ""))
        except ValueError as error:
            raise SourceCorrupt(f"{self._http_target}: {error}") from None
        if (got_begin, got_end) != (begin, end):
            requested_text = f"where [{begin}, {end}) were asked for"
            raise SourceCorrupt(f"{self._http_target} gives bytes [{got_begin}, {got_end}) of {size} {requested_text}")
        if fields.get("content-length") != str(end - begin) or "transfer-encoding" in fields:
            raise SourceCorrupt(f"{self._http_target} does not say that its answer has {end - begin} bytes")
        if fields.get("content-encoding", "identity") != "identity":
            raise SourceCorrupt(f"{self._http_target} encodes its answer as {fields['content-encoding']}")

    def _acquire(self) -> Stream | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _connect(self, deadline: float) -> Stream:
        self._check_open()
        stream = open_stream(self._http_target, self._context, self._stall_s, deadline)
        with self._lock:
            if not self._closed:
                self._streams.add(stream)
                return stream
        stream.close()
        raise SourceUnavailable(f"the reader of {self._http_target} was closed")

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
            raise SourceUnavailable(f"the reader of {self._http_target} was closed")
