"""HTTP requests: origins, encoding and redirects."""

from __future__ import annotations

import pytest

from rfork.net.request import HttpOrigin, HttpRequest, InvalidRequest


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
    with pytest.raises(InvalidRequest, match=r"is not a (valid|plain)") as raised:
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
    with pytest.raises(InvalidRequest, match=r"^'http://host/a[b ]*' cannot be requested: [a-z -]+$"):
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
    """The error is one line without a password."""
    with pytest.raises(InvalidRequest) as raised:
        HttpRequest("https://host/a/").follow(location)
    assert message == str(raised.value)[: len(message)]
