"""Opens connections to web servers; waits can be cancelled from another thread."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rfork.errors import SettingsError, reason_of
from rfork.net.stream import PlainStream, Stream, TlsStream
from rfork.settings import StorageSettings
from rfork.storage.http.request import HttpOrigin


class Cancelled(Exception):
    """Another thread cancelled this operation."""


class _Abortable(Protocol):
    def abort(self) -> None: ...


class CancelScope:
    """Cancellation of one thread's attempt at a range. Any thread may cancel; blocking operations then fail
    immediately.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abortable: _Abortable | None = None
        self._ended = threading.Event()
        self._process = os.getpid()

    @property
    def is_cancelled(self) -> bool:
        """True if the attempt was cancelled."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep, or return early when cancelled."""
        self._ended.wait(seconds)

    @contextmanager
    def attached(self, abortable: _Abortable) -> Iterator[None]:
        """Abort `abortable` if the scope is cancelled within the block. Raises Cancelled if it already is."""
        with self._lock:
            if self.is_cancelled:
                raise Cancelled
            self._abortable = abortable
        try:
            yield
        finally:
            # From here on, another attempt may use the connection: this scope must not abort it any more.
            with self._lock:
                self._abortable = None

    def end(self) -> None:
        """Cancel permanently, from any thread. Does nothing in a forked child process: the parent's attempt
        continues.
        """
        if self._process != os.getpid():
            return
        with self._lock:
            self._ended.set()
            if self._abortable is not None:
                self._abortable.abort()


def client_context(settings: StorageSettings) -> ssl.SSLContext:
    """Return the TLS context for storage servers: trusts `settings.ca` only, or else the system's
    authorities.

    Raises SettingsError if the file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.ca is None:
        context.load_default_certs()
        return context
    try:
        context.load_verify_locations(cafile=settings.ca)
    except OSError as error:  # includes ssl.SSLError
        raise SettingsError(f"SSL_CERT_FILE: cannot use {settings.ca}: {reason_of(error)}") from error
    return context


class _ConnectingSocket:
    """A socket with a connect in progress."""

    def __init__(self, connecting: socket.socket) -> None:
        self._connecting = connecting

    def abort(self) -> None:
        try:
            self._connecting.shutdown(socket.SHUT_RDWR)
        except OSError:
            # Not started, or finished: then `connect` does not block, and may succeed.
            return


def open_connection(origin: HttpOrigin, context: ssl.SSLContext | None, timeout_s: float, scope: CancelScope) -> Stream:
    """Connect to the first reachable address of the origin. Raises OSError or Cancelled."""
    failed: OSError | None = None
    addresses = socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    for family, socket_type, protocol, _, address in addresses:
        connecting = socket.socket(family, socket_type, protocol)
        try:
            connecting.settimeout(timeout_s)
            with scope.attached(_ConnectingSocket(connecting)):
                connecting.connect(address)
            if scope.is_cancelled:
                raise Cancelled
            return _wrap_stream(connecting, origin, context, timeout_s, scope)
        except OSError as error:
            connecting.close()
            failed = error
        except BaseException:
            connecting.close()
            raise
    raise failed or OSError("the host name has no address")


def _wrap_stream(
    connected: socket.socket,
    origin: HttpOrigin,
    context: ssl.SSLContext | None,
    timeout_s: float,
    scope: CancelScope,
) -> Stream:
    if context is None:
        return PlainStream(connected)
    wrapped = context.wrap_socket(connected, server_hostname=origin.host, do_handshake_on_connect=False)
    try:
        stream = TlsStream(wrapped)
        with scope.attached(stream):
            stream.handshake(timeout_s)
    except BaseException:
        wrapped.close()
        raise
    return stream
