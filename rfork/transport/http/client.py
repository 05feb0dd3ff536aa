"""Target side of the http transport: reads image ranges from any HTTP server into the tensors' memory.

The server is a live seed, or any server of a file with Range requests, such as nginx or an object store with
a snapshot. Nothing waits longer than the deadline, or than the idle timeout for the next byte.
"""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from rfork.errors import (
    LeaseRejected,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    SourceUnreachable,
    SourceWeightsChanged,
)
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.net.connect import Cancelled, CancelScope
from rfork.net.http_heads import MalformedMessage, ResponseHead, check_partial_content
from rfork.net.pool import HttpConnectionPool, PooledConnection
from rfork.net.request import HttpRequest, InvalidRequest
from rfork.net.response import HttpResponse, ReadTimeout, StalledResponse
from rfork.net.stream import ScatterCursor
from rfork.transport.base import CONNECT_TIMEOUT_S, TokenSource

log = logger(__name__)

REQUEST_BYTES = 32 << 20
"""Maximum bytes of one request. Each request carries the newest token, and the source checks it again while
sending, so a request must finish well within a lease's lifetime.
"""
MAX_ERROR_BODY = 4096
"""Maximum bytes of an error response's text that are read for the error message."""

_VISIBLE = re.compile(r"[\x21-\x7e]+")
_MEANING: Mapping[int, type[RforkError]] = {
    401: LeaseRejected,
    403: LeaseRejected,
    409: SourceBusy,
    429: SourceBusy,
    503: SourceBusy,
    410: SourceWeightsChanged,
    412: SourceWeightsChanged,
}


