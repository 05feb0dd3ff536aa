"""What ranged reads decide without sockets: requests, answers, when to ask again, when a second time."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.errors import StorageChanged, StorageError
from rfork.storage.web.answer import Identity, check_part, opened, refusal
from rfork.storage.web.exchange import joined
from rfork.storage.web.request import Origin, Request
from rfork.storage.web.retry import Passing
from rfork.transport.http.heads import ResponseHead

URI = "https://models.example/llama.bin"
NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
NO_RANGE = f"the server answered 416 {HTTPStatus(416).phrase} to a range"  # Python 3.13 words it otherwise


def head(status: int, **fields: str) -> ResponseHead:
    return ResponseHead(status, "1.1", {name.replace("_", "-"): value for name, value in fields.items()})


# Requests.


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host/a", Origin(False, "host", 80)),
        ("https://host/a?b", Origin(True, "host", 443)),
        ("https://host:8443/a", Origin(True, "host", 8443)),
        ("http://[::1]:9000/", Origin(False, "::1", 9000)),
    ],
)
def test_a_url_names_its_origin(url: str, expected: Origin) -> None:
    """Scheme, host and port are what a connection goes to, and what credentials are kept to."""
    assert expected == Request(url).origin


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
def test_no_other_url_is_asked_for(url: str) -> None:
    """What is no plain http or https URL of a possible host is refused, without its query."""
    with pytest.raises(StorageError, match="cannot be asked for") as raised:
        _ = Request(url).origin
    assert "secret" not in str(raised.value)


def test_a_request_hides_what_may_be_secret() -> None:
    """Neither query nor headers are in what a request looks like."""
    request = Request("https://host/a?signature=secret", {"Authorization": "Bearer secret"})
    assert "Request('https://host/a')" == repr(request) == str(request)


def test_a_head_has_the_requests_own_fields_first() -> None:
    """What was signed goes before a field of the same name."""
    request = Request("https://host:1/a%20b?x=1", {"Range": "bytes=1-2", "X-Token": "t"})
    expected = (
        b"GET /a%20b?x=1 HTTP/1.1\r\nHost: host:1\r\nRange: bytes=1-2\r\nX-Token: t\r\nIf-Match: x\r\n\r\n"
    )
    assert expected == request.head({"range": "bytes=0-0", "If-Match": "x"})


@pytest.mark.parametrize(
    "request_",
    [
        Request("http://host/a b"),
        Request("http://host/a", {"Authorization": "Bearer se\r\ncret"}),
        Request("http://host/a", {"Author\nization": "secret"}),
        Request("http://host/a", {"Authorization": "Bearer sécret"}),
    ],
    ids=repr,
)
def test_nothing_is_smuggled_into_a_head(request_: Request) -> None:
    """What would end a line early is refused, without being shown."""
    with pytest.raises(StorageError, match=r"^'http://host/a[b ]*' cannot be asked for: [a-z ]+$"):
        request_.head({})


@pytest.mark.parametrize(
    ("location", "url", "keeps"),
    [
        ("/b", "https://host/b", True),
        ("b?x=1#part", "https://host/a/b?x=1", True),
        ("https://host:443/b", "https://host:443/b", True),
        ("//other/b", "https://other/b", False),
        ("https://host:444/b", "https://host:444/b", False),
        ("https://host.evil/b", "https://host.evil/b", False),
    ],
)
def test_a_redirect_keeps_headers_to_their_origin(location: str, url: str, keeps: bool) -> None:
    """A Location is read relative to the URL, and the headers go nowhere but to the same origin."""
    headers = {"Authorization": "Bearer secret"}
    redirected = Request("https://host/a/", headers).redirected(location)
    assert (url, headers if keeps else {}) == (redirected.url, redirected.headers)


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("http://[::1", "https://host/a/ redirects to what is no URL"),
        ("https://u:SECRET@h/x?sig=SECRET", "'https://…' cannot be asked for: "),
        ("https://h:x/", "'https://h:x/' cannot be asked for: it is no URL"),
        ("http://[::1/?SECRET", "https://host/a/ redirects to what is no URL"),
    ],
)
def test_a_redirect_that_leads_nowhere(location: str, said: str) -> None:
    """It is an error of storage, in one line without a password."""
    with pytest.raises(StorageError) as raised:
        Request("https://host/a/").redirected(location)
    assert said == str(raised.value)[: len(said)]


# Answers.


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            head(206, etag='"a"', last_modified="then", content_range="bytes 0-0/77", content_length="1"),
            Identity(77, '"a"', "then"),
        ),
        (head(416, content_range="bytes */0"), Identity(0, "", "")),
        (head(416, content_range="Bytes  */0", etag='"e"'), Identity(0, '"e"', "")),
        (head(200, content_length="0", etag='"e"'), Identity(0, '"e"', "")),
    ],
)
def test_the_first_byte_tells_what_the_object_is(answer: ResponseHead, expected: Identity) -> None:
    """Size, tag and date are those of the answer; empty objects are known by how servers refuse."""
    assert expected == opened(URI, answer)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (head(200, content_length="77"), "this server has no ranges: it answers with the whole file"),
        (head(416, content_range="bytes */5"), NO_RANGE),
        (head(416), NO_RANGE),
        (head(412), "the server answered 412 Precondition Failed to a range"),
        (
            head(206, content_range="bytes 0-0/*", content_length="1"),
            "the server does not say how large it is",
        ),
        (
            head(206, content_range="bytes 0-1/9", content_length="2"),
            "the server gives bytes [0, 2) where [0, 1) were asked for",
        ),
        (head(206, content_range="bytes 0-0/9"), "the server does not say that its answer has 1 bytes"),
        (
            head(206, content_range="bytes 0-0/9", content_length="1", transfer_encoding="chunked"),
            "the server does not say that its answer has 1 bytes",
        ),
        (head(206, content_length="1"), "cannot understand Content-Range ''"),
    ],
)
def test_what_is_no_first_byte_is_refused(answer: ResponseHead, said: str) -> None:
    """Each has its line."""
    with pytest.raises(StorageError) as raised:
        opened(URI, answer)
    assert f"{URI}: {said}" == str(raised.value)


@pytest.mark.parametrize(
    ("identity", "version", "conditions"),
    [
        (Identity(9, '"a"', "then"), '"a"', {"If-Match": '"a"'}),
        (Identity(9, 'W/"a"', "then"), 'W/"a"', {"If-Unmodified-Since": "then"}),
        (Identity(9, "", "then"), "then", {"If-Unmodified-Since": "then"}),
        (Identity(9, 'W/"a"', ""), 'W/"a"', {}),
        (Identity(9, "", ""), None, {}),
    ],
)
def test_an_object_is_held_to_the_best_that_is_known_of_it(
    identity: Identity, version: str | None, conditions: dict[str, str]
) -> None:
    """A strong tag, else the date: a weak tag matches nothing."""
    assert (version, conditions) == (identity.version, identity.conditions)


KNOWN = Identity(77, '"a"', "then")


@pytest.mark.parametrize(
    "fields",
    [
        {"etag": '"b"'},
        {"etag": '"a"', "content_range": "bytes 5-9/78"},
        {"content_range": "bytes 5-7/8", "content_length": "3"},
    ],
)
def test_an_answer_of_another_object_is_a_change(fields: dict[str, str]) -> None:
    """Another tag or another size, whatever the server made of our conditions."""
    answer = head(206, **{"content_range": "bytes 5-9/77", "content_length": "5", **fields})
    with pytest.raises(StorageChanged, match="was replaced while it was read"):
        check_part(URI, answer, KNOWN, 5, 10)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"etag": 'W/"a"', "last_modified": "later"},
        {"content_range": "bytes 5-9/*"},
    ],
)
def test_an_answer_that_says_less_is_of_the_same_object(fields: dict[str, str]) -> None:
    """What is not told is not held against it; nor is a date where there is a tag."""
    answer = head(206, **{"content_range": "bytes 5-9/77", "content_length": "5", **fields})
    check_part(URI, answer, KNOWN, 5, 10)


@given(
    st.integers(100, 599),
    st.dictionaries(st.sampled_from(["content-range", "content-length", "etag"]), st.text(max_size=30)),
)
def test_no_answer_is_taken_for_a_part_that_it_is_not(status: int, fields: dict[str, str]) -> None:
    """Whatever a server writes, it is the very range of this object, or an error of ours."""
    try:
        check_part(URI, ResponseHead(status, "1.1", fields), KNOWN, 5, 10)
    except StorageError:
        return
    assert (206, "5", True) == (status, fields["content-length"], fields.get("etag", '"a"') in ("", '"a"'))


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_no_error_yet(status: int) -> None:
    """A server that is busy or broken is asked again, after as long as it says."""
    error = refusal(URI, head(status, retry_after="7"), b"", lambda status, text: StorageError("explained"))
    assert (Passing, 7.0) == (type(error), error.after_s if isinstance(error, Passing) else None)


@given(st.binary(max_size=200), st.integers(1, 50))
def test_a_text_in_chunks_is_put_together(text: bytes, size: int) -> None:
    """What is sent in chunks of any size is read as it was; one that is cut off, as far as it came."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    coded = b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    assert text == joined(coded)
    assert all(text.startswith(joined(coded[:cut])) for cut in range(len(coded)))


@given(st.binary(max_size=200))
def test_no_text_in_chunks_breaks_a_read(coded: bytes) -> None:
    """Whatever comes, some of it is text."""
    assert len(joined(coded)) <= len(coded)
