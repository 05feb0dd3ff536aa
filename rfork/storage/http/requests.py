"""One request to a web server and its answer: connections, redirects, refusals."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rfork.errors import StorageError
from rfork.storage.http.connect import CancelScope
from rfork.storage.http.pool import HttpConnectionPool, PooledConnection
from rfork.storage.http.request import HttpRequest, Sign
from rfork.storage.http.responses import REDIRECTS, Explain, error_from_response
from rfork.storage.http.retry import RetryableError
from rfork.storage.http.timeout import ReadTimeout
from rfork.transport.http.parser import MalformedHead, ResponseHead, is_keep_alive, parse_response
from rfork.transport.http.stream import ScatterCursor, Stream

MAX_HEAD_BYTES: Final = 64 << 10
MAX_ERROR_BODY: Final = 16 << 10
"""Bytes of a refusal's text that are read, to be explained."""
MAX_REDIRECTS: Final = 5
EXPIRED: Final = (400, 401, 403, 404, 410)
"""What is answered where a redirect's signature has ended; 400 where its token has (S3, Google)."""


@dataclass(slots=True)
class StreamedResponse:
    """An answer whose body is still to come, but for what came along with its head."""

    head: ResponseHead
    buffered: bytes
    stream: Stream
    timeout: ReadTimeout
    read: bool = False

    def fill(self, cursor: ScatterCursor, count: int) -> None:
        """Receive the body, of `count` bytes, into the cursor. Raises Passing or OSError."""
        if len(self.buffered) > count:
            raise RetryableError("sent more than it was asked for")
        cursor.write_bytes(self.buffered)
        left = count - len(self.buffered)
        self.timeout.reset()
        while left:
            try:
                received = self.stream.receive_into(cursor, left, self.timeout.remaining())
            except TimeoutError:
                continue  # `left` says when it has been too long
            if not received:
                raise RetryableError(f"ended its answer {left} bytes early")
            self.timeout.record_body(received)
            left -= received
        self.read = True

    def text(self) -> bytes:
        """The body of a refusal, up to a limit, as far as it comes."""
        coded = self.head.fields.get("transfer-encoding", "").lower() == "chunked"
        content_length = self.head.fields.get("content-length", "")
        known = (
            not coded and len(content_length) < 19 and content_length.isdecimal()
        )  # Python reads no number of any length
        max_body_bytes = min(int(content_length), MAX_ERROR_BODY) if known else MAX_ERROR_BODY
        body = self.buffered
        while len(body) < max_body_bytes and not (coded and body.endswith(b"0\r\n\r\n")):
            try:
                data = _receive(self.stream, max_body_bytes - len(body), self.timeout)
            except (RetryableError, OSError):
                break  # the status has said already what was to be said
            if not data:
                break
            body += data
        self.read = content_length == str(len(body)) or (coded and body.endswith(b"0\r\n\r\n"))
        return decode_chunked(body) if coded else body


