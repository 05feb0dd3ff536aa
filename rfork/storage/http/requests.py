"""Sends one request to a web server and receives the response: connections, redirects, refusals."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rfork.errors import StorageError
from rfork.net.http_heads import MalformedHead, ResponseHead, is_keep_alive, parse_response
from rfork.net.stream import ScatterCursor, Stream
from rfork.storage.http.connect import CancelScope
from rfork.storage.http.pool import HttpConnectionPool, PooledConnection
from rfork.storage.http.request import HttpRequest, Sign
from rfork.storage.http.responses import REDIRECTS, Explain, error_from_response
from rfork.storage.http.retry import RetryableError
from rfork.storage.http.timeout import ReadTimeout

MAX_HEAD_BYTES: Final = 64 << 10
MAX_ERROR_BODY: Final = 16 << 10
"""Maximum bytes to read of an error response's body."""
MAX_REDIRECTS: Final = 5
EXPIRED_STATUSES: Final = (400, 401, 403, 404, 410)
"""Statuses for an expired signature of a redirect; 400 for an expired token (S3, Google)."""


@dataclass(slots=True)
class StreamedResponse:
    """A response whose head has arrived; `buffered` is the part of the body that came with it."""

    head: ResponseHead
    buffered: bytes
    stream: Stream
    timeout: ReadTimeout
    read: bool = False

    def fill(self, cursor: ScatterCursor, count: int) -> None:
        """Receive a body of `count` bytes into the cursor. Raises RetryableError or OSError."""
        if len(self.buffered) > count:
            raise RetryableError("the server sent more than requested")
        cursor.write_bytes(self.buffered)
        left = count - len(self.buffered)
        self.timeout.reset()
        while left:
            try:
                received = self.stream.receive_into(cursor, left, self.timeout.remaining())
            except TimeoutError:
                continue  # `remaining` raises after the timeout
            if not received:
                raise RetryableError(f"the server ended its response {left} bytes early")
            self.timeout.record_body(received)
            left -= received
        self.read = True

    def text(self) -> bytes:
        """Return the body of an error response, up to a limit, as far as it arrives."""
        coded = self.head.fields.get("transfer-encoding", "").lower() == "chunked"
        content_length = self.head.fields.get("content-length", "")
        known = (
            not coded and len(content_length) < 19 and content_length.isdecimal()
        )  # Python refuses to parse very long numbers
        max_body_bytes = min(int(content_length), MAX_ERROR_BODY) if known else MAX_ERROR_BODY
        body = self.buffered
        while len(body) < max_body_bytes and not (coded and body.endswith(b"0\r\n\r\n")):
            try:
                data = _receive(self.stream, max_body_bytes - len(body), self.timeout)
            except (RetryableError, OSError):
                break  # the status alone must suffice
            if not data:
                break
            body += data
        self.read = content_length == str(len(body)) or (coded and body.endswith(b"0\r\n\r\n"))
        return decode_chunked(body) if coded else body


