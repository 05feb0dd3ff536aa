"""One request to a web server and its answer: connections, redirects, refusals."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rfork.errors import StorageError
from rfork.storage.web.answer import REDIRECTS, Explain, refusal
from rfork.storage.web.dialling import Leg
from rfork.storage.web.patience import Patience
from rfork.storage.web.pool import Connection, Pool
from rfork.storage.web.request import Request, Sign
from rfork.storage.web.retry import Passing
from rfork.transport.http.heads import BadHead, ResponseHead, keeps_alive, parse_response
from rfork.transport.http.stream import Cursor, Stream

LARGEST_HEAD: Final = 64 << 10
LARGEST_TEXT: Final = 16 << 10
"""Bytes of a refusal's text that are read, to be explained."""
MOST_REDIRECTS: Final = 5
EXPIRED: Final = (400, 401, 403, 404, 410)
"""What is answered where a redirect's signature has ended; 400 where its token has (S3, Google)."""


@dataclass(slots=True)
class Reply:
    """An answer whose body is still to come, but for what came along with its head."""

    head: ResponseHead
    came: bytes
    stream: Stream
    patience: Patience
    read: bool = False

    def fill(self, cursor: Cursor, count: int) -> None:
        """Receive the body, of `count` bytes, into the cursor. Raises Passing or OSError."""
        if len(self.came) > count:
            raise Passing("sent more than it was asked for")
        cursor.put(self.came)
        left = count - len(self.came)
        self.patience.renew()
        while left:
            try:
                received = self.stream.receive_into(cursor, left, self.patience.left())
            except TimeoutError:
                continue  # `left` says when it has been too long
            if not received:
                raise Passing(f"ended its answer {left} bytes early")
            self.patience.came_of_body(received)
            left -= received
        self.read = True

    def text(self) -> bytes:
        """The body of a refusal, up to a limit, as far as it comes."""
        coded = self.head.fields.get("transfer-encoding", "").lower() == "chunked"
        told = self.head.fields.get("content-length", "")
        known = not coded and len(told) < 19 and told.isdecimal()  # Python reads no number of any length
        most = min(int(told), LARGEST_TEXT) if known else LARGEST_TEXT
        body = self.came
        while len(body) < most and not (coded and body.endswith(b"0\r\n\r\n")):
            try:
                data = _receive(self.stream, most - len(body), self.patience)
            except (Passing, OSError):
                break  # the status has said already what was to be said
            if not data:
                break
            body += data
        self.read = told == str(len(body)) or (coded and body.endswith(b"0\r\n\r\n"))
        return joined(body) if coded else body


class Resource:
    """What lies behind a URL, asked for part by part. Thread-safe."""

    def __init__(self, uri: str, sign: Sign, pool: Pool, explain: Explain | None) -> None:
        self.uri = uri
        self._sign = sign
        self._pool = pool
        self._explain = explain
        self._redirected: Request | None = None

    @contextmanager
    def get(
        self, fields: Mapping[str, str], leg: Leg, patience: Callable[[], Patience], *, extra: bool = False
    ) -> Iterator[Reply]:
        """The answer to a GET with these fields: 200, 206, 412 or 416.

        The connection is kept when its body was read. Any other answer raises StorageError kinds or Passing;
        Ended and OSError come through.
        """
        try:
            yield from self._followed(fields, leg, patience, extra)
        except (Passing, OSError):
            # What failed may be where a redirect led: the next attempt asks for the way again.
            self._redirected = None
            raise

    def _followed(
        self, fields: Mapping[str, str], leg: Leg, patience: Callable[[], Patience], extra: bool
    ) -> Iterator[Reply]:
        # Where a redirect led is asked at once from then on: until it, signed as it may be, is refused.
        remembered = self._redirected
        request = remembered or self._sign()
        redirects = 0
        while redirects <= MOST_REDIRECTS:
            with self._answer(request, fields, leg, patience, extra) as reply:
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
                request = self._redirected = request.redirected(location)
            else:
                raise refusal(self.uri, reply.head, text, self._explain)
        raise StorageError(f"{self.uri} redirects more than {MOST_REDIRECTS} times")

    @contextmanager
    def _answer(
        self,
        request: Request,
        fields: Mapping[str, str],
        leg: Leg,
        patience: Callable[[], Patience],
        extra: bool,
    ) -> Iterator[Reply]:
        connection, reply = self._ask(request, fields, leg, patience, extra)
        try:
            with leg.holding(connection.stream):
                yield reply
        except (Passing, OSError):
            self._distrust(connection, leg)
            raise
        finally:
            usable = reply.read and keeps_alive(reply.head) and not leg.ended
            self._pool.give_back(connection, usable=usable)

    def _ask(
        self,
        request: Request,
        fields: Mapping[str, str],
        leg: Leg,
        patience: Callable[[], Patience],
        extra: bool,
    ) -> tuple[Connection, Reply]:
        head = request.head({"Accept-Encoding": "identity", **fields})
        connection = self._taken(request, leg, fresh=False, extra=extra)
        try:
            return connection, self._sent(connection, head, leg, patience())
        except OSError:
            self._distrust(connection, leg)
            self._pool.give_back(connection, usable=False)
            if not connection.kept or leg.ended:
                raise
        except BaseException as error:
            if isinstance(error, Passing):
                self._distrust(connection, leg)
            self._pool.give_back(connection, usable=False)
            raise
        # Servers end connections that were idle; that is no failure of theirs.
        connection = self._taken(request, leg, fresh=True, extra=extra)
        try:
            return connection, self._sent(connection, head, leg, patience())
        except BaseException:
            self._pool.give_back(connection, usable=False)
            raise

    def _distrust(self, connection: Connection, leg: Leg) -> None:
        """Where one that was kept fails by itself, others kept as long may be dead as well."""
        if connection.kept and not leg.ended:
            self._pool.drop_idle(connection.origin)

    def _taken(self, request: Request, leg: Leg, *, fresh: bool, extra: bool) -> Connection:
        origin = request.origin
        try:
            return self._pool.take(origin, leg, fresh=fresh, extra=extra)
        except ssl.SSLCertVerificationError as error:
            raise StorageError(
                f"{self.uri}: the certificate of {origin.host} is not trusted: {error.verify_message}",
                hint="RFORK_STORAGE_CA names the authorities that storage is checked by",
            ) from None
        except TimeoutError:
            raise Passing(f"{origin.host} does not accept connections") from None
        except OSError as error:
            raise Passing(f"cannot connect to {origin.host}: {error.strerror or error}") from None

    def _sent(self, connection: Connection, head: bytes, leg: Leg, patience: Patience) -> Reply:
        stream = connection.stream
        with leg.holding(stream):
            stream.send([head], patience.left())
            received = b""
            try:
                while (parsed := parse_response(received, LARGEST_HEAD)) is None:
                    data = _receive(stream, 4096, patience)
                    if not data:
                        raise ConnectionResetError("closed the connection before it answered")
                    received += data
            except BadHead as error:
                raise Passing(f"does not answer in HTTP: {error}") from None
        return Reply(parsed[0], parsed[1], stream, patience)


def joined(coded: bytes) -> bytes:
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


def _receive(stream: Stream, most: int, patience: Patience) -> bytes:
    while True:
        try:
            data = stream.receive(most, patience.left())
        except TimeoutError:
            continue  # `left` says when it has been too long
        patience.came(len(data))
        return data
