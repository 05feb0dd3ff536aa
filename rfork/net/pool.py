"""HTTP client for ranges: keep-alive connections to web servers, and one request on one of them.

Written here because bodies are received into existing memory. For 32 MiB ranges over loopback, httpx, which
returns bytes to copy, receives a quarter as many bytes per CPU second; `http.client` five sixths into one
view, and half into views of 64 KiB, such as tensors.
"""

from __future__ import annotations

import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rfork.net.connect import Cancelled, CancelScope, open_connection
from rfork.net.http_heads import is_keep_alive
from rfork.net.request import HttpOrigin
from rfork.net.response import HttpResponse, ReadTimeout, StalledResponse
from rfork.net.stream import Stream

MAX_IDLE_S: Final = 30.0
"""Maximum idle time of a connection: firewalls and load balancers may drop idle connections silently."""


@dataclass(slots=True)
class PooledConnection:
    """A stream to an origin; `reused` if it has served a request before. `extra`: not counted by the pool's
    limit.

    Only `process` may use it; `idle_since`: end of its last use, by the pool's clock.
    """

    stream: Stream
    origin: HttpOrigin
    extra: bool
    process: int
    reused: bool = False
    idle_since: float = 0.0


class HttpConnectionPool:
    """Connections to any number of servers. Thread-safe.

    `tls_context` returns the context of a new TLS connection. At most `max_in_use` connections are in use at
    a time, not counting extra ones, and as many are kept idle. None is kept after `unregister` by the last
    user; the creator is the first. A forked child process gets its own connections, because two processes
    must not share one.
    """

    def __init__(
        self,
        tls_context: Callable[[], ssl.SSLContext],
        max_in_use: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tls_context = tls_context
        self._max_in_use = max_in_use
        self._clock = clock
        self._idle: list[PooledConnection] = []
        self._users = 1
        self._forking = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        """Initialise for the current process, with nothing in use."""
        self._changed = threading.Condition()
        self._in_use = 0
        self._process = os.getpid()

    def _lock_for_process(self) -> threading.Condition:
        """Return the pool's lock. In a forked child process, reset the pool first."""
        if self._process != os.getpid():
            # This lock is only acquired here, so no thread of the parent process can have held it.
            with self._forking:
                if self._process != os.getpid():
                    inherited, self._idle = self._idle, []
                    self._reset()
                    _close(inherited)  # closes this process's descriptors without a TLS shutdown
        return self._changed

    def register(self) -> None:
        """Register a user of this pool."""
        with self._lock_for_process():
            self._users += 1

    def unregister(self) -> None:
        """Unregister a user; threads that wait for a connection check whether they were cancelled."""
        with self._lock_for_process():
            self._users -= 1
            self._changed.notify_all()
            unwanted = self._remove_idle(lambda _: self._users <= 0)
        _close(unwanted)

    def acquire(
        self, origin: HttpOrigin, scope: CancelScope, timeout_s: float, *, fresh: bool = False, extra: bool = False
    ) -> PooledConnection:
        """Return a connection to an origin: an idle one, unless `fresh`, or a new one.

        Waits until fewer than the maximum are in use, unless `extra`; `timeout_s` limits only the connection
        attempt. Raises Cancelled, TimeoutError, another OSError, or SettingsError for unusable TLS files.
        """
        with self._lock_for_process():
            if not extra:
                self._changed.wait_for(lambda: scope.is_cancelled or self._in_use < self._max_in_use)
            if scope.is_cancelled:
                self._changed.notify()  # pass the notification on to another waiter
                raise Cancelled
            limit = self._clock() - MAX_IDLE_S
            expired = self._remove_idle(lambda reused: reused.idle_since <= limit)
            found = None if fresh else next((reused for reused in self._idle if reused.origin == origin), None)
            if found is not None:
                self._idle.remove(found)
                found.extra = extra
            if not extra:
                self._in_use += 1
        _close(expired)
        if found is not None:
            return found
        try:
            context = self._tls_context() if origin.secure else None
            stream = open_connection(origin, context, timeout_s, scope)
            return PooledConnection(stream, origin, extra, self._process)
        except BaseException:
            self._free_slot(extra)
            raise

    @contextmanager
    def exchange(
        self, connection: PooledConnection, message: Sequence[bytes], scope: CancelScope, timeout: ReadTimeout
    ) -> Iterator[HttpResponse]:
        """Send a request and yield its response; releases the connection, which is kept if the body was read.

        Raises Cancelled, MalformedMessage, StalledResponse, TimeoutError if the server does not read the
        request, or another OSError. If a reused connection fails, all idle ones to its origin are closed,
        because they may be dead as well.
        """
        response: HttpResponse | None = None
        try:
            with scope.attached(connection.stream):
                connection.stream.send(message, timeout.remaining())
                response = HttpResponse.receive(connection.stream, timeout)
                yield response
        except (StalledResponse, OSError):
            if connection.reused and not scope.is_cancelled:
                self.drop_idle(connection.origin)
            raise
        finally:
            complete = response is not None and response.is_complete and is_keep_alive(response.head)
            # A request without a response must not take effect after its caller has seen it fail.
            self.release(connection, usable=complete and not scope.is_cancelled, discard=response is None)

    def release(self, connection: PooledConnection, *, usable: bool, discard: bool = False) -> None:
        """End the use of a connection; `usable` if its response was read completely. `discard`: see `Stream.close`."""
        changed = self._lock_for_process()
        if connection.process != self._process:
            connection.stream.close()
            return
        unwanted = None if usable else connection
        with changed:
            if usable:
                connection.reused = True
                connection.idle_since = self._clock()
                self._idle.insert(0, connection)
                if len(self._idle) > self._max_in_use or self._users <= 0:
                    unwanted = self._idle.pop()
        if unwanted is not None:
            unwanted.stream.close(discard=discard)
        self._free_slot(connection.extra)

    def drop_idle(self, origin: HttpOrigin) -> None:
        """Close all idle connections to an origin."""
        with self._lock_for_process():
            unwanted = self._remove_idle(lambda reused: reused.origin == origin)
        _close(unwanted)

    def _remove_idle(self, matches: Callable[[PooledConnection], bool]) -> list[PooledConnection]:
        """Remove and return the matching idle connections. Call with the lock held."""
        removed = [reused for reused in self._idle if matches(reused)]
        self._idle = [reused for reused in self._idle if not matches(reused)]
        return removed

    def _free_slot(self, extra: bool) -> None:
        if not extra:
            with self._changed:
                self._in_use -= 1
                self._changed.notify()


def _close(connections: Iterable[PooledConnection]) -> None:
    for connection in connections:
        connection.stream.close()
