"""Pool of keep-alive connections to web servers."""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from rfork.net.stream import Stream
from rfork.settings import StorageSettings
from rfork.storage.http.connect import Cancelled, CancelScope, client_context, open_connection
from rfork.storage.http.hedging import HedgePolicy
from rfork.storage.http.request import HttpOrigin

MAX_IDLE_S: Final = 30.0
"""Maximum idle time of a connection: firewalls and load balancers may drop idle connections silently."""
MIN_HEDGE_BYTES: Final = 16 << 20
"""Minimum memory for second requests: one block of the largest size."""


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
    """Connections to any number of servers, and statistics of their speed. Thread-safe.

    At most `settings.concurrency` are in use at a time, not counting second requests, and as many are kept
    idle. After `close`, and once no blob uses the pool, none is kept. A forked child process gets its own
    connections, because two processes must not share one.
    """

    def __init__(self, settings: StorageSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._context: ssl.SSLContext | None = None
        self._idle: list[PooledConnection] = []
        self._blobs = 0
        self._closed = False
        self._forking = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        """Initialise for the current process, with nothing in use."""
        self._hedges = HedgePolicy(self._settings.hedge_ratio, max(self._settings.staging_bytes // 4, MIN_HEDGE_BYTES))
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

    @property
    def hedges(self) -> HedgePolicy:
        """Response times of the servers."""
        self._lock_for_process()
        return self._hedges

    def register(self) -> None:
        """Register a blob that uses this pool."""
        with self._lock_for_process():
            self._blobs += 1

    def unregister(self) -> None:
        """Unregister a blob; threads that wait for a connection check whether they were cancelled."""
        with self._lock_for_process():
            self._blobs -= 1
            self._changed.notify_all()
        self._close_if_unused()

    def close(self) -> None:
        """Stop keeping connections, as soon as the last registered blob is closed."""
        with self._lock_for_process():
            self._closed = True
        self._close_if_unused()

    def acquire(self, origin: HttpOrigin, scope: CancelScope, *, fresh: bool, extra: bool) -> PooledConnection:
        """Return a connection to an origin: an idle one, unless `fresh`, or a new one.

        Waits until a slot is free, unless `extra`. Raises Cancelled, an OSError, or SettingsError if the
        certificate authorities cannot be read.
        """
        with self._lock_for_process():
            if not extra:
                self._changed.wait_for(lambda: scope.is_cancelled or self._in_use < self._settings.concurrency)
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
            context = self._tls() if origin.secure else None
            stream = open_connection(origin, context, self._settings.timeout_s, scope)
            return PooledConnection(stream, origin, extra, self._process)
        except BaseException:
            self._free_slot(extra)
            raise

    def release(self, connection: PooledConnection, *, usable: bool) -> None:
        """End the use of a connection; `usable` if its response was read completely."""
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
                if len(self._idle) > self._settings.concurrency or (self._closed and not self._blobs):
                    unwanted = self._idle.pop()
        if unwanted is not None:
            unwanted.stream.close()
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

    def _close_if_unused(self) -> None:
        with self._changed:
            if not self._closed or self._blobs:
                return
            unwanted, self._idle = self._idle, []
        _close(unwanted)

    def _tls(self) -> ssl.SSLContext:
        with self._changed:
            if self._context is None:
                self._context = client_context(self._settings)
            return self._context


def _close(connections: Iterable[PooledConnection]) -> None:
    for connection in connections:
        connection.stream.close()