class HttpResource:
    """The object at a URL, requested in parts. Thread-safe."""

    def __init__(self, uri: str, sign: Sign, pool: HttpConnectionPool, explain: Explain | None) -> None:
        self.uri = uri
        self._sign = sign
        self._pool = pool
        self._explain = explain
        self._redirected: HttpRequest | None = None

    @contextmanager
    def get(
        self,
        fields: Mapping[str, str],
        scope: CancelScope,
        timeout: Callable[[], ReadTimeout],
        *,
        extra: bool = False,
    ) -> Iterator[StreamedResponse]:
        """Send a GET with these fields and yield the response: status 200, 206, 412 or 416.

        The connection is kept if the body was read. For any other status, raises StorageError subclasses or
        RetryableError. Cancelled and OSError propagate.
        """
        try:
            yield from self._follow_redirects(fields, scope, timeout, extra)
        except (RetryableError, OSError):
            # The redirect target may have failed: the next attempt resolves the redirect again.
            self._redirected = None
            raise

    def _follow_redirects(
        self, fields: Mapping[str, str], scope: CancelScope, timeout: Callable[[], ReadTimeout], extra: bool
    ) -> Iterator[StreamedResponse]:
        # A redirect target is remembered for later requests, until it (or its signature) is refused.
        remembered = self._redirected
        request = remembered or self._sign()
        redirects = 0
        while redirects <= MAX_REDIRECTS:
            with self._response(request, fields, scope, timeout, extra) as reply:
                status = reply.head.status
                if status in (200, 206, 412, 416):
                    yield reply
                    return
                text = reply.text()
            location = reply.head.fields.get("location", "")
            if status in EXPIRED_STATUSES and remembered is not None:
                remembered = self._redirected = None
                request = self._sign()
            elif status in REDIRECTS and location:
                redirects += 1
                request = self._redirected = request.follow(location)
            else:
                raise error_from_response(self.uri, reply.head, text, self._explain)
        raise StorageError(f"{self.uri} redirects more than {MAX_REDIRECTS} times")

    @contextmanager
    def _response(
        self,
        request: HttpRequest,
        fields: Mapping[str, str],
        scope: CancelScope,
        timeout: Callable[[], ReadTimeout],
        extra: bool,
    ) -> Iterator[StreamedResponse]:
        connection, reply = self._send_request(request, fields, scope, timeout, extra)
        try:
            with scope.attached(connection.stream):
                yield reply
        except (RetryableError, OSError):
            self._drop_idle(connection, scope)
            raise
        finally:
            usable = reply.read and is_keep_alive(reply.head) and not scope.is_cancelled
            self._pool.release(connection, usable=usable)

    def _send_request(
        self,
        request: HttpRequest,
        fields: Mapping[str, str],
        scope: CancelScope,
        timeout: Callable[[], ReadTimeout],
        extra: bool,
    ) -> tuple[PooledConnection, StreamedResponse]:
        head = request.head({"Accept-Encoding": "identity", **fields})
        connection = self._acquire_connection(request, scope, fresh=False, extra=extra)
        try:
            return connection, self._send(connection, head, scope, timeout())
        except OSError:
            self._drop_idle(connection, scope)
            self._pool.release(connection, usable=False)
            if not connection.reused or scope.is_cancelled:
                raise
        except BaseException as error:
            if isinstance(error, RetryableError):
                self._drop_idle(connection, scope)
            self._pool.release(connection, usable=False)
            raise
        # Servers close idle connections; that does not count as a failure.
        connection = self._acquire_connection(request, scope, fresh=True, extra=extra)
        try:
            return connection, self._send(connection, head, scope, timeout())
        except BaseException:
            self._pool.release(connection, usable=False)
            raise

    def _drop_idle(self, connection: PooledConnection, scope: CancelScope) -> None:
        """After a reused connection failed, drop the other idle ones, which may be dead as well."""
        if connection.reused and not scope.is_cancelled:
            self._pool.drop_idle(connection.origin)

    def _acquire_connection(
        self, request: HttpRequest, scope: CancelScope, *, fresh: bool, extra: bool
    ) -> PooledConnection:
        origin = request.origin
        try:
            return self._pool.acquire(origin, scope, fresh=fresh, extra=extra)
        except ssl.SSLCertVerificationError as error:
            raise StorageError(
                f"{self.uri}: the certificate of {origin.host} is not trusted: {error.verify_message}",
                hint="set SSL_CERT_FILE to the certificate authorities of the storage server",
            ) from None
        except TimeoutError:
            raise RetryableError(f"{origin.host} does not accept connections") from None
        except OSError as error:
            raise RetryableError(f"cannot connect to {origin.host}: {error.strerror or error}") from None

    def _send(
        self, connection: PooledConnection, head: bytes, scope: CancelScope, timeout: ReadTimeout
    ) -> StreamedResponse:
        stream = connection.stream
        with scope.attached(stream):
            stream.send([head], timeout.remaining())
            received = b""
            try:
                while (parsed := parse_response(received, MAX_HEAD_BYTES)) is None:
                    data = _receive(stream, 4096, timeout)
                    if not data:
                        raise ConnectionResetError("the server closed the connection before it responded")
                    received += data
            except MalformedHead as error:
                raise RetryableError(f"the server does not respond in HTTP: {error}") from None
        return StreamedResponse(parsed[0], parsed[1], stream, timeout)


def decode_chunked(coded: bytes) -> bytes:
    """Decode a body in chunked coding (RFC 9112 7.1), as far as it arrived."""
    text, rest = b"", coded
    while True:
        size, _, rest = rest.partition(b"\r\n")
        try:
            count = int(size.partition(b";")[0], 16)
        except ValueError:
            return text
        if count <= 0:
            return text
        text, rest = text + rest[:count], rest[count + 2 :]


def _receive(stream: Stream, max_bytes: int, timeout: ReadTimeout) -> bytes:
    while True:
        try:
            data = stream.receive(max_bytes, timeout.remaining())
        except TimeoutError:
            continue  # `remaining` raises after the timeout
        timeout.record(len(data))
        return data
