"""Connection pools and cancellation, without sockets."""

from __future__ import annotations

import os
import socket
import ssl
from typing import cast

import pytest

from rfork.net.connect import Cancelled, CancelScope
from rfork.net.pool import MAX_IDLE_S, HttpConnectionPool, PooledConnection
from rfork.net.request import HttpOrigin
from rfork.net.response import ReadTimeout, StalledResponse
from rfork.net.stream import Stream
from tests.unit.fake_clock import FakeClock


def no_tls() -> ssl.SSLContext:
    """Fail the test: its connections use no TLS."""
    raise AssertionError("no TLS context is needed")


class FakeConnection:
    """Connection that records that it was cut."""

    def __init__(self) -> None:
        self.count = 0

    def abort(self) -> None:
        self.count += 1


def test_ending_a_leg_cuts_only_its_connection() -> None:
    """A released connection may serve another request, so ending the leg does not cut it."""
    before, attached, after = FakeConnection(), FakeConnection(), FakeConnection()
    cancel_scope = CancelScope()
    with cancel_scope.attached(before):
        pass
    with cancel_scope.attached(attached):
        cancel_scope.abort()
    with pytest.raises(Cancelled), cancel_scope.attached(after):
        pass
    assert 0 == before.count
    assert 1 == attached.count
    assert 0 == after.count


def test_an_ended_leg_acquires_no_connection() -> None:
    """It does not wait for a connection either."""
    cancel_scope = CancelScope()
    cancel_scope.abort()
    with pytest.raises(Cancelled):
        HttpConnectionPool(no_tls).acquire(HttpOrigin(False, "127.0.0.1", 1), cancel_scope, 1.0)


class FakeStream:
    """Stream of which only the close is checked."""

    def __init__(self) -> None:
        self.closed = False

    def close(self, *, discard: bool = False) -> None:
        self.closed = True


def pooled_stream(pool: HttpConnectionPool, origin: HttpOrigin, process: int | None = None) -> FakeStream:
    """Return a connection to the pool after a response."""
    stream = FakeStream()
    connection = PooledConnection(
        cast(Stream, stream), origin, extra=True, process=os.getpid() if process is None else process
    )
    pool.release(connection, usable=True)
    return stream


def acquire_stream(pool: HttpConnectionPool, origin: HttpOrigin) -> object:
    """Return the pool's idle connection for a request; None if it would open one."""
    cancel_scope = CancelScope()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rfork.net.pool.open_connection", lambda *_: None)
        return pool.acquire(origin, cancel_scope, 1.0, extra=True).stream


FIRST_ORIGIN, SECOND_ORIGIN = HttpOrigin(False, "first", 80), HttpOrigin(False, "second", 80)


@pytest.mark.parametrize(("idle_s", "reused"), [(MAX_IDLE_S - 1, True), (MAX_IDLE_S, False)])
def test_long_idle_connections_are_not_used(idle_s: float, reused: bool) -> None:
    """Middleboxes may have dropped them, so they are closed."""
    clock = FakeClock()
    pool = HttpConnectionPool(no_tls, clock=clock)
    old = pooled_stream(pool, FIRST_ORIGIN)
    clock.now += idle_s
    assert reused == (acquire_stream(pool, FIRST_ORIGIN) is old)
    assert reused != old.closed


def test_idle_connections_of_one_origin_are_dropped() -> None:
    """Connections to other servers stay."""
    pool = HttpConnectionPool(no_tls)
    first, second = pooled_stream(pool, FIRST_ORIGIN), pooled_stream(pool, SECOND_ORIGIN)
    pool.drop_idle(FIRST_ORIGIN)
    assert acquire_stream(pool, FIRST_ORIGIN) is None
    assert first.closed
    assert acquire_stream(pool, SECOND_ORIGIN) is second


def test_connections_of_another_process_are_not_kept() -> None:
    """A connection that was acquired before a fork of the process is closed afterwards and frees no slot."""
    pool = HttpConnectionPool(no_tls)
    other = pooled_stream(pool, FIRST_ORIGIN, process=os.getpid() + 1)
    assert acquire_stream(pool, FIRST_ORIGIN) is None
    assert other.closed


def test_a_cancelled_scope_cancels_the_attached_one() -> None:
    """An attempt of a cancelled operation is cancelled with it, and so is its connection."""
    operation, attempt, connection = CancelScope(), CancelScope(), FakeConnection()
    with operation.attached(attempt), attempt.attached(connection):
        operation.abort()
    assert attempt.is_cancelled
    assert 1 == connection.count


def test_a_cancelled_attempt_leaves_the_operation() -> None:
    """Cancellation is passed on in one direction only."""
    operation, attempt = CancelScope(), CancelScope()
    with operation.attached(attempt):
        attempt.abort()
    assert not operation.is_cancelled


def test_the_last_user_closes_idle_connections() -> None:
    """The creator of the pool and a registered user share it."""
    pool = HttpConnectionPool(no_tls)
    pool.register()
    stream = pooled_stream(pool, FIRST_ORIGIN)
    pool.unregister()
    closed_with_one_user = stream.closed
    pool.unregister()
    assert not closed_with_one_user
    assert stream.closed
    assert pooled_stream(pool, FIRST_ORIGIN).closed


@pytest.mark.parametrize(("responds", "end"), [(False, ConnectionResetError), (True, None)])
def test_a_request_without_response_is_discarded(responds: bool, end: type[OSError] | None) -> None:
    """A connection whose response did not come is reset: the kernel delivers nothing of its request later."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        origin = HttpOrigin(False, "127.0.0.1", server.getsockname()[1])
        pool, scope = HttpConnectionPool(no_tls), CancelScope()
        connection = pool.acquire(origin, scope, 5.0)
        accepted, _ = server.accept()
        with accepted:
            if responds:
                accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
            with (
                pytest.raises(StalledResponse),
                pool.exchange(connection, [b"request"], scope, ReadTimeout(0.5 if responds else 0.01)) as response,
            ):
                list(response.pieces())
            assert b"request" == accepted.recv(100)
            if end is None:
                assert b"" == accepted.recv(100)
            else:
                with pytest.raises(end):
                    accepted.recv(100)
        pool.unregister()
