"""URIs and paths of tensor files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from rfork.errors import SettingsError
from rfork.net.request import redacted_url

SCHEMES = ("file", "s3", "http", "https", "gs", "az")
WEB: Final = ("http", "https")

_PATH_CHARACTERS: Final = "/%!$&'()*+,;=:@"
"""Characters that a URL's path may contain besides letters, digits and ``-._~`` (RFC 3986 3.3)."""
_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed URI: ``SCHEME://HOST/PATH``; only a file's path has a leading slash.

    The path on a web server keeps the user's percent-encoding, because ``%2F`` and ``/`` are different names
    and signatures cover these exact characters; all other paths are decoded. `host` is the bucket (s3, gs),
    the container (az) or the server's host:port. A `query` (of a presigned URL) applies only to this name.
    """

    scheme: str
    host: str
    path: str
    query: str = field(default="", repr=False)

    @classmethod
    def parse(cls, text: str | Path) -> Location:
        """Parse a URI or a local path. Raises SettingsError for anything else."""
        text = str(text)
        if "://" not in text:
            if not text:
                raise SettingsError("the file name is empty")
            path = Path(text).expanduser().absolute()
            return cls("file", "", f"{path}/" if text.endswith("/") and str(path) != "/" else str(path))
        try:
            parts = urlsplit(text)
            _ = parts.port if parts.scheme in WEB else None  # raises if it is not a number
        except ValueError:  # whose message may contain a secret
            raise SettingsError(f"{redacted_url(text)!r} is not a URI") from None
        if parts.scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise SettingsError(f"{redacted_url(text)!r} has an unknown scheme", hint=f"supported: {known} and paths")
        if parts.scheme == "file":
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise SettingsError(
                    f"{redacted_url(text)!r} is not a file on this machine",
                    hint="e.g. file:///models/llama.safetensors",
                )
            return cls("file", "", unquote(parts.path))
        if not parts.netloc:
            raise SettingsError(f"{redacted_url(text)!r} has no host or bucket")
        if "@" in parts.netloc:
            raise SettingsError("a storage URI must not contain a user or password: they would appear in logs")
        if parts.scheme in WEB:
            return cls(parts.scheme, parts.netloc, percent_encoded(parts.path.removeprefix("/")), parts.query)
        # A key may contain ? and #; S3's own tools do not encode them.
        key = text.split("://", 1)[1].partition("/")[2]
        return cls(parts.scheme, parts.netloc.split("?")[0], key)

    @property
    def uri(self) -> str:
        """The URI without the query, which may contain a secret."""
        if self.scheme == "file":
            return Path(self.path).as_uri() + ("/" if self.path.endswith("/") and self.path != "/" else "")
        return f"{self.scheme}://{self.host}/{self.path}"

    @property
    def name(self) -> str:
        """Last part of the path; empty for a folder."""
        return self.path.rpartition("/")[2]

    @property
    def blob_name(self) -> str:
        """The name by which a store opens it: with the query, which may contain a secret."""
        return self.name + (f"?{self.query}" if self.query else "")

    @property
    def parent(self) -> Location:
        """The parent folder; a folder (a path that ends with ``/`` or is empty) is its own parent."""
        head, slash, _ = self.path.rpartition("/")
        return Location(self.scheme, self.host, head + slash)

    @property
    def folder(self) -> Location:
        """The same location as a folder."""
        path = self.path if self.path.endswith("/") or not self.path else f"{self.path}/"
        return Location(self.scheme, self.host, path)

    def child(self, name: str) -> Location:
        """Return the location of a name in this folder; percent-encodes it where needed on a web server."""
        name = percent_encoded(name) if self.scheme in WEB else name
        return Location(self.scheme, self.host, self.folder.path + name)


def percent_encoded(path: str) -> str:
    """Percent-encode a URL's path where needed; existing escapes stay unchanged."""
    return quote(_LONE_PERCENT.sub("%25", path), safe=_PATH_CHARACTERS)
