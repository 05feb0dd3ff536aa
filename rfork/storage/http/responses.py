"""Interprets a web server's response to a range request: object version, range, and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from http import HTTPStatus

from rfork.errors import StorageAccessDenied, StorageChanged, StorageError, StorageNotFound
from rfork.net.http_heads import ResponseHead, check_partial_content, parse_content_range
from rfork.storage.http.retry import RetryableError, retry_after

Explain = Callable[[int, bytes], StorageError | None]
"""Translates status and text of an error response for one type of server; None: use the generic meaning."""

RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which a retry may succeed."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})
_UNSATISFIED_RANGE = re.compile(r"bytes\s+\*/([0-9]{1,19})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """Version of an object when it was opened; tag and date are empty if the server sends none."""

    size: int
    etag: str
    modified: str

    @classmethod
    def of(cls, fields: Mapping[str, str], size: int) -> ObjectVersion:
        """Return the version described by response fields."""
        return cls(size, fields.get("etag", ""), fields.get("last-modified", ""))

    @property
    def version(self) -> str | None:
        """Identifier among versions of the same name, as far as the server distinguishes them."""
        return self.etag or self.modified or None

    @property
    def conditions(self) -> dict[str, str]:
        """Request fields that make the server refuse a range of any other version."""
        if self.etag and not self.etag.startswith("W/"):  # weak tags never match (RFC 9110 13.1.1)
            return {"If-Match": self.etag}
        return {"If-Unmodified-Since": self.modified} if self.modified else {}

    def check(self, uri: str, other: ObjectVersion) -> None:
        """Raise StorageChanged if a response is of another version; servers may ignore conditions."""
        strong = bool(self.etag) and not self.etag.startswith("W/")
        for ours, theirs, what in (
            # Proxies may weaken tags that they forward; the condition that we sent used the strong one.
            (self.etag.removeprefix("W/"), other.etag.removeprefix("W/"), "its tag"),
            ("" if strong else self.modified, other.modified, "its date"),
            (str(self.size), str(other.size), "its size"),
        ):
            if ours and theirs and ours != theirs:
                raise StorageChanged(
                    f"{uri} was replaced during the read: {what} is {theirs[:80]} instead of {ours[:80]}"
                )


def version_from_response(uri: str, head: ResponseHead, max_bytes: int = 1) -> ObjectVersion:
    """Return the object's version from the response to a request for its first `max_bytes` bytes.

    Raises StorageError subclasses or RetryableError.
    """
    if head.status == 206:
        size = _parse_content_range(uri, head)[2]
        _part(uri, head, 0, max_bytes if size is None else min(size, max_bytes))
        if size is None:
            raise StorageError(f"{uri}: the server does not report its size")
        return ObjectVersion.of(head.fields, size)
    if head.status == 416 and (match := _UNSATISFIED_RANGE.fullmatch(head.fields.get("content-range", ""))):
        if int(match.group(1)) == 0:
            return ObjectVersion.of(head.fields, 0)
    elif head.status == 200 and head.fields.get("content-length") == "0":
        return ObjectVersion.of(head.fields, 0)
    raise _unusable(uri, head)


def check_content_range(uri: str, head: ResponseHead, identity: ObjectVersion, begin: int, end: int) -> None:
    """Raise StorageError subclasses unless a response's body is bytes `[begin, end)` of the object."""
    if head.status in (412, 416):
        raise StorageChanged(f"{uri} was replaced during the read")
    if head.status != 206:
        raise _unusable(uri, head)
    size = _part(uri, head, begin, end)
    identity.check(uri, ObjectVersion.of(head.fields, identity.size if size is None else size))


def error_from_response(uri: str, head: ResponseHead, text: bytes, explain: Explain | None) -> Exception:
    """Return the error for an unsuccessful status: a StorageError or RetryableError."""
    status_text = status_line(head.status)
    if head.status in RETRYABLE_STATUSES:
        after_s = retry_after(head.fields.get("retry-after", ""), datetime.now(timezone.utc))
        return RetryableError(f"the server responded {status_text}", after_s)
    if explain is not None and (explained := explain(head.status, text)) is not None:
        return explained
    if head.status in (401, 403):
        return StorageAccessDenied(f"{uri}: access denied ({status_text})")
    if head.status in (404, 410):
        return StorageNotFound(f"{uri}: file not found ({status_text})")
    return StorageError(f"{uri}: the server responded {status_text}")


def status_line(status: int) -> str:
    """Return a status with its standard phrase."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _parse_content_range(uri: str, head: ResponseHead) -> tuple[int, int, int | None]:
    """Parse Content-Range: begin and end of the body, and the object's size if reported."""
    try:
        return parse_content_range(head.fields.get("content-range", ""))
    except ValueError as error:
        raise StorageError(f"{uri}: the server {error}") from None


def _part(uri: str, head: ResponseHead, begin: int, end: int) -> int | None:
    """Return the object's size, if reported. Raises StorageError subclasses unless the body is `[begin,
    end)`.
    """
    size = _parse_content_range(uri, head)[2]
    if size is not None and size < end:
        raise StorageChanged(f"{uri} was replaced during the read: it has {size} bytes now")
    try:
        check_partial_content(head.fields, begin, end)
    except ValueError as error:
        raise StorageError(f"{uri}: the server {error}") from None
    return size


def _unusable(uri: str, head: ResponseHead) -> StorageError:
    if head.status == 200:
        return StorageError(f"{uri}: the server does not support range requests: it would send the complete file")
    return StorageError(f"{uri}: the server responded {status_line(head.status)} to a range request")
