"""Limits on a server's connections: their number, and the time for a request head. Pure.

A connection is *busy* while a request is being answered, *waiting* until its next request head is complete
(also before the first byte, and during the TLS handshake), and otherwise *idle*: kept alive for the next
request. Busy connections are kept. If there are too many, the oldest waiting connection is closed first, then
the oldest idle one. `planner.connection_acceptor` owns the sockets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

HEAD_S: Final = 10.0
"""Seconds for a TLS handshake, and for a request head."""
RESERVED: Final = 64
"""File descriptors reserved for everything except connections."""
MIN_CONNECTIONS: Final = 16
MAX_CONNECTIONS: Final = 65_536
MAX_WAITING: Final = 256


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """Current state of one connection."""

    key: int
    busy: bool
    waits_since: float | None
    """When it began to wait for a request head; None if it is busy or idle."""
    active_at: float
    """When the last byte arrived."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the number of connections."""

    connections: int
    waiting: int

    @classmethod
    def from_descriptor_limit(cls, max_descriptors: int) -> ConnectionLimits:
        """Return the limits for a process that may open this many descriptors; negative means unlimited."""
        free = MAX_CONNECTIONS if max_descriptors < 0 else max_descriptors - RESERVED
        connections = max(MIN_CONNECTIONS, min(free, MAX_CONNECTIONS))
        return cls(connections, max(MIN_CONNECTIONS // 2, min(connections // 2, MAX_WAITING)))


def overdue(connections: Iterable[ConnectionState], now: float) -> list[int]:
    """Return the connections that have waited too long for a request head."""
    return [
        each.key
        for each in connections
        if not each.busy and each.waits_since is not None and now >= each.waits_since + HEAD_S
    ]


def surplus(connections: Iterable[ConnectionState], limits: ConnectionLimits) -> list[int]:
    """Return the connections to close so that one more fits, if possible."""
    by_age = list(connections)
    waiting = sorted((each.waits_since, each.key) for each in by_age if not each.busy and each.waits_since is not None)
    idle = sorted((each.active_at, each.key) for each in by_age if not each.busy and each.waits_since is None)
    too_many = max(0, len(by_age) + 1 - limits.connections)
    count = max(too_many, len(waiting) + 1 - limits.waiting, 0)
    closed = [key for _, key in waiting[:count]]
    return closed + [key for _, key in idle[: max(0, too_many - len(closed))]]
