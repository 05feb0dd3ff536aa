"""Decisions of ranged reads without sockets: requests, responses, retries and hedges."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.errors import StorageChanged, StorageError
from rfork.net.http_heads import ResponseHead
from rfork.storage.http.request import HttpOrigin, HttpRequest
from rfork.storage.http.requests import decode_chunked
from rfork.storage.http.responses import (
    ObjectVersion,
    check_content_range,
    error_from_response,
    version_from_response,
)
from rfork.storage.http.retry import RetryableError

URI = "https://models.example/llama.bin"
NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
NO_RANGE = f"the server responded 416 {HTTPStatus(416).phrase} to a range request"  # Python 3.13 has another phrase


def head(status: int, **fields: str) -> ResponseHead:
    return ResponseHead(status, "1.1", {name.replace("_", "-"): value for name, value in fields.items()})


# Requests.


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host/a", HttpOrigin(False, "host", 80)),
        ("https://host/a?b", HttpOrigin(True, "host", 443)),
        ("https://host:8443/a", HttpOrigin(True, "host", 8443)),
        ("http://[::1]:9000/", HttpOrigin(False, "::1", 9000)),
    ],
)
def test_a_url_names_its_origin(url: str, expected: HttpOrigin) -> None:
    """Connections and credentials belong to scheme, host and port."""
    assert expected == HttpRequest(url).origin


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/a",
        "//host/a",
        "http:///a",
        "http://host:x/?key=secret",
        "http://user:secret@host/",
        "https://models..example/a?key=secret",
        f"https://{'x' * 64}.example/a",
    ],
)
def test_an_invalid_url_is_refused(url: str) -> None:
    """A URL that is not a plain http or https URL of a possible host is refused, without its query in the
    error.
    """
    with pytest.raises(StorageError, match=r"is not a (valid|plain)") as raised:
        _ = HttpRequest(url).origin
    assert "secret" not in str(raised.value)


def test_a_request_hides_secrets() -> None:
    """The representation of a request contains neither query nor headers."""
    request = HttpRequest("https://host/a?signature=secret", {"Authorization": "Bearer secret"})
    assert "Request('https://host/a')" == repr(request) == str(request)


def test_signed_headers_come_first() -> None:
    """Signed headers precede headers of the same name."""
    request = HttpRequest("https://host:1/a%20b?x=1", {"Range": "bytes=1-2", "X-Token": "t"})
    expected = b"GET /a%20b?x=1 HTTP/1.1\r\nHost: host:1\r\nRange: bytes=1-2\r\nX-Token: t\r\nIf-Match: x\r\n\r\n"
    assert expected == request.head({"range": "bytes=0-0", "If-Match": "x"})


@pytest.mark.parametrize(
    "request_",
    [
        HttpRequest("http://host/a b"),
        HttpRequest("http://host/a", {"Authorization": "Bearer se\r\ncret"}),
        HttpRequest("http://host/a", {"Author\nization": "secret"}),
        HttpRequest("http://host/a", {"Authorization": "Bearer sécret"}),
    ],
    ids=repr,
)
def test_header_injection_is_refused(request_: HttpRequest) -> None:
    """Line breaks are refused, and the error does not repeat them."""
    with pytest.raises(StorageError, match=r"^'http://host/a[b ]*' cannot be requested: [a-z -]+$"):
        request_.head({})


@pytest.mark.parametrize(
    ("location", "url", "keeps_headers"),
    [
        ("/b", "https://host/b", True),
        ("b?x=1#part", "https://host/a/b?x=1", True),
        ("https://host:443/b", "https://host:443/b", True),
        ("//other/b", "https://other/b", False),
        ("https://host:444/b", "https://host:444/b", False),
        ("https://host.evil/b", "https://host.evil/b", False),
    ],
)
def test_a_redirect_keeps_headers_to_their_origin(location: str, url: str, keeps_headers: bool) -> None:
    """A Location is resolved relative to the URL, and headers are sent to the same origin only."""
    headers = {"Authorization": "Bearer secret"}
    redirected = HttpRequest("https://host/a/", headers).follow(location)
    assert url == redirected.url
    assert (headers if keeps_headers else {}) == redirected.headers


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://[::1", "https://host/a/ redirects to an invalid URL"),
        ("https://u:SECRET@h/x?sig=SECRET", "'https://…' is not a plain http o"),
        ("https://h:x/", "'https://h:x/' is not a valid URL"),
        ("http://[::1/?SECRET", "https://host/a/ redirects to an invalid URL"),
    ],
)
def test_an_invalid_redirect_is_refused(location: str, message: str) -> None:
    """It is a storage error in one line without a password."""
    with pytest.raises(StorageError) as raised:
        HttpRequest("https://host/a/").follow(location)
    assert message == str(raised.value)[: len(message)]


# Responses.


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (
            head(206, etag='"a"', last_modified="then", content_range="bytes 0-0/77", content_length="1"),
            ObjectVersion(77, '"a"', "then"),
        ),
        (head(416, content_range="bytes */0"), ObjectVersion(0, "", "")),
        (head(416, content_range="Bytes  */0", etag='"e"'), ObjectVersion(0, '"e"', "")),
        (head(200, content_length="0", etag='"e"'), ObjectVersion(0, '"e"', "")),
    ],
)
def test_the_first_byte_identifies_the_object(response: ResponseHead, expected: ObjectVersion) -> None:
    """Size, entity tag and date come from the response; empty objects are recognised by the server's refusal."""
    assert expected == version_from_response(URI, response)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (head(200, content_length="77"), "the server does not support range requests: it would send the complete file"),
        (head(416, content_range="bytes */5"), NO_RANGE),
        (head(416), NO_RANGE),
        (head(412), "the server responded 412 Precondition Failed to a range request"),
        (
            head(206, content_range="bytes 0-0/*", content_length="1"),
            "the server does not report its size",
        ),
        (
            head(206, content_range="bytes 0-1/9", content_length="2"),
            "the server sent bytes [0, 2) instead of [0, 1)",
        ),
        (head(206, content_range="bytes 0-0/9"), "the server does not declare a body of 1 bytes"),
        (
            head(206, content_range="bytes 0-0/9", content_length="1", transfer_encoding="chunked"),
            "the server does not declare a body of 1 bytes",
        ),
        (head(206, content_length="1"), "malformed Content-Range ''"),
    ],
)
def test_an_invalid_first_response_is_refused(response: ResponseHead, message: str) -> None:
    """Each defect has its own message."""
    with pytest.raises(StorageError) as raised:
        version_from_response(URI, response)
    assert f"{URI}: {message}" == str(raised.value)


