"""What is asked of a web server for one attempt at a range: URL, headers, and the bytes they become."""

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
    """What a connection goes to; credentials for one origin are not shown to another."""

    secure: bool
    host: str
    port: int


@dataclass(frozen=True, slots=True, repr=False)
class HttpRequest:
    """A URL and the headers that go with it, such as Authorization; either may hold a secret."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Request({self.redacted_url!r})"

    @property
    def redacted_url(self) -> str:
        """The URL as errors say it: without its query, or a password."""
        return redacted(self.url)

    @property
    def origin(self) -> HttpOrigin:
        """Where to connect to. Raises StorageError for what is no http or https URL."""
        try:
            parts = urlsplit(self.url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # as it will be looked up
        except ValueError:  # whose words may hold what is secret
            raise StorageError(f"{self.redacted_url!r} cannot be asked for: it is no URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise StorageError(f"{self.redacted_url!r} cannot be asked for: it is no plain http or https URL")
        secure = parts.scheme == "https"
        return HttpOrigin(secure, parts.hostname, port or (443 if secure else 80))

    def head(self, fields: Mapping[str, str]) -> bytes:
        """The bytes of a GET with these fields beside its own headers.

        Raises StorageError, which shows no value, where something cannot stand in an HTTP head.
        """
        parts = urlsplit(self.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not _VISIBLE.fullmatch(target + parts.netloc):
            raise StorageError(f"{self.redacted_url!r} cannot be asked for: its special characters are not quoted")
        # A header of the request itself is what was signed: it stands before one of the same name.
        own = {name.lower() for name in self.headers}
        ours = {name: value for name, value in fields.items() if name.lower() not in own}
        lines = [f"GET {target} HTTP/1.1"]
        if "host" not in own:
            lines.append(f"Host: {parts.netloc}")
        for name, value in {**self.headers, **ours}.items():
            if not _VISIBLE.fullmatch(name) or not _FIELD.fullmatch(value):
                raise StorageError(f"{self.redacted_url!r} cannot be asked for: a header holds control characters")
            lines.append(f"{name}: {value}")
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def follow(self, location: str) -> HttpRequest:
        """Where an answer's Location leads: without these headers where that is another origin.

        Raises StorageError where it leads from https to http, or nowhere.
        """
        try:
            target = HttpRequest(urljoin(self.url, location).partition("#")[0])
        except ValueError:
            raise StorageError(f"{self.redacted_url} redirects to what is no URL") from None
        if self.origin.secure and not target.origin.secure:
            raise StorageError(f"{self.redacted_url} redirects from https to http, which is not followed")
        return HttpRequest(target.url, self.headers) if target.origin == self.origin else target


Sign = Callable[[], HttpRequest]
"""Makes the request for one attempt, anew each time: a presigned URL may expire. Called on any thread."""
