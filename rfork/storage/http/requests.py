"""Sends one request to a web server and receives the response: connections, redirects, refusals."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final

from rfork.errors import StorageError
from rfork.net.connect import CancelScope
from rfork.net.http_heads import MalformedMessage
from rfork.net.pool import HttpConnectionPool, PooledConnection
from rfork.net.request import HttpRequest, InvalidRequest
from rfork.net.response import HttpResponse, ReadTimeout, StalledResponse
from rfork.storage.http.responses import REDIRECTS, Explain, error_from_response
from rfork.storage.http.retry import RetryableError

MAX_ERROR_BODY: Final = 16 << 10
"""Maximum bytes to read of an error response's body."""
MAX_REDIRECTS: Final = 5
EXPIRED_STATUSES: Final = (400, 401, 403, 404, 410)
"""Statuses for an expired signature of a redirect; 400 for an expired token (S3, Google)."""

Sign = Callable[[], HttpRequest]
"""Creates the request for one attempt. Called for each attempt, on any thread, because a presigned URL may
expire.
"""


class HttpResource:
    """The object at a URL, requested in parts. Thread-safe. `timeout_s` limits each connection attempt."""

    def __init__(
        self, uri: str, sign: Sign, pool: HttpConnectionPool, timeout_s: float, explain: Explain | None
    ) -> None:
        self.uri = uri
        self._sign = sign
        self._pool = pool
        self._timeout_s = timeout_s
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
    ) -> Iterator[HttpResponse]:
        """Send a GET with these fields and yield the response: status 200, 206, 412 or 416.

        The connection is kept if the body was read. For any other status, raises StorageError subclasses or
        RetryableError. Cancelled and OSError propagate.
        """
        try:
            yield from self._follow_redirects(fields, scope, timeout, extra)
        except InvalidRequest as error:
            raise StorageError(str(error)) from None
        except (RetryableError, OSError, StalledResponse, MalformedMessage) as error:
            # The redirect target may have failed: the next attempt resolves the redirect again.
            self._redirected = None
            if isinstance(error, StalledResponse):
                raise RetryableError(f"the server {error}") from None
            if isinstance(error, MalformedMessage):
                raise RetryableError(f"the server sent an invalid response: {error}") from None
            raise

    def _follow_redirects(
        self, fields: Mapping[str, str], scope: CancelScope, timeout: Callable[[], ReadTimeout], extra: bool
    ) -> Iterator[HttpResponse]:
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
                text = reply.text(MAX_ERROR_BODY)
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
    ) -> Iterator[HttpResponse]:
        message = [request.head({"Accept-Encoding": "identity", **fields})]
        connection = self._acquire(request, scope, fresh=False, extra=extra)
        with ExitStack() as stack:
            try:
                reply = stack.enter_context(self._pool.exchange(connection, message, scope, timeout()))
            except OSError:
                # Servers close idle connections; that does not count as a failure.
                if not connection.reused or scope.is_cancelled:
                    raise
                connection = self._acquire(request, scope, fresh=True, extra=extra)
                reply = stack.enter_context(self._pool.exchange(connection, message, scope, timeout()))
            yield reply

    def _acquire(self, request: HttpRequest, scope: CancelScope, *, fresh: bool, extra: bool) -> PooledConnection:
        origin = request.origin
        try:
            return self._pool.acquire(origin, scope, self._timeout_s, fresh=fresh, extra=extra)
        except ssl.SSLCertVerificationError as error:
            raise StorageError(
                f"{self.uri}: the certificate of {origin.host} is not trusted: {error.verify_message}",
                hint="set SSL_CERT_FILE to the certificate authorities of the storage server",
            ) from None
        except TimeoutError:
            raise RetryableError(f"{origin.host} does not accept connections") from None
        except OSError as error:
            raise RetryableError(f"cannot connect to {origin.host}: {error.strerror or error}") from None
