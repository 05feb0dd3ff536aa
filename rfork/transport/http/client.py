"""The target side of the http transport: image ranges out of any HTTP server, into the tensors' memory.

The server is a live seed's, or any that serves a file with Range requests: a snapshot behind nginx or
an object store. Only an answer's head is parsed; its body goes from the socket into the views.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping

from rfork.errors import SourceChanged, SourceCorrupt, SourceGone
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.base import TokenSource
from rfork.transport.http import fields as http_fields
from rfork.transport.http.exchange import Patience, Place, ask, dial, fill, refused
from rfork.transport.http.heads import keeps_alive
from rfork.transport.http.stream import Cursor, Stream

log = logger(__name__)

REQUEST_BYTES = 32 << 20
"""Most bytes asked for at once. Each request shows the newest token, and the source looks at it again
while it sends: so one request must be done well within a lease's time."""


class HttpReader:
    """Reads image ranges from one file. Thread-safe: each read under way has a connection of its own.

    The image begins at file byte `data_offset`. `etag` empty: the first answer's is held to.
    `context` None: plain TCP. `stall_s`: seconds without a byte after which a source counts as stalled.
    """

    def __init__(
        self,
        place: Place,
        image: Image,
        token: TokenSource,
        *,
        data_offset: int,
        etag: str,
        context: ssl.SSLContext | None,
        stall_s: float,
    ) -> None:
        self._place = place
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
        self._give_back(self._connect(deadline))

    def read(self, begin: int, end: int, deadline: float) -> None:
        """Copy image range `[begin, end)` into the image; raises as `Reader.read` says.

        A range outside the image is a ValueError.
        """
        with self._image.writing(begin, end) as steps:
            cursor = Cursor((), steps)
            while cursor.left:
                until = min(cursor.done + REQUEST_BYTES, end - begin)
                self._read_request(cursor, begin, until, deadline)

    def hold_to(self, rate: int | None) -> None:
        """Nothing to do: the source sends as slowly as it likes. See `Reader.hold_to`."""

    def close(self) -> None:
        """Drop all connections; reads under way raise SourceGone."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            streams = list(self._streams)
        for stream in streams:
            stream.cut()
        for stream in idle:
            self._drop(stream)

    def _read_request(self, cursor: Cursor, begin: int, until: int, deadline: float) -> None:
        """Fill the cursor, which began at image offset `begin`, until it has `until` bytes.

        A connection that drops is replaced once, and the rest asked for on the new one: servers close
        idle connections, and a source that cut a reader off says why when it is asked again.
        """
        began = time.monotonic()
        try:
            self._exchange(self._take() or self._connect(deadline), cursor, begin, until, deadline)
            return
        except OSError as error:
            first = error
        if not self._closed:
            log.info(
                "connection replaced",
                source=str(self._place),
                because=str(first),
                missing=until - cursor.done,
                seconds=round(time.monotonic() - began, 1),
            )
        stream = self._connect(deadline)
        try:
            self._exchange(stream, cursor, begin, until, deadline)
        except OSError as error:
            self._check_open()
            raise SourceGone(f"{self._place} dropped the connection twice: {first}, then {error}") from error

    def _exchange(self, stream: Stream, cursor: Cursor, begin: int, until: int, deadline: float) -> None:
        """One request and its answer; the stream is kept after a good one, and closed after any other."""
        good = False
        try:
            good = self._request(stream, cursor, begin, until, deadline)
        finally:
            if good:
                self._give_back(stream)
            else:
                self._drop(stream)

    def _request(self, stream: Stream, cursor: Cursor, begin: int, until: int, deadline: float) -> bool:
        patience = Patience(self._place, self._stall_s, deadline, self._note_answer)
        first, count = self._data_offset + begin + cursor.done, until - cursor.done
        response, body = ask(stream, first, first + count, self._token(), self._etag, patience)
        if response.status != 206:
            raise refused(stream, response, body, patience)
        self._check(response.fields, first, first + count)
        if len(body) > count:
            raise SourceCorrupt(f"{self._place} sends more than the {count} bytes it was asked for")
        cursor.put(body)
        if body:
            self._note_answer()
        fill(stream, cursor, count - len(body), patience)
        return keeps_alive(response)

    def _note_answer(self) -> None:
        self.answered = True

    def _check(self, fields: Mapping[str, str], begin: int, end: int) -> None:
        """Refuse a 206 answer whose body is not exactly file range `[begin, end)` of this very file."""
        etag = fields.get("etag", "")
        with self._lock:
            self._etag = self._etag or etag
        if etag and etag != self._etag:
            raise SourceChanged(f"{self._place} has another file by now: its tag is {etag}, not {self._etag}")
        try:
            got_begin, got_end, size = http_fields.content_range(fields.get("content-range", ""))
        except ValueError as error:
            raise SourceCorrupt(f"{self._place}: {error}") from None
        if (got_begin, got_end) != (begin, end):
            asked = f"where [{begin}, {end}) were asked for"
            raise SourceCorrupt(f"{self._place} gives bytes [{got_begin}, {got_end}) of {size} {asked}")
        if fields.get("content-length") != str(end - begin) or "transfer-encoding" in fields:
            raise SourceCorrupt(f"{self._place} does not say that its answer has {end - begin} bytes")
        if fields.get("content-encoding", "identity") != "identity":
            raise SourceCorrupt(f"{self._place} encodes its answer as {fields['content-encoding']}")

    def _take(self) -> Stream | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _connect(self, deadline: float) -> Stream:
        self._check_open()
        stream = dial(self._place, self._context, self._stall_s, deadline)
        with self._lock:
            if not self._closed:
                self._streams.add(stream)
                return stream
        stream.close()
        raise SourceGone(f"the reader of {self._place} was closed")

    def _give_back(self, stream: Stream) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(stream)
                return
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)
        stream.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SourceGone(f"the reader of {self._place} was closed")
