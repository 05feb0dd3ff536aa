"""How a connection to a web server is made, and how a wait on one is ended."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rfork.errors import SettingsError
from rfork.settings import StorageSettings
from rfork.storage.http.request import HttpOrigin
from rfork.transport.http.stream import PlainStream, Stream, TlsStream


class Cancelled(Exception):
    """Another thread ended this wait."""


class _Abortable(Protocol):
    def abort(self) -> None: ...


class CancelScope:
    """One thread's run at a range. Any thread may end it: whatever it waits on gives up at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abortable: _Abortable | None = None
        self._ended = threading.Event()
        self._process = os.getpid()

    @property
    def is_cancelled(self) -> bool:
        """Whether another thread wants it to stop."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> None:
        """Stand still for so long, or until it is ended."""
        self._ended.wait(seconds)

    @contextmanager
    def attached(self, abortable: _Abortable) -> Iterator[None]:
        """What is to be cut where this is ended within the block. Raises Ended where it was before."""
        with self._lock:
            if self.is_cancelled:
                raise Cancelled
            self._abortable = abortable
        try:
            yield
        finally:
            # From here on the connection may be another leg's: this one must not cut it any more.
            with self._lock:
                self._abortable = None

    def end(self) -> None:
        """End it, for good; safe from any thread. A run of the process that this was forked from goes on."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._ended.set()
            if self._abortable is not None:
                self._abortable.abort()


def client_context(settings: StorageSettings) -> ssl.SSLContext:
    """What storage servers are checked by: `settings.ca` alone, or the system's authorities.

    Raises SettingsError where the file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.ca is None:
        context.load_default_certs()
        return context
    try:
        context.load_verify_locations(cafile=settings.ca)
    except OSError as error:  # ssl.SSLError is one
        raise SettingsError(f"RFORK_STORAGE_CA: cannot use {settings.ca}: {error}") from error
    return context


class _ConnectingSocket:
    """A socket that is being connected."""

    def __init__(self, connecting: socket.socket) -> None:
        self._connecting = connecting

    def abort(self) -> None:
        try:
            self._connecting.shutdown(socket.SHUT_RDWR)
        except OSError:
            # Not begun, or over: then `connect` does not wait, and may say that it is connected.
            return


def open_connection(origin: HttpOrigin, context: ssl.SSLContext | None, timeout_s: float, leg: CancelScope) -> Stream:
    """Connect to the first of the origin's addresses that answers. Raises OSError or Ended."""
    failed: OSError | None = None
    addresses = socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    for family, socket_type, protocol, _, address in addresses:
        connecting = socket.socket(family, socket_type, protocol)
        try:
            connecting.settimeout(timeout_s)
            with leg.attached(_ConnectingSocket(connecting)):
                connecting.connect(address)
            if leg.is_cancelled:
                raise Cancelled
            return _wrap_stream(connecting, origin, context, timeout_s, leg)
        except OSError as error:
            connecting.close()
            failed = error
        except BaseException:
            connecting.close()
            raise
    raise failed or OSError("the name has no address")


def _wrap_stream(
    connected: socket.socket,
    origin: HttpOrigin,
    context: ssl.SSLContext | None,
    timeout_s: float,
    leg: CancelScope,
) -> Stream:
    if context is None:
        return PlainStream(connected)
    wrapped = context.wrap_socket(connected, server_hostname=origin.host, do_handshake_on_connect=False)
    try:
        stream = TlsStream(wrapped)
        with leg.attached(stream):
            stream.handshake(timeout_s)
    except BaseException:
        wrapped.close()
        raise
    return stream
