"""Connections to web servers, kept alive from request to request."""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from rfork.settings import StorageSettings
from rfork.storage.http.connect import Cancelled, CancelScope, client_context, open_connection
from rfork.storage.http.hedging import HedgePolicy
from rfork.storage.http.request import HttpOrigin
from rfork.transport.http.stream import Stream

IDLE_S: Final = 30.0
"""Longest that a connection is kept without use: what stands between may forget it without a word."""
MIN_HEDGE_BYTES: Final = 16 << 20
"""Memory for second requests, however little there is: one of the largest blocks that are read at once."""


@dataclass(slots=True)
class PooledConnection:
    """A stream to an origin; `reused` once it has answered a request. `extra`: beside the pool's bound.

    `process` alone may use it; `idle_since`: when its last use ended, by the pool's clock.
    """

    stream: Stream
    origin: HttpOrigin
    extra: bool
    process: int
    reused: bool = False
    idle_since: float = 0.0


class HttpConnectionPool:
    """Connections to any number of servers, and what has been seen of their speed. Thread-safe.

    At most `settings.streams` are in use at once, beside those of second requests, and as many are kept.
    Once it is closed, and no blob uses it any more, none is kept. A process that is forked has connections of
    its own: what two processes read from one would mix.
    """

    def __init__(self, settings: StorageSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._context: ssl.SSLContext | None = None
        self._idle: list[PooledConnection] = []
        self._blobs = 0
        self._closed = False
        self._forking = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Take it for this process, with nothing in use."""
        self._hedges = HedgePolicy(self._settings.hedge_ratio, max(self._settings.staging_bytes // 4, MIN_HEDGE_BYTES))
        self._changed = threading.Condition()
        self._busy = 0
        self._process = os.getpid()

    def _own(self) -> threading.Condition:
        """What guards this pool. In a process that was forked meanwhile: another, and no connections."""
        if self._process != os.getpid():
            # Only here is this lock taken, so no thread of the other process can have held it.
            with self._forking:
                if self._process != os.getpid():
                    inherited, self._idle = self._idle, []
                    self._begin()
                    _close(inherited)  # this process's descriptors: no word of it to the servers
        return self._changed

    @property
    def hedges(self) -> HedgePolicy:
        """How fast its servers have answered."""
        self._own()
        return self._hedges

    def register(self) -> None:
        """A blob uses this pool from now on."""
        with self._own():
            self._blobs += 1

    def unregister(self) -> None:
        """A blob uses it no more; what waits for a connection looks again whether it was ended."""
        with self._own():
            self._blobs -= 1
            self._changed.notify_all()
        self._drop_unwanted()

    def close(self) -> None:
        """Keep no connection from now on, or from when the last blob that uses them is closed."""
        with self._own():
            self._closed = True
        self._drop_unwanted()

    def acquire(self, origin: HttpOrigin, leg: CancelScope, *, fresh: bool, extra: bool) -> PooledConnection:
        """A connection to an origin: one that was kept, unless it is to be `fresh`, or a new one.

        Waits until there are fewer than the bound, except for one that is `extra`. Raises Ended, an OSError,
        or SettingsError where the authorities cannot be read.
        """
        with self._own():
            if not extra:
                self._changed.wait_for(lambda: leg.is_cancelled or self._busy < self._settings.concurrency)
            if leg.is_cancelled:
                self._changed.notify()  # the turn that this wait was told of is another's
                raise Cancelled
            limit = self._clock() - IDLE_S
            old = self._collect_expired(lambda reused: reused.idle_since <= limit)
            found = None if fresh else next((reused for reused in self._idle if reused.origin == origin), None)
            if found is not None:
                self._idle.remove(found)
                found.extra = extra
            if not extra:
                self._busy += 1
        _close(old)
        if found is not None:
            return found
        try:
            context = self._tls() if origin.secure else None
            stream = open_connection(origin, context, self._settings.timeout_s, leg)
            return PooledConnection(stream, origin, extra, self._process)
        except BaseException:
            self._free_slot(extra)
            raise

    def release(self, connection: PooledConnection, *, usable: bool) -> None:
        """End the use of a connection, which is `usable` once its answer has been read to the end."""
        changed = self._own()
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
        """Keep none of the connections to an origin that are idle now."""
        with self._own():
            unwanted = self._collect_expired(lambda reused: reused.origin == origin)
        _close(unwanted)

    def _collect_expired(self, which: Callable[[PooledConnection], bool]) -> list[PooledConnection]:
        """Idle connections that are kept no more; under the lock."""
        picked = [reused for reused in self._idle if which(reused)]
        self._idle = [reused for reused in self._idle if not which(reused)]
        return picked

    def _free_slot(self, extra: bool) -> None:
        if not extra:
            with self._changed:
                self._busy -= 1
                self._changed.notify()

    def _drop_unwanted(self) -> None:
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
