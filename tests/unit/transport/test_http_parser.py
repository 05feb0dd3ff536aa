"""What the http transport reads off the wire: heads, Range, Content-Range, entity tags; and its answers."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.errors import SourceCorrupt
from rfork.transport.http.headers import (
    RangeNotSatisfiable,
    bearer_token,
    etag_matches,
    parse_content_range,
    parse_range,
)
from rfork.transport.http.parser import (
    MalformedHead,
    ResponseHead,
    is_keep_alive,
    parse_request,
    parse_response,
)
from rfork.transport.http.range_request import HttpTarget
from rfork.transport.http.responses import ImageResource, respond
from rfork.transport.http.stream import ScatterCursor
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
def test_a_range_is_read_as_rfc_9110_says(value: str, expected: tuple[int, int] | None) -> None:
    """Each form of a Range field names its bytes of a file of 100; others send the file whole."""
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
def test_a_range_without_a_byte_is_refused(value: str) -> None:
    """A range past the end, backwards, or malformed cannot be satisfied."""
    with pytest.raises(RangeNotSatisfiable):
        parse_range(value, 100)


def test_an_empty_file_has_no_range() -> None:
    """No range of a file of no bytes can be satisfied."""
    with pytest.raises(RangeNotSatisfiable):
        parse_range("bytes=0-", 0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("bytes 0-0/1", (0, 1, 1)), ("bytes 5-9/*", (5, 10, None)), ("BYTES 5-9/10", (5, 10, 10))],
)
def test_content_range_is_half_open(value: str, expected: tuple[int, int, int | None]) -> None:
    """A Content-Range field is read as a half-open range and the file's size."""
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
    """Only an equal strong tag, or the star, names a file."""
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
    """The token of an Authorization field, whatever the case of its scheme."""
    assert expected == bearer_token(fields)


def test_a_request_is_parsed_with_what_follows() -> None:
    """Method, target, version, fields in lower case, and the bytes of the next request."""
    parsed = parse_request(b"GET /v1/image?x HTTP/1.1\r\nHost: a\r\nX:  b\t \r\nx: c\r\n\r\nGET", MAX_BYTES)
    assert parsed is not None
    head, rest = parsed
    assert ("GET", "/v1/image?x", "1.1", {"host": "a", "x": "b, c"}, b"GET") == (
        head.method, head.target, head.version, head.fields, rest,
    )  # fmt: skip


@pytest.mark.parametrize("prefix_length", range(0, 42, 3))
def test_a_part_of_a_head_waits_for_more(prefix_length: int) -> None:
    """No prefix of a good head is an error, and none is a head."""
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
def test_a_bad_request_head_is_refused(received: bytes, status: int) -> None:
    """What is not a strict HTTP/1.1 head has its status, and is not waited upon."""
    with pytest.raises(MalformedHead) as raised:
        parse_request(received, MAX_BYTES)
    assert status == raised.value.status


@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_not(received: bytes) -> None:
    """Whatever is received, parsing gives a head, waits, or raises MalformedHead."""
    for parse in (parse_request, parse_response):
        with suppress(MalformedHead):
            parse(received, MAX_BYTES)


def test_interim_answers_are_passed_over() -> None:
    """A 100 or 103 answer in front of the final one is skipped."""
    parsed = parse_response(b"HTTP/1.1 103 Early\r\nA: b\r\n\r\nHTTP/1.1 206 Partial\r\nC: d\r\n\r\nbody", MAX_BYTES)
    assert (ResponseHead(206, "1.1", {"c": "d"}), b"body") == parsed


@pytest.mark.parametrize("received", [b"SSH-2.0\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"x" * MAX_BYTES])
def test_a_bad_answer_head_is_refused(received: bytes) -> None:
    """What no HTTP/1.1 server says is a MalformedHead."""
    with pytest.raises(MalformedHead):
        parse_response(received, MAX_BYTES)


@pytest.mark.parametrize(
    ("version", "connection", "expected"),
    [("1.1", "", True), ("1.1", "Close", False), ("1.1", "x, close", False), ("1.0", "", False)],
)
def test_connections_stay_as_http_says(version: str, connection: str, expected: bool) -> None:
    """HTTP/1.1 stays unless told to close, HTTP/1.0 does not."""
    assert expected is is_keep_alive(ResponseHead(206, version, {"connection": connection}))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://seed:81/v1/image", ("seed", 81, False, "seed:81", "/v1/image")),
        ("https://user:secret@seed?a=b", ("seed", 443, True, "seed", "/?a=b")),
        ("http://[::1]:81/x", ("::1", 81, False, "[::1]:81", "/x")),
    ],
)
def test_a_url_names_a_place(url: str, expected: tuple[str, int, bool, str, str]) -> None:
    """Host, port, whether TLS, what Host says, and the request's target."""
    http_target = HttpTarget.of(url)
    assert expected == (
        http_target.host,
        http_target.port,
        http_target.secure,
        http_target.authority,
        http_target.target,
    )


@pytest.mark.parametrize("url", ["", "ftp://a/b", "http:///x", "http://a:b/", "http://a/b c", "http://a/\u00e9"])
def test_a_bad_url_is_the_sources_fault(url: str) -> None:
    """A URL that cannot be asked for is SourceCorrupt: the source gave it."""
    with pytest.raises(SourceCorrupt):
        HttpTarget.of(url)


@given(st.lists(st.integers(0, 9), max_size=12), st.data())
def test_a_cursor_walks_each_byte_once(sizes: list[int], data: st.DataObject) -> None:
    """Whatever the steps, windows follow one another without gap or overlap."""
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
def test_each_request_has_its_answer(
    method: str, target: str, fields: dict[str, str], status: int, admitted: list[tuple[int, int]]
) -> None:
    """The status of each kind of request, and which image bytes the gate was asked for."""
    gate = FakeGate()
    decided = respond(method, target, fields, image_file(gate))
    assert (status, admitted) == (decided.status, gate.admitted)


@pytest.mark.parametrize(("verified", "changed", "status"), [(50, False, 409), (100, True, 410)])
def test_the_gate_decides_the_status(verified: int, changed: bool, status: int) -> None:
    """What is not verified here yet is 409, and what has changed is 410."""
    decided = respond("GET", "/v1/image", FULL, image_file(FakeGate(verified, changed)))
    assert status == decided.status


def test_no_two_exports_have_one_tag() -> None:
    """A process that takes over a port cannot be mistaken for the one before."""
    assert image_file(FakeGate()).etag != image_file(FakeGate()).etag


def test_the_tag_follows_the_gate() -> None:
    """When the gate says that the bytes are others, so does the tag."""
    gate = FakeGate()
    file = image_file(gate)
    before = file.etag
    gate.generation = 1
    assert before != file.etag


def test_a_refusal_is_one_line() -> None:
    """A refusal says why in one line of plain text."""
    decided = respond("GET", "/v1/image", {"authorization": "Bearer forged"}, image_file(FakeGate()))
    assert (HTTPStatus.FORBIDDEN, b"no such lease\n") == (decided.status, decided.text)
