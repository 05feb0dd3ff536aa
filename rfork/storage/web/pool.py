"""Connections to web servers, kept alive from request to request, and how a wait on one is ended."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rfork.errors import SettingsError
from rfork.settings import StorageSettings
from rfork.storage.web.hedge import Hedges
from rfork.storage.web.request import Origin
from rfork.transport.http.stream import PlainStream, Stream, TlsStream


class Ended(Exception):
    """Another thread ended this wait."""


class _Cuttable(Protocol):
    def cut(self) -> None: ...


class Leg:
    """One thread's run at a range. Any thread may end it: whatever it waits on gives up at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: _Cuttable | None = None
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether another thread wants it to stop."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> None:
        """Stand still for so long, or until it is ended."""
        self._ended.wait(seconds)

    @contextmanager
    def holding(self, held: _Cuttable) -> Iterator[None]:
        """What is to be cut where this is ended within the block. Raises Ended where it was before."""
        with self._lock:
            if self.ended:
                raise Ended
            self._held = held
        try:
            yield
        finally:
            # From here on the connection may be another leg's: this one must not cut it any more.
            with self._lock:
                self._held = None

    def end(self) -> None:
        """End it, for good; safe from any thread."""
        with self._lock:
            self._ended.set()
            if self._held is not None:
                self._held.cut()


@dataclass(slots=True)
class Connection:
    """A stream to an origin; `kept` once it has answered a request. `extra`: beside the pool's bound."""

    stream: Stream
    origin: Origin
    extra: bool
    kept: bool = False


class Pool:
    """Connections to any number of servers, and what has been seen of their speed. Thread-safe.

    At most `settings.streams` are in use at once, beside those of second requests, and as many are kept.
    Once it is closed, and no blob uses it any more, none is kept.
    """

    def __init__(self, settings: StorageSettings) -> None:
        self.hedges = Hedges(settings.hedge, settings.memory // 4)
        self._settings = settings
        self._changed = threading.Condition()
        self._context: ssl.SSLContext | None = None
        self._idle: list[Connection] = []
        self._busy = 0
        self._blobs = 0
        self._closed = False

    def join(self) -> None:
        """A blob uses this pool from now on."""
        with self._changed:
            self._blobs += 1

    def leave(self) -> None:
        """A blob uses it no more; what waits for a connection looks again whether it was ended."""
        with self._changed:
            self._blobs -= 1
            self._changed.notify_all()
        self._drop_unwanted()

    def close(self) -> None:
        """Keep no connection from now on, or from when the last blob that uses them is closed."""
        with self._changed:
            self._closed = True
        self._drop_unwanted()

    def take(self, origin: Origin, leg: Leg, *, fresh: bool, extra: bool) -> Connection:
        """A connection to an origin: one that was kept, unless it is to be `fresh`, or a new one.

        Waits until there are fewer than the bound, except for one that is `extra`. Raises Ended, an OSError,
        or SettingsError where the authorities cannot be read.
        """
        with self._changed:
            if not extra:
                self._changed.wait_for(lambda: leg.ended or self._busy < self._settings.streams)
            if leg.ended:
                self._changed.notify()  # the turn that this wait was told of is another's
                raise Ended
            found = None if fresh else next((kept for kept in self._idle if kept.origin == origin), None)
            if found is not None:
                self._idle.remove(found)
                found.extra = extra
            if not extra:
                self._busy += 1
        if found is not None:
            return found
        try:
            context = self._tls() if origin.secure else None
            return Connection(dial(origin, context, self._settings.timeout_s, leg), origin, extra)
        except BaseException:
            self._leave_place(extra)
            raise

    def give_back(self, connection: Connection, *, usable: bool) -> None:
        """End the use of a connection, which is `usable` once its answer has been read to the end."""
        unwanted = None if usable else connection
        with self._changed:
            if usable:
                connection.kept = True
                self._idle.insert(0, connection)
                if len(self._idle) > self._settings.streams or (self._closed and not self._blobs):
                    unwanted = self._idle.pop()
        if unwanted is not None:
            unwanted.stream.close()
        self._leave_place(connection.extra)

    def _leave_place(self, extra: bool) -> None:
        if not extra:
            with self._changed:
                self._busy -= 1
                self._changed.notify()

    def _drop_unwanted(self) -> None:
        with self._changed:
            if not self._closed or self._blobs:
                return
            unwanted, self._idle = self._idle, []
        for connection in unwanted:
            connection.stream.close()

    def _tls(self) -> ssl.SSLContext:
        with self._changed:
            if self._context is None:
                self._context = client_context(self._settings)
            return self._context


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


class _Dialling:
    """A socket that is being connected."""

    def __init__(self, connecting: socket.socket) -> None:
        self._connecting = connecting

    def cut(self) -> None:
        try:
            self._connecting.shutdown(socket.SHUT_RDWR)
        except OSError:
            # Not begun, or over: then `connect` does not wait.
            return


def dial(origin: Origin, context: ssl.SSLContext | None, timeout_s: float, leg: Leg) -> Stream:
    """Connect to the first of the origin's addresses that answers. Raises OSError or Ended."""
    failed: OSError | None = None
    addresses = socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in addresses:
        connecting = socket.socket(family, kind, protocol)
        try:
            connecting.settimeout(timeout_s)
            with leg.holding(_Dialling(connecting)):
                connecting.connect(address)
            return _speaking(connecting, origin, context, timeout_s, leg)
        except OSError as error:
            connecting.close()
            failed = error
        except BaseException:
            connecting.close()
            raise
    raise failed or OSError("the name has no address")


def _speaking(
    connected: socket.socket, origin: Origin, context: ssl.SSLContext | None, timeout_s: float, leg: Leg
) -> Stream:
    if context is None:
        return PlainStream(connected)
    wrapped = context.wrap_socket(connected, server_hostname=origin.host, do_handshake_on_connect=False)
    stream = TlsStream(wrapped)
    try:
        with leg.holding(stream):
            stream.handshake(timeout_s)
    except BaseException:
        stream.close()
        raise
    return stream
