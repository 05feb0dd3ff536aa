"""Limits on the connections of a server."""

from __future__ import annotations

import socket

import pytest

from planner.http_server import (
    HEAD_S,
    MAX_CONNECTIONS,
    MAX_WAITING,
    ConnectionLimits,
    ConnectionState,
    listen,
    overdue,
    surplus,
)

NOW = 100.0
LIMITS = ConnectionLimits(connections=4, waiting=2)


def waiting(key: int, since: float) -> ConnectionState:
    """Return a connection that has waited for a request head since then."""
    return ConnectionState(key, busy=False, waits_since=since, active_at=since)


def idle(key: int, since: float) -> ConnectionState:
    """Return a connection that has been idle since then."""
    return ConnectionState(key, busy=False, waits_since=None, active_at=since)


def busy(key: int) -> ConnectionState:
    """Return a connection with a long-running request."""
    return ConnectionState(key, busy=True, waits_since=None, active_at=0.0)


@pytest.mark.parametrize(
    ("descriptors", "connections", "waiters"),
    [(256, 192, 96), (1024, 960, MAX_WAITING), (10, 16, 8), (-1, MAX_CONNECTIONS, MAX_WAITING)],
)
def test_limits_follow_the_descriptors(descriptors: int, connections: int, waiters: int) -> None:
    """Some descriptors are reserved for files and for the store."""
    assert ConnectionLimits(connections, waiters) == ConnectionLimits.from_descriptor_limit(descriptors)


def test_a_slow_request_head_closes_its_connection() -> None:
    """Busy and idle connections stay open."""
    seen = [waiting(1, NOW - HEAD_S), waiting(2, NOW - HEAD_S + 0.1), idle(3, 0.0), busy(4)]
    assert [1] == overdue(seen, NOW)


SURPLUS: dict[str, tuple[list[ConnectionState], list[int]]] = {
    "below the limit": ([busy(1), idle(2, 1), waiting(3, 1)], []),
    "too many waiting": ([waiting(1, 2.0), waiting(2, 1.0)], [2]),
    "too many in total: oldest waiting first": ([busy(1), busy(2), idle(3, 0.0), waiting(4, 9.0)], [4]),
    "none waiting: oldest idle first": ([busy(1), busy(2), idle(3, 5.0), idle(4, 4.0)], [4]),
    "all are busy": ([busy(1), busy(2), busy(3), busy(4)], []),
    "more than one": ([idle(1, 1), idle(2, 2), idle(3, 3), idle(4, 4), waiting(5, 5)], [5, 1]),
}


@pytest.mark.parametrize("case", SURPLUS)
def test_a_waiting_connection_is_closed_to_accept_one_more(case: str) -> None:
    """Waiting connections are closed before idle ones."""
    seen, expected = SURPLUS[case]
    assert expected == surplus(seen, LIMITS)


def test_connections_to_hosts_that_disappear_end() -> None:
    """An accepted connection is probed by the kernel while it is silent."""
    with (
        listen("127.0.0.1", 0, prefix="RFORK_PLANNER_", port_setting="PORT") as listener,
        socket.create_connection(listener.getsockname()),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert 10 == accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
