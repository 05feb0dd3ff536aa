"""HTTP responses without sockets: bodies, their transfer coding, and time limits."""

from __future__ import annotations

import errno
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.errors import TargetError
from rfork.net.http_heads import MalformedMessage
from rfork.net.response import ConnectionEnded, HttpResponse, ReadTimeout, StalledResponse
from rfork.net.stream import ScatterCursor, Stream
from tests.unit.fake_clock import FakeClock

MIN_BYTES = 1000
HEAD = b"HTTP/1.1 200 OK\r\n"


class FakeStream:
    """A stream that receives prepared pieces, and then the end of the connection."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    def receive(self, max_bytes: int, timeout: float) -> bytes:
        data = self._pieces.pop(0) if self._pieces else b""
        if len(data) > max_bytes:
            self._pieces.insert(0, data[max_bytes:])
        return data[:max_bytes]

    def receive_into(self, cursor: ScatterCursor, max_bytes: int, timeout: float) -> int:
        data = self.receive(max_bytes, timeout)
        cursor.write_bytes(data)
        return len(data)


def response_of(*pieces: bytes) -> HttpResponse:
    """Return the response of a server that sends these pieces."""
    return HttpResponse.receive(cast(Stream, FakeStream(*pieces)), ReadTimeout(10.0))


def split(data: bytes, size: int) -> list[bytes]:
    """Return the bytes in pieces of this size."""
    return [data[at : at + size] for at in range(0, len(data), size)]


def chunked(text: bytes, size: int) -> bytes:
    """Return a text in chunked coding, with an extension for each chunk and a trailer field."""
    chunks = b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in split(text, size))
    return chunks + b"0\r\nTrailer: x\r\n\r\n"


@given(st.binary(max_size=200), st.integers(1, 50), st.integers(1, 100))
def test_a_chunked_body_is_decoded(text: bytes, chunk_bytes: int, piece_bytes: int) -> None:
    """For any sizes of chunks and of received pieces; the connection can be used again."""
    coded = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(text, chunk_bytes)
    response = response_of(*split(coded, piece_bytes))
    assert text == b"".join(response.pieces())
    assert response.is_complete


@given(st.binary(max_size=200))
def test_an_invalid_chunked_body_raises_only_known_errors(coded: bytes) -> None:
    """It is malformed, or it ends early."""
    response = response_of(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + coded)
    try:
        assert len(b"".join(response.pieces())) <= len(coded)
    except (MalformedMessage, ConnectionEnded):
        assert not response.is_complete


@pytest.mark.parametrize("size", ["-1", "0x1", "g", "", "f" * 16, "1" * 5000])
def test_an_invalid_chunk_size_is_malformed(size: str) -> None:
    """A size is a hexadecimal number of reasonable length."""
    response = response_of(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + size.encode() + b"\r\nx\r\n0\r\n\r\n")
    with pytest.raises(MalformedMessage):
        list(response.pieces())


@pytest.mark.parametrize(
    ("fields", "text", "complete"),
    [
        (b"Content-Length: 4\r\n", b"text", True),
        (b"Content-Length: 2\r\n", b"te", False),  # the rest belongs to no response
        (b"Content-Length: 5\r\n", b"text", False),
        (b"Content-Length: 99999999999999999999\r\n", b"", False),
        (b"Transfer-Encoding: gzip\r\n", b"", False),
        (b"", b"text", False),  # ends with the connection
    ],
)
def test_the_text_of_a_refusal_is_read_as_far_as_it_arrives(fields: bytes, text: bytes, complete: bool) -> None:
    """Its connection is used again only if the end of the body is known and was read."""
    response = response_of(HEAD + fields + b"\r\ntext")
    assert text == response.text(100)
    assert complete == response.is_complete


def test_a_long_text_is_truncated() -> None:
    """The connection is not used again."""
    response = response_of(HEAD + b"Content-Length: 4\r\n\r\ntext")
    assert b"te" == response.text(2)


def test_a_response_without_content_has_no_body() -> None:
    """Status 204 needs no Content-Length."""
    response = response_of(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert [] == list(response.pieces())
    assert response.is_complete


@given(st.binary(min_size=1, max_size=100), st.integers(1, 30))
def test_a_body_fills_the_callers_memory(body: bytes, piece_bytes: int) -> None:
    """Including the bytes that arrive with the head."""
    target = bytearray(len(body))
    response = response_of(*split(HEAD + b"\r\n" + body, piece_bytes))
    response.fill(ScatterCursor([memoryview(target)]), len(body))
    assert body == bytes(target)
    assert response.is_complete


def test_more_bytes_than_requested_are_malformed() -> None:
    """The caller's memory is not exceeded."""
    with pytest.raises(MalformedMessage, match="more than the 2 bytes requested"):
        response_of(HEAD + b"\r\nbody").fill(ScatterCursor([memoryview(bytearray(2))]), 2)


