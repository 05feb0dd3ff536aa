"""The cursor over the views of a transfer."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.net.stream import PlainStream, ScatterCursor


@given(st.lists(st.integers(0, 9), max_size=12), st.data())
def test_a_cursor_visits_each_byte_once(sizes: list[int], data: st.DataObject) -> None:
    """Windows follow one another without gaps or overlaps, for any step sizes."""
    views = [memoryview(bytearray(size)) for size in sizes]
    cursor, step = ScatterCursor(views), 0
    while cursor.left:
        max_bytes = data.draw(st.integers(1, 20))
        window = cursor.window(max_bytes, 3)
        assert 0 < sum(map(len, window)) <= max_bytes
        step += 1
        done = data.draw(st.integers(1, sum(map(len, window))))
        cursor.write_bytes(bytes([step]) * done)
    filled = b"".join(views)
    assert sorted(filled) == list(filled)
    assert cursor.done == sum(sizes)
    assert 0 not in filled


def test_a_step_that_fits_is_one_window() -> None:
    """With all its views, even empty ones."""
    views = [memoryview(bytearray(size)) for size in (3, 0, 5)]
    assert ScatterCursor(views).window(8) == views


@pytest.fixture
def connection() -> Iterator[tuple[PlainStream, socket.socket]]:
    """A stream and the socket of its other side."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield PlainStream(ours), theirs


def steps_of(memory: bytearray, size: int) -> Iterator[list[memoryview]]:
    """Yield views of the memory, two a step."""
    view = memoryview(memory)
    for begin in range(0, len(memory), size):
        part = view[begin : begin + size]
        yield [part[: size // 2], part[size // 2 :]]


def test_one_call_fills_several_steps(connection: tuple[PlainStream, socket.socket]) -> None:
    """As long as their bytes are there."""
    stream, other = connection
    memory, data = bytearray(1000), bytes(index % 251 for index in range(1000))
    other.sendall(data)
    assert stream.receive_into(ScatterCursor((), steps_of(memory, 64)), 1000, 5.0) == 1000
    assert memory == data


def test_bytes_beyond_the_limit_stay_in_the_socket(connection: tuple[PlainStream, socket.socket]) -> None:
    """Even if a step has room for them."""
    stream, other = connection
    memory = bytearray(100)
    cursor = ScatterCursor((), steps_of(memory, 64))
    other.sendall(b"a" * 70 + b"b" * 30)
    assert stream.receive_into(cursor, 70, 5.0) == 70
    assert stream.receive(100, 5.0) == b"b" * 30
    assert memory == b"a" * 70 + bytes(30)


def test_the_end_of_the_stream_ends_a_call_with_the_bytes_before_it(
    connection: tuple[PlainStream, socket.socket],
) -> None:
    """The next call returns 0."""
    stream, other = connection
    cursor = ScatterCursor((), steps_of(bytearray(1000), 64))
    other.sendall(bytes(130))
    other.shutdown(socket.SHUT_WR)
    assert stream.receive_into(cursor, 1000, 5.0) == 130
    assert stream.receive_into(cursor, 1000, 5.0) == 0


def test_a_timeout_returns_the_bytes_that_arrived(connection: tuple[PlainStream, socket.socket]) -> None:
    """It is an error only if there were none."""
    stream, other = connection
    cursor = ScatterCursor((), steps_of(bytearray(1000), 64))
    other.sendall(bytes(128))
    assert stream.receive_into(cursor, 1000, 0.01) == 128
    with pytest.raises(TimeoutError):
        stream.receive_into(cursor, 1000, 0.01)
