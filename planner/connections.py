"""Bounds on a server's connections: how many there may be, and how long a request's head may take. Pure.

A connection is *busy* while a request is answered, *waiting* while its next request's head is not complete
(also before its first byte, and during the TLS handshake), and otherwise *idle*: kept for a next request.
Busy connections are kept. Where there are too many, the oldest waiting one is closed first, then the oldest
idle one. `planner.connection_acceptor` has the sockets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

HEAD_S: Final = 10.0
"""Seconds for a TLS handshake, and for a request's head."""
RESERVED: Final = 64
"""File descriptors that are left for anything but connections."""
MIN_CONNECTIONS: Final = 16
MAX_CONNECTIONS: Final = 65_536
MAX_WAITING: Final = 256


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """One connection, as it is now."""

    key: int
    busy: bool
    waits_since: float | None
    """When it began to wait for its request's head; None: it is busy or idle."""
    active_at: float
    """When the last byte came."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be."""

    connections: int
    waiting: int

    @classmethod
    def from_descriptor_limit(cls, max_descriptors: int) -> ConnectionLimits:
        """For a process that may open so many descriptors (negative: any number)."""
        free = MAX_CONNECTIONS if max_descriptors < 0 else max_descriptors - RESERVED
        connections = max(MIN_CONNECTIONS, min(free, MAX_CONNECTIONS))
        return cls(connections, max(MIN_CONNECTIONS // 2, min(connections // 2, MAX_WAITING)))


def overdue(connections: Iterable[ConnectionState], now: float) -> list[int]:
    """The connections whose request's head has taken too long."""
    return [
        each.key
        for each in connections
        if not each.busy and each.waits_since is not None and now >= each.waits_since + HEAD_S
    ]


def surplus(connections: Iterable[ConnectionState], limits: ConnectionLimits) -> list[int]:
    """The connections to close so that there is room for one more, as far as that can be had."""
    by_age = list(connections)
    waiting = sorted((each.waits_since, each.key) for each in by_age if not each.busy and each.waits_since is not None)
    idle = sorted((each.active_at, each.key) for each in by_age if not each.busy and each.waits_since is None)
    too_many = max(0, len(by_age) + 1 - limits.connections)
    count = max(too_many, len(waiting) + 1 - limits.waiting, 0)
    closed = [key for _, key in waiting[:count]]
    return closed + [key for _, key in idle[: max(0, too_many - len(closed))]]