@pytest.mark.parametrize(
    ("identity", "version", "conditions"),
    [
        (ObjectVersion(9, '"a"', "then"), '"a"', {"If-Match": '"a"'}),
        (ObjectVersion(9, 'W/"a"', "then"), 'W/"a"', {"If-Unmodified-Since": "then"}),
        (ObjectVersion(9, "", "then"), "then", {"If-Unmodified-Since": "then"}),
        (ObjectVersion(9, 'W/"a"', ""), 'W/"a"', {}),
        (ObjectVersion(9, "", ""), None, {}),
    ],
)
def test_the_strongest_validator_is_used(
    identity: ObjectVersion, version: str | None, conditions: dict[str, str]
) -> None:
    """A strong entity tag is used, otherwise the date: a weak tag matches nothing."""
    assert version == identity.version
    assert conditions == identity.conditions


KNOWN_VERSION = ObjectVersion(77, '"a"', "then")


@pytest.mark.parametrize(
    "fields",
    [
        {"etag": '"b"'},
        {"etag": '"a"', "content_range": "bytes 5-9/78"},
        {"content_range": "bytes 5-7/8", "content_length": "3"},
    ],
)
def test_a_response_for_another_object_is_a_change(fields: dict[str, str]) -> None:
    """Another entity tag or size is a change, even if the server ignores the conditions."""
    response = head(206, **{"content_range": "bytes 5-9/77", "content_length": "5", **fields})
    with pytest.raises(StorageChanged, match="was replaced during the read"):
        check_content_range(URI, response, KNOWN_VERSION, 5, 10)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"etag": 'W/"a"', "last_modified": "later"},
        {"content_range": "bytes 5-9/*"},
    ],
)
def test_a_response_with_fewer_validators_is_accepted(fields: dict[str, str]) -> None:
    """Missing validators are ignored, and so is a date if there is an entity tag."""
    response = head(206, **{"content_range": "bytes 5-9/77", "content_length": "5", **fields})
    check_content_range(URI, response, KNOWN_VERSION, 5, 10)


@given(
    st.integers(100, 599),
    st.dictionaries(st.sampled_from(["content-range", "content-length", "etag"]), st.text(max_size=30)),
)
def test_a_response_is_exactly_the_requested_range_or_an_error(status: int, fields: dict[str, str]) -> None:
    """Whatever a server sends, the read returns the exact range of this object or raises an rfork error."""
    try:
        check_content_range(URI, ResponseHead(status, "1.1", fields), KNOWN_VERSION, 5, 10)
    except StorageError:
        return
    assert 206 == status
    assert "5" == fields["content-length"]
    assert fields.get("etag", '"a"') in ("", '"a"')


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_transient_statuses_are_retried(status: int) -> None:
    """A busy or broken server is retried after its Retry-After."""
    error = error_from_response(URI, head(status, retry_after="7"), b"", lambda status, text: StorageError("explained"))
    assert RetryableError is type(error)
    assert 7.0 == (error.after_s if isinstance(error, RetryableError) else None)


@given(st.binary(max_size=200), st.integers(1, 50))
def test_a_chunked_body_is_decoded(text: bytes, size: int) -> None:
    """A text in chunks of any size is decoded; a truncated one is returned as far as it was received."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    coded = b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    assert text == decode_chunked(coded)
    assert all(text.startswith(decode_chunked(coded[:cut])) for cut in range(len(coded)))


@given(st.binary(max_size=200))
def test_an_invalid_chunked_body_does_not_raise(coded: bytes) -> None:
    """Invalid chunked encoding never breaks a read."""
    assert len(decode_chunked(coded)) <= len(coded)
