"""An HTTP GET request for a range: URL, headers and their encoding."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urljoin, urlsplit

from rfork.errors import StorageError
from rfork.storage.location import redacted

_VISIBLE = re.compile(r"[\x21-\x7e]+")
_FIELD = re.compile(r"[\t\x20-\x7e]*")


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
        return redacted(self.url)

    @property
    def origin(self) -> HttpOrigin:
        """Endpoint to connect to. Raises StorageError if the URL is not a valid http or https URL."""
        try:
            parts = urlsplit(self.url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # as in the DNS lookup
        except ValueError:  # whose message may contain a secret
            raise StorageError(f"{self.redacted_url!r} is not a valid URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise StorageError(f"{self.redacted_url!r} is not a plain http or https URL")
        secure = parts.scheme == "https"
        return HttpOrigin(secure, parts.hostname, port or (443 if secure else 80))

    def head(self, fields: Mapping[str, str]) -> bytes:
        """Return the encoded GET request with these fields in addition to its own headers.

        Raises StorageError, without quoting any value, if the URL or a header cannot be sent.
        """
        parts = urlsplit(self.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not _VISIBLE.fullmatch(target + parts.netloc):
            raise StorageError(
                f"{self.redacted_url!r} cannot be requested: its special characters are not percent-encoded"
            )
        # The request's own headers were signed, so they override fields of the same name.
        own = {name.lower() for name in self.headers}
        ours = {name: value for name, value in fields.items() if name.lower() not in own}
        lines = [f"GET {target} HTTP/1.1"]
        if "host" not in own:
            lines.append(f"Host: {parts.netloc}")
        for name, value in {**self.headers, **ours}.items():
            if not _VISIBLE.fullmatch(name) or not _FIELD.fullmatch(value):
                raise StorageError(f"{self.redacted_url!r} cannot be requested: a header contains control characters")
            lines.append(f"{name}: {value}")
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def follow(self, location: str) -> HttpRequest:
        """Return the request for a redirect; drops the headers if the origin changes.

        Raises StorageError if it redirects from https to http, or to an invalid URL.
        """
        try:
            target = HttpRequest(urljoin(self.url, location).partition("#")[0])
        except ValueError:
            raise StorageError(f"{self.redacted_url} redirects to an invalid URL") from None
        if self.origin.secure and not target.origin.secure:
            raise StorageError(f"{self.redacted_url} redirects from https to http, which is not allowed")
        return HttpRequest(target.url, self.headers) if target.origin == self.origin else target


Sign = Callable[[], HttpRequest]
"""Creates the request for one attempt. Called for each attempt, on any thread, because a presigned URL may
expire.
"""