class HttpReader:
    """Reads image ranges from one URL. Thread-safe: each concurrent read uses a separate connection.

    If `etag` is empty, the tag of the first response is used. `tls_context` returns the context of an https
    connection. `idle_timeout_s`: seconds without a byte after which a source counts as stalled. The constructor
    raises SourceCorrupt for an invalid URL.
    """

    def __init__(
        self,
        url: str,
        image: Image,
        token: TokenSource,
        *,
        etag: str,
        tls_context: Callable[[], ssl.SSLContext],
        idle_timeout_s: float,
    ) -> None:
        self._file = HttpRequest(url)
        try:
            self._origin = self._file.origin
            self._file.head({})
        except InvalidRequest as error:
            raise SourceCorrupt(f"invalid URL of a source: {error}") from None
        self._authority = urlsplit(url).netloc
        self._image = image
        self._token = token
        self._etag = etag
        self._idle_timeout_s = idle_timeout_s
        self._lock = threading.Lock()
        self._scope = CancelScope()
        self._pool = HttpConnectionPool(tls_context)
        self.answered = False
        """True once the server has begun to send bytes of the image: until then, its packets may be lost."""

    def open(self, deadline: float) -> None:
        """Open the first connection, to detect an unreachable server early. Raises as `read`."""
        self._pool.release(self._acquire(deadline, fresh=False), usable=True)

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
        self._scope.abort()
        self._pool.unregister()

    def _read_request(self, cursor: ScatterCursor, begin: int, until: int, deadline: float) -> None:
        """Fill the cursor, which starts at image offset `begin`, until it has `until` bytes.

        A lost connection is replaced once and the rest requested on the new one: servers close idle
        connections, and a source that disconnected the reader reports the reason on the next request.
        """
        began = time.monotonic()
        try:
            self._request(cursor, begin, until, deadline, fresh=False)
            return
        except OSError as error:
            first = error
        if not self._scope.is_cancelled:
            log.info(
                "connection replaced",
                source=self._authority,
                reason=str(first),
                missing=until - cursor.done,
                seconds=round(time.monotonic() - began, 1),
            )
        try:
            self._request(cursor, begin, until, deadline, fresh=True)
        except OSError as error:
            if self._scope.is_cancelled:
                raise self._closed_error() from None
            raise SourceUnavailable(f"{self._authority} closed the connection twice: {first}, then {error}") from error

    def _request(self, cursor: ScatterCursor, begin: int, until: int, deadline: float, *, fresh: bool) -> None:
        """Send one request and receive its body. Raises OSError if the connection is lost."""
        first, count = begin + cursor.done, until - cursor.done
        message = [self._head(first, first + count)]
        connection = self._acquire(deadline, fresh=fresh)
        timeout = ReadTimeout(self._idle_timeout_s, deadline=deadline)
        try:
            with self._pool.exchange(connection, message, self._scope, timeout) as response:
                if response.head.status != 206:
                    raise self._refusal(response)
                self._check(response.head, first, first + count)
                self.answered = True
                response.fill(cursor, count)
        except Cancelled:
            raise self._closed_error() from None
        except TimeoutError:
            raise SourceTimeout(f"{self._authority} does not accept requests") from None
        except StalledResponse as error:
            raise SourceTimeout(f"{self._authority} {error}") from None
        except MalformedMessage as error:
            raise SourceCorrupt(f"{self._authority} sent an invalid HTTP response: {error}") from None

    def _head(self, begin: int, end: int) -> bytes:
        """Return the request for file range `[begin, end)`."""
        fields = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        if token := self._token():
            if not _VISIBLE.fullmatch(token):
                raise LeaseRejected("a lease token must not contain spaces or control characters")
            fields["Authorization"] = f"Bearer {token}"
        # Weak tags never match (RFC 9110 13.1.1).
        if not self._etag.startswith("W/") and _VISIBLE.fullmatch(self._etag):
            fields["If-Match"] = self._etag
        return self._file.head(fields)

    def _check(self, head: ResponseHead, begin: int, end: int) -> None:
        """Reject a 206 response whose body is not exactly file range `[begin, end)` of the expected file."""
        etag = head.fields.get("etag", "")
        with self._lock:
            self._etag = self._etag or etag
        if etag and etag != self._etag:
            raise SourceWeightsChanged(
                f"the file at {self._authority} has changed: its entity tag is {etag}, not {self._etag}"
            )
        try:
            check_partial_content(head.fields, begin, end)
        except ValueError as error:
            raise SourceCorrupt(f"{self._authority} {error}") from None

    def _refusal(self, response: HttpResponse) -> RforkError:
        """Return the error for a response other than 206, with the server's reason if it is plain text."""
        status, fields = response.head.status, response.head.fields
        if status == 200:
            return SourceCorrupt(f"{self._authority} does not support range requests: it would send the complete file")
        reason = ""
        if fields.get("content-type", "").startswith("text/plain") and "content-length" in fields:
            reason = " ".join(response.text(MAX_ERROR_BODY).decode("utf-8", "replace").split())
        error_type = _MEANING.get(status, SourceUnavailable if status >= 500 else SourceCorrupt)
        return error_type(f"{self._authority} responded {status}: {reason or 'no reason stated'}")

    def _acquire(self, deadline: float, *, fresh: bool) -> PooledConnection:
        """Return a connection. Raises SourceUnavailable, SourceTimeout or SourceUnreachable."""
        seconds = min(self._idle_timeout_s, CONNECT_TIMEOUT_S, deadline - time.monotonic())
        if seconds <= 0:
            raise SourceTimeout(f"{self._authority} was too slow: the read's deadline has passed")
        try:
            return self._pool.acquire(self._origin, self._scope, seconds, fresh=fresh)
        except Cancelled:
            raise self._closed_error() from None
        except TimeoutError:
            raise SourceUnreachable(f"no connection to {self._authority} within {seconds:.1f} s") from None
        except OSError as error:
            raise SourceUnavailable(f"cannot connect to {self._authority}: {error}") from error

    def _closed_error(self) -> SourceUnavailable:
        return SourceUnavailable(f"the reader of {self._authority} was closed")