def test_a_body_that_ends_early_is_a_lost_connection() -> None:
    """The error has the number of missing bytes; those received are in place."""
    cursor = ScatterCursor([memoryview(bytearray(6))])
    with pytest.raises(ConnectionEnded, match="2 bytes missing"):
        response_of(HEAD + b"\r\nbody").fill(cursor, 6)
    assert 4 == cursor.done


class UnwritableStream(FakeStream):
    """A stream whose receive fails as the kernel does for read-only memory."""

    def receive_into(self, cursor: ScatterCursor, max_bytes: int, timeout: float) -> int:
        raise OSError(errno.EFAULT, "Bad address")


def test_read_only_memory_is_the_targets_fault() -> None:
    """It is not an error of the connection."""
    response = HttpResponse.receive(cast(Stream, UnwritableStream(HEAD + b"\r\n")), ReadTimeout(10.0))
    with pytest.raises(TargetError, match="not writable"):
        response.fill(ScatterCursor([memoryview(bytearray(1))]), 1)


@pytest.mark.parametrize("received", [b"", HEAD])
def test_a_connection_that_ends_before_the_response_is_lost(received: bytes) -> None:
    """Also within the head."""
    with pytest.raises(ConnectionEnded, match="before a response"):
        response_of(received)


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        ([], "sent nothing for 10 s"),
        ([1, MIN_BYTES - 2], f"sent only {MIN_BYTES - 1} bytes in 10 s"),
        ([1, MIN_BYTES - 1], None),
        ([MIN_BYTES, 0], None),
    ],
)
def test_a_body_needs_a_minimum_speed(
    received: list[int], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each timeout period needs a minimum number of bytes; then the next period begins."""
    clock = FakeClock()
    monkeypatch.setattr("rfork.net.response.time.monotonic", clock)
    timeout = ReadTimeout(10.0, min_bytes=MIN_BYTES)
    clock.now += 9.0
    for count in received:
        timeout.record_body(count)
    clock.now += 1.0
    message = None
    try:
        timeout.remaining()
    except StalledResponse as error:
        message = str(error)
    assert expected == message


def test_a_response_head_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for the complete head is not extended when bytes arrive."""
    clock = FakeClock()
    monkeypatch.setattr("rfork.net.response.time.monotonic", clock)
    timeout = ReadTimeout(10.0, min_bytes=MIN_BYTES)
    clock.now += 9.0
    timeout.record(2 * MIN_BYTES)
    clock.now += 1.0
    with pytest.raises(StalledResponse, match=f"sent only {2 * MIN_BYTES} bytes in 10 s"):
        timeout.remaining()


def test_the_deadline_limits_all_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many bytes arrive."""
    clock = FakeClock()
    monkeypatch.setattr("rfork.net.response.time.monotonic", clock)
    timeout = ReadTimeout(10.0, deadline=clock() + 15.0)
    clock.now += 9.0
    timeout.record_body(1)
    assert 6.0 == timeout.remaining()
    clock.now += 6.0
    with pytest.raises(StalledResponse, match="the deadline has passed"):
        timeout.remaining()