class HttpResource:
    """What lies behind a URL, asked for part by part. Thread-safe."""

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
        leg: CancelScope,
        timeout: Callable[[], ReadTimeout],
        *,
        extra: bool = False,
    ) -> Iterator[StreamedResponse]:
        """The answer to a GET with these fields: 200, 206, 412 or 416.

        The connection is kept when its body was read. Any other answer raises StorageError kinds or Passing;
        Ended and OSError come through.
        """
        try:
            yield from self._follow_redirects(fields, leg, timeout, extra)
        except (RetryableError, OSError):
            # What failed may be where a redirect led: the next attempt asks for the way again.
            self._redirected = None
            raise

    def _follow_redirects(
        self, fields: Mapping[str, str], leg: CancelScope, timeout: Callable[[], ReadTimeout], extra: bool
    ) -> Iterator[StreamedResponse]:
        # Where a redirect led is asked at once from then on: until it, signed as it may be, is refused.
        remembered = self._redirected
        request = remembered or self._sign()
        redirects = 0
        while redirects <= MAX_REDIRECTS:
            with self._response(request, fields, leg, timeout, extra) as reply:
                status = reply.head.status
                if status in (200, 206, 412, 416):
                    yield reply
                    return
                text = reply.text()
            location = reply.head.fields.get("location", "")
            if status in EXPIRED and remembered is not None:
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
        leg: CancelScope,
        timeout: Callable[[], ReadTimeout],
        extra: bool,
    ) -> Iterator[StreamedResponse]:
        connection, reply = self._send_request(request, fields, leg, timeout, extra)
        try:
            with leg.attached(connection.stream):
                yield reply
        except (RetryableError, OSError):
            self._drop_idle(connection, leg)
            raise
        finally:
            usable = reply.read and is_keep_alive(reply.head) and not leg.is_cancelled
            self._pool.release(connection, usable=usable)

    def _send_request(
        self,
        request: HttpRequest,
        fields: Mapping[str, str],
        leg: CancelScope,
        timeout: Callable[[], ReadTimeout],
        extra: bool,
    ) -> tuple[PooledConnection, StreamedResponse]:
        head = request.head({"Accept-Encoding": "identity", **fields})
        connection = self._acquire_connection(request, leg, fresh=False, extra=extra)
        try:
            return connection, self._send(connection, head, leg, timeout())
        except OSError:
            self._drop_idle(connection, leg)
            self._pool.release(connection, usable=False)
            if not connection.reused or leg.is_cancelled:
                raise
        except BaseException as error:
            if isinstance(error, RetryableError):
                self._drop_idle(connection, leg)
            self._pool.release(connection, usable=False)
            raise
        # Servers end connections that were idle; that is no failure of theirs.
        connection = self._acquire_connection(request, leg, fresh=True, extra=extra)
        try:
            return connection, self._send(connection, head, leg, timeout())
        except BaseException:
            self._pool.release(connection, usable=False)
            raise

    def _drop_idle(self, connection: PooledConnection, leg: CancelScope) -> None:
        """Where one that was kept fails by itself, others kept as long may be dead as well."""
        if connection.reused and not leg.is_cancelled:
            self._pool.drop_idle(connection.origin)

    def _acquire_connection(
        self, request: HttpRequest, leg: CancelScope, *, fresh: bool, extra: bool
    ) -> PooledConnection:
        origin = request.origin
        try:
            return self._pool.acquire(origin, leg, fresh=fresh, extra=extra)
        except ssl.SSLCertVerificationError as error:
            raise StorageError(
                f"{self.uri}: the certificate of {origin.host} is not trusted: {error.verify_message}",
                hint="RFORK_STORAGE_CA names the authorities that storage is checked by",
            ) from None
        except TimeoutError:
            raise RetryableError(f"{origin.host} does not accept connections") from None
        except OSError as error:
            raise RetryableError(f"cannot connect to {origin.host}: {error.strerror or error}") from None

    def _send(
        self, connection: PooledConnection, head: bytes, leg: CancelScope, timeout: ReadTimeout
    ) -> StreamedResponse:
        stream = connection.stream
        with leg.attached(stream):
            stream.send([head], timeout.remaining())
            received = b""
            try:
                while (parsed := parse_response(received, MAX_HEAD_BYTES)) is None:
                    data = _receive(stream, 4096, timeout)
                    if not data:
                        raise ConnectionResetError("closed the connection before it answered")
                    received += data
            except MalformedHead as error:
                raise RetryableError(f"does not answer in HTTP: {error}") from None
        return StreamedResponse(parsed[0], parsed[1], stream, timeout)


def decode_chunked(coded: bytes) -> bytes:
    """The text of a body in chunked coding (RFC 9112 7.1), as far as it came."""
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
            continue  # `left` says when it has been too long
        timeout.record(len(data))
        return data
