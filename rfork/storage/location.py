"""URIs of tensor files, and what users write for them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from rfork.errors import SettingsError

SCHEMES = ("file", "s3", "http", "https", "gs", "az")
WEB: Final = ("http", "https")

_PATH_CHARACTERS: Final = "/%!$&'()*+,;=:@"
"""What a URL's path may hold beside letters, digits and ``-._~`` (RFC 3986 3.3)."""
_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class Location:
    """A URI in its parts: ``SCHEME://HOST/PATH``; the path has no leading slash but a file's.

    The path of a web server is quoted as the user wrote it, as ``%2F`` is another name than ``/`` and a
    signature is of just these characters; all other paths are decoded.
    `host` is the bucket (s3, gs), the container (az) or the server's host:port. A `query` (a presigned
    URL's) belongs to this one name and to no other.
    """

    scheme: str
    host: str
    path: str
    query: str = field(default="", repr=False)

    @classmethod
    def parse(cls, text: str | Path) -> Location:
        """Take a URI, or a path of this machine. Raises SettingsError for anything else."""
        text = str(text)
        if "://" not in text:
            if not text:
                raise SettingsError("an empty name is no file")
            path = Path(text).expanduser().absolute()
            return cls("file", "", f"{path}/" if text.endswith("/") and str(path) != "/" else str(path))
        try:
            parts = urlsplit(text)
            _ = parts.port if parts.scheme in WEB else None  # raises where it is no number
        except ValueError:  # whose words may hold what is secret
            raise SettingsError(f"{redacted(text)!r} is not a URI") from None
        if parts.scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise SettingsError(f"{redacted(text)!r} is of no kind known here", hint=f"known are {known} and paths")
        if parts.scheme == "file":
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise SettingsError(
                    f"{redacted(text)!r} names no file of this machine",
                    hint="e.g. file:///models/llama.safetensors",
                )
            return cls("file", "", unquote(parts.path))
        if not parts.netloc:
            raise SettingsError(f"{redacted(text)!r} names no host or bucket")
        if "@" in parts.netloc:
            raise SettingsError("a URI of storage carries no user or password: they would show in logs")
        if parts.scheme in WEB:
            return cls(parts.scheme, parts.netloc, percent_encoded(parts.path.removeprefix("/")), parts.query)
        # A key may hold ? and #; S3's own tools write it as it is.
        key = text.split("://", 1)[1].partition("/")[2]
        return cls(parts.scheme, parts.netloc.split("?")[0], key)

    @property
    def uri(self) -> str:
        """The URI, without the query: that may hold a secret."""
        if self.scheme == "file":
            return Path(self.path).as_uri() + ("/" if self.path.endswith("/") and self.path != "/" else "")
        return f"{self.scheme}://{self.host}/{self.path}"

    @property
    def name(self) -> str:
        """The last part of the path; empty for a folder."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The folder it lies in; of a folder (whose path ends with ``/``, or is empty) itself."""
        head, slash, _ = self.path.rpartition("/")
        return Location(self.scheme, self.host, head + slash)

    @property
    def folder(self) -> Location:
        """The same, as a folder."""
        path = self.path if self.path.endswith("/") or not self.path else f"{self.path}/"
        return Location(self.scheme, self.host, path)

    def child(self, name: str) -> Location:
        """A name within this folder; of a web server, with what is not quoted and must be."""
        name = percent_encoded(name) if self.scheme in WEB else name
        return Location(self.scheme, self.host, self.folder.path + name)


def percent_encoded(path: str) -> str:
    """A URL's path in which all that must be quoted is; what is quoted already stays so."""
    return quote(_LONE_PERCENT.sub("%25", path), safe=_PATH_CHARACTERS)


def redacted(text: str) -> str:
    """A URI as errors may say it: without its query; no more than its scheme where it may hold a password."""
    scheme, mark, rest = text.partition("://")
    if "@" in rest:
        return f"{scheme.partition('?')[0]}{mark}…"
    return text.partition("?")[0].partition("#")[0]
