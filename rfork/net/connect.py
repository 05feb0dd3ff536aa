"""Opens connections to web servers within a time limit; waits can be cancelled from another thread."""

from __future__ import annotations

import ipaddress
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from rfork.net.request import HttpOrigin
from rfork.net.stream import PlainStream, Stream, TlsStream


class Cancelled(Exception):
    """Another thread cancelled this operation."""


class _Abortable(Protocol):
    def abort(self) -> None: ...


class CancelScope:
    """Cancellation of the operations of any number of threads. Any thread may cancel; blocking operations then
    fail immediately. A scope may be attached to another one, which then cancels it too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attached: list[tuple[int, _Abortable]] = []
        self._ended = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        """True if the scope was cancelled."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep, or return early when cancelled."""
        self._ended.wait(seconds)

    @contextmanager
    def attached(self, abortable: _Abortable) -> Iterator[None]:
        """Abort `abortable` if the scope is cancelled within the block. Raises Cancelled if it already is."""
        entry = (os.getpid(), abortable)
        with self._lock:
            if self.is_cancelled:
                raise Cancelled
            self._attached.append(entry)
        try:
            yield
        finally:
            # From here on, another request may use the connection: this scope must not abort it any more.
            with self._lock:
                self._attached.remove(entry)

    def abort(self) -> None:
        """Cancel permanently, from any thread. In a forked child process, operations of the parent continue."""
        with self._lock:
            self._ended.set()
            for process, abortable in self._attached:
                if process == os.getpid():
                    abortable.abort()


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
    """Connect to the first reachable address of the origin, within `timeout_s` in total.

    `context` None: plain TCP. Raises TimeoutError, another OSError, or Cancelled.
    """
    deadline = time.monotonic() + timeout_s
    failed: OSError | None = None
    addresses = _addresses(origin, timeout_s)
    for position, (family, socket_type, protocol, _, address) in enumerate(addresses):
        try:
            connecting = socket.socket(family, socket_type, protocol)
        except OSError as error:  # for example an IPv6 address without IPv6 in the kernel
            failed = error
            continue
        try:
            share_s = (deadline - time.monotonic()) / (len(addresses) - position)
            connecting.settimeout(max(share_s, 0.001))
            with scope.attached(_ConnectingSocket(connecting)):
                connecting.connect(address)
            if scope.is_cancelled:
                raise Cancelled
            return _wrap_stream(connecting, origin, context, deadline, scope)
        except OSError as error:
            connecting.close()
            failed = error
        except BaseException:
            connecting.close()
            raise
    try:
        raise failed or OSError("the host name has no address")
    finally:
        del failed  # this frame would refer to the error, which refers to it and to its callers: to a fork's module


def _wrap_stream(
    connected: socket.socket,
    origin: HttpOrigin,
    context: ssl.SSLContext | None,
    deadline: float,
    scope: CancelScope,
) -> Stream:
    if context is None:
        return PlainStream(connected)
    wrapped = context.wrap_socket(connected, server_hostname=origin.host, do_handshake_on_connect=False)
    try:
        stream = TlsStream(wrapped)
        with scope.attached(stream):
            stream.handshake(deadline - time.monotonic())
    except BaseException:
        wrapped.close()
        raise
    return stream


def _addresses(origin: HttpOrigin, timeout_s: float) -> list[Any]:
    """Return the addresses of the origin's host as `socket.getaddrinfo` does, or raise TimeoutError."""
    with suppress(ValueError):
        ipaddress.ip_address(origin.host)
        return _resolved(origin)
    results: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            results.put(_resolved(origin))
        except OSError as error:
            results.put(error)

    # The resolver has no timeout: a name server that does not respond blocks this thread, not the caller.
    threading.Thread(target=resolve, name="rfork-resolve", daemon=True).start()
    try:
        addresses = results.get(timeout=max(0.0, timeout_s))
    except queue.Empty:
        raise TimeoutError(f"the name {origin.host} was not resolved in time") from None
    if isinstance(addresses, OSError):
        raise addresses
    return addresses


def _resolved(origin: HttpOrigin) -> list[Any]:
    return socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
