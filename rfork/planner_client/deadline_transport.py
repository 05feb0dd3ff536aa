"""HTTP transport whose requests end by an absolute deadline, whatever the server sends.

httpx limits each wait for data, but not their sum: a server that sends one byte of the response every few
seconds would block the caller forever. Here each wait is limited to the time left until the deadline.
"""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from weakref import WeakSet

import httpcore
import httpx

DEADLINE: Final = "rfork.deadline"
"""Request extension: `time.monotonic()` value by which the response must be complete; without it, no limit."""
PIECE_BYTES: Final = 16 << 10

TlsContext = Callable[[], ssl.SSLContext]
"""Returns the TLS context for a new connection."""


class DeadlineTransport(httpx.BaseTransport):
    """Connection pool that honours the `DEADLINE` extension of requests. Thread-safe."""

    def __init__(self, tls_context: TlsContext) -> None:
        self._backend = _Backend(tls_context)
        self._pool = httpcore.ConnectionPool(
            ssl_context=untrusting_context(),  # replaced for each connection
            max_connections=100,
            max_keepalive_connections=20,
            keepalive_expiry=5.0,
            network_backend=self._backend,
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request and return its response, whose body is read before the same deadline."""
        if not isinstance(request.stream, httpx.SyncByteStream):
            raise TypeError("the request body cannot be sent synchronously")
        url = request.url
        sent = httpcore.Request(
            method=request.method,
            url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        with _httpx_errors(), self._backend.until(request.extensions.get(DEADLINE)):
            response = self._pool.handle_request(sent)
        if not isinstance(response.stream, Iterable):
            raise TypeError("the response body cannot be read synchronously")
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(response.stream, request, self._backend),
            extensions=response.extensions,
        )

    def interrupt(self) -> None:
        """Abort all requests in progress with an error, on whatever thread they wait."""
        self._backend.interrupt()

    def close(self) -> None:
        """Abort all requests and close all connections."""
        self.interrupt()
        self._pool.close()


class _Body(httpx.SyncByteStream):
    """Body of a response. Each read uses the current deadline of the request."""

    def __init__(self, stream: Iterable[bytes], request: httpx.Request, backend: _Backend) -> None:
        self._stream = stream
        self._request = request
        self._backend = backend

    def __iter__(self) -> Iterator[bytes]:
        pieces = iter(self._stream)
        while True:
            with _httpx_errors(), self._backend.until(self._request.extensions.get(DEADLINE)):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece

    def close(self) -> None:
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()


class _Backend(httpcore.NetworkBackend):
    """Opens connections and applies the deadline of the calling thread's request."""

    def __init__(self, tls_context: TlsContext) -> None:
        self._tls_context = tls_context
        self._sockets = httpcore.SyncBackend()
        self._local = threading.local()
        self._streams: WeakSet[_Stream] = WeakSet()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def until(self, deadline: float | None) -> Iterator[None]:
        """Apply this deadline to all waits of the calling thread inside the block."""
        self._local.deadline = deadline
        try:
            yield
        finally:
            self._local.deadline = None

    def left(self, timeout: float | None) -> float | None:
        """Return the time that one wait may take; zero or less after the deadline."""
        deadline: float | None = getattr(self._local, "deadline", None)
        if deadline is None:
            return timeout
        left = deadline - time.monotonic()
        return left if timeout is None else min(left, timeout)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address of the host that accepts, within `timeout` for all attempts."""
        allowed = self.left(timeout)
        deadline = None if allowed is None else time.monotonic() + allowed
        addresses = _addresses(host, port, allowed)
        options = list(socket_options or ())
        for position, address in enumerate(addresses):
            share = None if deadline is None else (deadline - time.monotonic()) / (len(addresses) - position)
            if share is not None and share <= 0:
                raise httpcore.ConnectTimeout(f"no connection to {host}:{port} in time")
            try:
                return self._track(self._sockets.connect_tcp(address, port, share, local_address, options))
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if position == len(addresses) - 1:
                    raise
        raise httpcore.ConnectError(f"{host} has no address")

    def interrupt(self) -> None:
        """Shut down all connections; a thread that waits for one of them wakes with an error."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.interrupt()

    def start_tls(
        self, stream: httpcore.NetworkStream, server_hostname: str | None, timeout: float | None
    ) -> httpcore.NetworkStream:
        """Return the stream under TLS, with the current context."""
        left = self.left(timeout)
        if left is not None and left <= 0:
            stream.close()
            raise httpcore.ConnectTimeout("no TLS handshake in time")
        return self._track(stream.start_tls(self._tls_context(), server_hostname, left))

    def _track(self, stream: httpcore.NetworkStream) -> _Stream:
        tracked = _Stream(stream, self)
        with self._lock:
            self._streams.add(tracked)
        return tracked


class _Stream(httpcore.NetworkStream):
    """One connection, each of whose waits ends by the deadline of the current request."""

    def __init__(self, stream: httpcore.NetworkStream, backend: _Backend) -> None:
        self._stream = stream
        self._backend = backend

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        left = self._backend.left(timeout)
        if left is not None and left <= 0:
            raise httpcore.ReadTimeout("the response was too slow")
        return self._stream.read(max_bytes, left)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for begin in range(0, len(buffer), PIECE_BYTES):
            left = self._backend.left(timeout)
            if left is not None and left <= 0:
                raise httpcore.WriteTimeout("the server read the request too slowly")
            self._stream.write(buffer[begin : begin + PIECE_BYTES], left)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return self._backend.start_tls(self._stream, server_hostname, timeout)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def interrupt(self) -> None:
        connection = self.get_extra_info("socket")
        with contextlib.suppress(OSError):
            # The base method: that of an SSL socket drops its state, which another thread may be using.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _addresses(host: str, port: int, timeout: float | None) -> list[str]:
    """Return the addresses of a host, resolved within `timeout` seconds."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    if timeout is None:
        return _resolved(host, port)
    results: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            results.put(_resolved(host, port))
        except OSError as error:
            results.put(error)

    # The resolver has no timeout: a name server that does not respond blocks this thread, not the caller.
    threading.Thread(target=resolve, name="rfork-resolve", daemon=True).start()
    try:
        addresses = results.get(timeout=max(0.0, timeout))
    except queue.Empty:
        raise httpcore.ConnectTimeout(f"the name {host} was not resolved in time") from None
    if isinstance(addresses, OSError):
        raise httpcore.ConnectError(str(addresses)) from addresses
    return addresses


def _resolved(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def untrusting_context() -> ssl.SSLContext:
    """Return a context that trusts no authority."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@contextlib.contextmanager
def _httpx_errors() -> Iterator[None]:
    """Convert errors of httpcore to the errors of httpx with the same names."""
    try:
        yield
    except (
        httpcore.TimeoutException,
        httpcore.NetworkError,
        httpcore.ProtocolError,
        httpcore.UnsupportedProtocol,
    ) as error:
        same = getattr(httpx, type(error).__name__, httpx.TransportError)
        raise same(str(error)) from error
    except httpcore.ConnectionNotAvailable as error:
        raise httpx.PoolTimeout(str(error)) from error
