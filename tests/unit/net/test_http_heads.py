"""Parsing of HTTP heads and of the fields Range, Content-Range, Authorization and those with entity tags."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.net.http_heads import (
    MalformedMessage,
    RangeNotSatisfiable,
    ResponseHead,
    bearer_token,
    etag_matches,
    is_keep_alive,
    parse_content_range,
    parse_range,
    parse_request,
    parse_response,
)

MAX_BYTES = 1000


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=10-19", (10, 20)),
        ("bytes=90-", (90, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-1000", (0, 100)),
        ("bytes=50-1000", (50, 100)),
        ("Bytes = 1 - 2", (1, 3)),
        ("bytes=0-1,5-6", None),
        ("lines=0-1", None),
    ],
)
def test_a_range_is_parsed_according_to_rfc_9110(value: str, expected: tuple[int, int] | None) -> None:
    """Each form of a Range field selects bytes of a file of 100 bytes; unsupported forms select the complete
    file.
    """
    assert expected == parse_range(value, 100)


@pytest.mark.parametrize(
    "value",
    [
        "bytes=100-",
        "bytes=-0",
        "bytes=5-4",
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "bytes=1",
        f"bytes={'9' * 5000}-",
    ],
)
def test_a_range_without_a_byte_is_rejected(value: str) -> None:
    """A range beyond the end, reversed or malformed is not satisfiable."""
    with pytest.raises(RangeNotSatisfiable):
        parse_range(value, 100)


def test_an_empty_file_has_no_range() -> None:
    """No range of an empty file is satisfiable."""
    with pytest.raises(RangeNotSatisfiable):
        parse_range("bytes=0-", 0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("bytes 0-0/1", (0, 1, 1)), ("bytes 5-9/*", (5, 10, None)), ("BYTES 5-9/10", (5, 10, 10))],
)
def test_content_range_is_half_open(value: str, expected: tuple[int, int, int | None]) -> None:
    """A Content-Range field is parsed as a half-open range and the file's size."""
    assert expected == parse_content_range(value)


@pytest.mark.parametrize("value", ["", "bytes */10", "bytes 5-/10", "5-9/10", "bytes 5-9", "bytes -5-9/10"])
def test_a_bad_content_range_is_an_error(value: str) -> None:
    """Any other Content-Range field is a ValueError."""
    with pytest.raises(ValueError, match="Content-Range"):
        parse_content_range(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"a"', True),
        ('"x", "a"', True),
        ("*", True),
        ('"b"', False),
        ('W/"a"', False),
        ("a", False),
        ('"x, "a', False),
        ("", False),
    ],
)
def test_tags_are_compared_strongly(value: str, expected: bool) -> None:
    """Only an equal strong tag, or the star, matches."""
    assert expected is etag_matches(value, '"a"')


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"authorization": "Bearer t"}, "t"),
        ({"authorization": "bearer  t "}, "t"),
        ({"authorization": "Basic t"}, None),
        ({"authorization": "Bearer"}, None),
    ],
)
def test_a_bearer_token_is_found(fields: dict[str, str], expected: str | None) -> None:
    """The scheme of an Authorization field is case-insensitive."""
    assert expected == bearer_token(fields)


def test_a_request_is_parsed_with_the_bytes_after_it() -> None:
    """Method, target, version, fields in lower case, and the bytes of the next request."""
    parsed = parse_request(b"GET /v1/image?x HTTP/1.1\r\nHost: a\r\nX:  b\t \r\nx: c\r\n\r\nGET", MAX_BYTES)
    assert parsed is not None
    head, rest = parsed
    assert "GET" == head.method
    assert "/v1/image?x" == head.request_target
    assert "1.1" == head.version
    assert {"host": "a", "x": "b, c"} == head.fields
    assert b"GET" == rest


@pytest.mark.parametrize("prefix_length", range(0, 42, 3))
def test_an_incomplete_head_is_not_an_error(prefix_length: int) -> None:
    """No prefix of a valid head is an error, and none is a complete head."""
    assert parse_request(b"GET /v1/image HTTP/1.1\r\nHost: seed:8000\r\n\r\n"[:prefix_length], MAX_BYTES) is None


@pytest.mark.parametrize(
    ("received", "status"),
    [
        (b"\x16\x03\x01\x02\x00", 400),
        (b"GET /\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\nb: c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nnocolon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nHost: " + b"a" * MAX_BYTES, 431),
    ],
)
def test_a_malformed_request_head_is_rejected(received: bytes, status: int) -> None:
    """A head that is not strict HTTP/1.1 is rejected early, with the right status."""
    with pytest.raises(MalformedMessage) as raised:
        parse_request(received, MAX_BYTES)
    assert status == raised.value.status


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_malformed_head(received: bytes) -> None:
    """Parsing arbitrary bytes returns a head, returns None, or raises MalformedMessage."""
    for parse in (parse_request, parse_response):
        with suppress(MalformedMessage):
            parse(received, MAX_BYTES)


def test_interim_responses_are_skipped() -> None:
    """A 100 or 103 response before the final one is skipped."""
    parsed = parse_response(b"HTTP/1.1 103 Early\r\nA: b\r\n\r\nHTTP/1.1 206 Partial\r\nC: d\r\n\r\nbody", MAX_BYTES)
    assert (ResponseHead(206, "1.1", {"c": "d"}), b"body") == parsed


@pytest.mark.parametrize("received", [b"SSH-2.0\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"x" * MAX_BYTES])
def test_a_malformed_response_head_is_rejected(received: bytes) -> None:
    """A response that is not HTTP/1.1 raises MalformedMessage."""
    with pytest.raises(MalformedMessage):
        parse_response(received, MAX_BYTES)


@pytest.mark.parametrize(
    ("version", "connection", "expected"),
    [("1.1", "", True), ("1.1", "Close", False), ("1.1", "x, close", False), ("1.0", "", False)],
)
def test_keep_alive_follows_version_and_connection_field(version: str, connection: str, expected: bool) -> None:
    """HTTP/1.1 keeps the connection unless it is closed explicitly; HTTP/1.0 does not."""
    assert expected is is_keep_alive(ResponseHead(206, version, {"connection": connection}))
