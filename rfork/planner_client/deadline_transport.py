"""Transport of httpx over `rfork.net`, whose requests end by an absolute deadline, whatever the server sends.

httpx's own transport limits each wait for data, but not their sum: a server that sends one byte of the
response every few seconds would block the caller forever.
"""

from __future__ import annotations

import contextlib
import math
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Final

import httpx

from rfork.net.connect import Cancelled, CancelScope
from rfork.net.http_heads import MalformedMessage
from rfork.net.pool import HttpConnectionPool
from rfork.net.request import HttpOrigin, InvalidRequest, encode_head
from rfork.net.response import ConnectionEnded, HttpResponse, ReadTimeout, StalledResponse

DEADLINE: Final = "rfork.deadline"
"""Request extension: `time.monotonic()` value by which the response must be complete; without it, no limit."""
ABORT: Final = "rfork.abort"
"""Response extension: function that ends the reading of the body, from any thread."""


class DeadlineTransport(httpx.BaseTransport):
    """Connection pool that honours the `DEADLINE` extension of requests. Thread-safe.

    `tls_context` returns the TLS context for a new connection.
    """

    def __init__(self, tls_context: Callable[[], ssl.SSLContext]) -> None:
        self._pool = HttpConnectionPool(tls_context)
        self._scope = CancelScope()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request and return its response, whose body is read before the same deadline."""
        timeouts = request.extensions["timeout"]
        deadline = request.extensions.get(DEADLINE, math.inf)
        url = request.url
        secure = url.scheme == "https"
        origin = HttpOrigin(secure, url.raw_host.decode("ascii"), url.port or (443 if secure else 80))
        with contextlib.ExitStack() as stack:
            scope = CancelScope()
            with _httpx_errors(httpx.WriteError, httpx.WriteTimeout):
                stack.enter_context(self._scope.attached(scope))
                head = encode_head(request.method, url.raw_path.decode("ascii"), request.headers.multi_items())
            connect_s = min(timeouts["connect"], deadline - time.monotonic())
            with _httpx_errors(httpx.ConnectError, httpx.ConnectTimeout):
                if connect_s <= 0:
                    raise TimeoutError("no time is left")
                connection = self._pool.acquire(origin, scope, connect_s)
            timeout = ReadTimeout(timeouts["read"], deadline=deadline)
            with _httpx_errors(httpx.ReadError, httpx.WriteTimeout):
                exchange = self._pool.exchange(connection, [head, request.read()], scope, timeout)
                response = stack.enter_context(exchange)
            return httpx.Response(
                status_code=response.head.status,
                headers=[
                    (name.encode("latin-1"), value.encode("latin-1")) for name, value in response.head.fields.items()
                ],
                stream=_Body(response, request, stack.pop_all()),
                extensions={ABORT: scope.abort},
            )

    def close(self) -> None:
        """Abort all requests, on whatever thread they wait, and close all connections."""
        self._scope.abort()
        self._pool.unregister()


class _Body(httpx.SyncByteStream):
    """Body of a response. Each read uses the current deadline of the request."""

    def __init__(self, response: HttpResponse, request: httpx.Request, exchange: contextlib.ExitStack) -> None:
        self._response = response
        self._request = request
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        pieces = self._response.pieces()
        while True:
            self._response.timeout.deadline = self._request.extensions.get(DEADLINE, math.inf)
            with _httpx_errors(httpx.ReadError, httpx.ReadTimeout):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def close(self) -> None:
        self._exchange.close()


@contextlib.contextmanager
def _httpx_errors(lost: type[httpx.TransportError], late: type[httpx.TransportError]) -> Iterator[None]:
    """Convert errors of the connection to those of httpx: `lost` for a failed one, `late` for a timeout."""
    try:
        yield
    except (MalformedMessage, ConnectionEnded) as error:
        raise httpx.RemoteProtocolError(str(error)) from error
    except InvalidRequest as error:
        raise httpx.LocalProtocolError(str(error)) from error
    except StalledResponse as error:
        raise httpx.ReadTimeout(str(error)) from error
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:
        raise lost(str(error)) from error
    except Cancelled as error:
        raise httpx.CloseError("the client was closed") from error
