"""An HTTP request: URL, headers and their encoding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urljoin, urlsplit

_VISIBLE = re.compile(r"[\x21-\x7e]+")
_FIELD = re.compile(r"[\t\x20-\x7e]*")


class InvalidRequest(ValueError):
    """A URL or header that cannot be sent. The text contains no secret."""


@dataclass(frozen=True, slots=True)
class HttpOrigin:
    """Endpoint of a connection; credentials for one origin are not sent to another."""

    secure: bool
    host: str
    port: int


@dataclass(frozen=True, slots=True, repr=False)
class HttpRequest:
    """A URL and its headers, such as Authorization; both may contain secrets."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Request({self.redacted_url!r})"

    @property
    def redacted_url(self) -> str:
        """URL for error messages: without query or password."""
        return redacted_url(self.url)

    @property
    def origin(self) -> HttpOrigin:
        """Endpoint to connect to. Raises InvalidRequest if the URL is not a valid http or https URL."""
        try:
            parts = urlsplit(self.url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # as in the DNS lookup
        except ValueError:  # whose message may contain a secret
            raise InvalidRequest(f"{self.redacted_url!r} is not a valid URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise InvalidRequest(f"{self.redacted_url!r} is not a plain http or https URL")
        secure = parts.scheme == "https"
        return HttpOrigin(secure, parts.hostname, port or (443 if secure else 80))

    def head(self, fields: Mapping[str, str]) -> bytes:
        """Return the encoded GET request with these fields in addition to its own headers.

        Raises InvalidRequest if the URL or a header cannot be sent.
        """
        parts = urlsplit(self.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # The request's own headers were signed, so they override fields of the same name.
        own = {name.lower() for name in self.headers}
        ours = {name: value for name, value in fields.items() if name.lower() not in own}
        host = {} if "host" in own else {"Host": parts.netloc}
        try:
            return encode_head("GET", target, {**host, **self.headers, **ours}.items())
        except InvalidRequest as error:
            raise InvalidRequest(f"{self.redacted_url!r} cannot be requested: {error}") from None

    def follow(self, location: str) -> HttpRequest:
        """Return the request for a redirect; drops the headers if the origin changes.

        Raises InvalidRequest if it redirects from https to http, or to an invalid URL.
        """
        try:
            target = HttpRequest(urljoin(self.url, location).partition("#")[0])
        except ValueError:
            raise InvalidRequest(f"{self.redacted_url} redirects to an invalid URL") from None
        if self.origin.secure and not target.origin.secure:
            raise InvalidRequest(f"{self.redacted_url} redirects from https to http, which is not allowed")
        return HttpRequest(target.url, self.headers) if target.origin == self.origin else target


def encode_head(method: str, target: str, fields: Iterable[tuple[str, str]]) -> bytes:
    """Return the bytes of a request head. Raises InvalidRequest, without quoting any value."""
    if not _VISIBLE.fullmatch(target):
        raise InvalidRequest("its special characters are not percent-encoded")
    lines = [f"{method} {target} HTTP/1.1"]
    for name, value in fields:
        if not _VISIBLE.fullmatch(name) or not _FIELD.fullmatch(value):
            raise InvalidRequest("a header contains control characters")
        lines.append(f"{name}: {value}")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def redacted_url(text: str) -> str:
    """Return a URI that is safe for error messages: without its query, or only the scheme if it may contain a
    password.
    """
    scheme, mark, rest = text.partition("://")
    if "@" in rest:
        return f"{scheme.partition('?')[0]}{mark}…"
    return text.partition("?")[0].partition("#")[0]
