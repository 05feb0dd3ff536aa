"""Parsing of the http transport (heads, Range, Content-Range, entity tags) and its responses."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.errors import SourceCorrupt
from rfork.net.http_heads import (
    MalformedHead,
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
from rfork.net.stream import ScatterCursor
from rfork.transport.http.range_request import HttpLocation
from rfork.transport.http.responses import ImageResource, respond
from tests.transport_contract import TOKEN, FakeGate, image_of

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
    with pytest.raises(MalformedHead) as raised:
        parse_request(received, MAX_BYTES)
    assert status == raised.value.status


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_malformed_head(received: bytes) -> None:
    """Parsing arbitrary bytes returns a head, returns None, or raises MalformedHead."""
    for parse in (parse_request, parse_response):
        with suppress(MalformedHead):
            parse(received, MAX_BYTES)


def test_interim_responses_are_skipped() -> None:
    """A 100 or 103 response before the final one is skipped."""
    parsed = parse_response(b"HTTP/1.1 103 Early\r\nA: b\r\n\r\nHTTP/1.1 206 Partial\r\nC: d\r\n\r\nbody", MAX_BYTES)
    assert (ResponseHead(206, "1.1", {"c": "d"}), b"body") == parsed


@pytest.mark.parametrize("received", [b"SSH-2.0\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"x" * MAX_BYTES])
def test_a_malformed_response_head_is_rejected(received: bytes) -> None:
    """A response that is not HTTP/1.1 raises MalformedHead."""
    with pytest.raises(MalformedHead):
        parse_response(received, MAX_BYTES)


@pytest.mark.parametrize(
    ("version", "connection", "expected"),
    [("1.1", "", True), ("1.1", "Close", False), ("1.1", "x, close", False), ("1.0", "", False)],
)
def test_keep_alive_follows_version_and_connection_field(version: str, connection: str, expected: bool) -> None:
    """HTTP/1.1 keeps the connection unless it is closed explicitly; HTTP/1.0 does not."""
    assert expected is is_keep_alive(ResponseHead(206, version, {"connection": connection}))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://seed:81/v1/image", ("seed", 81, False, "seed:81", "/v1/image")),
        ("https://user:secret@seed?a=b", ("seed", 443, True, "seed", "/?a=b")),
        ("http://[::1]:81/x", ("::1", 81, False, "[::1]:81", "/x")),
    ],
)
def test_a_url_is_parsed(url: str, expected: tuple[str, int, bool, str, str]) -> None:
    """Host, port, TLS, Host field and request target."""
    location = HttpLocation.parse(url)
    assert expected == (
        location.host,
        location.port,
        location.secure,
        location.authority,
        location.request_target,
    )


@pytest.mark.parametrize("url", ["", "ftp://a/b", "http:///x", "http://a:b/", "http://a/b c", "http://a/\u00e9"])
def test_an_invalid_url_is_source_corrupt(url: str) -> None:
    """The source provided the URL, so an invalid one is its fault."""
    with pytest.raises(SourceCorrupt):
        HttpLocation.parse(url)


@given(st.lists(st.integers(0, 9), max_size=12), st.data())
def test_a_cursor_visits_each_byte_once(sizes: list[int], data: st.DataObject) -> None:
    """Windows follow one another without gaps or overlaps, for any step sizes."""
    views = [memoryview(bytearray(size)) for size in sizes]
    cursor, step = ScatterCursor(views), 0
    while cursor.left:
        max_bytes = data.draw(st.integers(1, 20))
        window = cursor.window(max_bytes, 3)
        assert 0 < sum(view.nbytes for view in window) <= max_bytes
        step += 1
        done = data.draw(st.integers(1, sum(view.nbytes for view in window)))
        cursor.write_bytes(bytes([step]) * done)
    filled = b"".join(views)
    assert sorted(filled) == list(filled)
    assert cursor.done == sum(sizes)
    assert 0 not in filled


HEADER = b"h" * 50
FULL = {"authorization": f"Bearer {TOKEN}"}


def image_file(gate: FakeGate) -> ImageResource:
    return ImageResource(image_of((60, 40), seed=1), HEADER, gate)


@pytest.mark.parametrize(
    ("method", "target", "fields", "status", "admitted"),
    [
        ("GET", "/v1/image", FULL, 200, [(0, 0), (0, 100)]),
        ("GET", "/v1/image?x=1", FULL, 200, [(0, 0), (0, 100)]),
        ("HEAD", "/v1/image", FULL, 200, [(0, 0)]),
        ("GET", "/v1/image", FULL | {"range": "bytes=0-49"}, 206, [(0, 0), (0, 0)]),
        ("GET", "/v1/image", FULL | {"range": "bytes=40-59"}, 206, [(0, 0), (0, 10)]),
        ("GET", "/v1/image", FULL | {"range": "bytes=60-69"}, 206, [(0, 0), (10, 20)]),
        ("HEAD", "/v1/image", FULL | {"range": "bytes=60-69"}, 200, [(0, 0)]),
        ("GET", "/v1/image", FULL | {"range": "bytes=150-"}, 416, [(0, 0)]),
        ("GET", "/v1/image", FULL | {"if-match": '"other"', "range": "bytes=0-1"}, 412, [(0, 0)]),
        ("GET", "/v1/image", FULL | {"if-range": '"other"', "range": "bytes=0-1"}, 200, [(0, 0), (0, 100)]),
        ("POST", "/v1/image", FULL, 405, []),
        ("GET", "/", FULL, 404, []),
        ("GET", "/v1/image", {}, 401, []),
        ("GET", "/v1/image", {"authorization": "Bearer forged"}, 403, []),
    ],
)
def test_each_request_gets_the_right_response(
    method: str, target: str, fields: dict[str, str], status: int, admitted: list[tuple[int, int]]
) -> None:
    """The status of each request, and the image bytes authorized by the gate."""
    gate = FakeGate()
    response = respond(method, target, fields, image_file(gate))
    assert status == response.status
    assert admitted == gate.admitted


@pytest.mark.parametrize(("verified", "changed", "status"), [(50, False, 409), (100, True, 410)])
def test_the_gate_determines_the_status(verified: int, changed: bool, status: int) -> None:
    """Unverified bytes are 409, and changed weights are 410."""
    response = respond("GET", "/v1/image", FULL, image_file(FakeGate(verified, changed)))
    assert status == response.status


def test_no_two_exports_share_an_etag() -> None:
    """A process that reuses a port cannot be mistaken for its predecessor."""
    assert image_file(FakeGate()).etag != image_file(FakeGate()).etag


def test_the_etag_changes_with_the_weights() -> None:
    """A new generation in the gate changes the entity tag."""
    gate = FakeGate()
    file = image_file(gate)
    before = file.etag
    gate.generation = 1
    assert before != file.etag


def test_an_error_response_is_one_line() -> None:
    """The reason is one line of plain text."""
    response = respond("GET", "/v1/image", {"authorization": "Bearer forged"}, image_file(FakeGate()))
    assert HTTPStatus.FORBIDDEN == response.status
    assert b"no such lease\n" == response.text
