"""HTTP header fields that both sides of the http transport parse and write (RFC 9110)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rfork.image.ranges import Range

_ENTITY_TAG = re.compile(r'(?:W/)?"[^"]*"')
_RANGE = re.compile(r"([0-9]{0,19})\s*-\s*([0-9]{0,19})")
_CONTENT_RANGE = re.compile(r"bytes\s+([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", re.IGNORECASE)


class RangeNotSatisfiable(ValueError):
    """A Range field that selects no byte of the file or is malformed (416)."""


def parse_range(value: str, size: int) -> Range | None:
    """Return the half-open byte range that a Range field selects of a file of `size` bytes; None for the
    complete file.

    Other units than bytes must be ignored, and several ranges may be (RFC 9110 14.2): both return None. A
    single malformed range is rejected, so that a client's mistake does not send it 100 GB. Raises
    RangeNotSatisfiable.
    """
    unit, _, ranges = value.partition("=")
    if unit.strip().lower() != "bytes" or "," in ranges:
        return None
    match = _RANGE.fullmatch(ranges.strip())
    if match is None or match.group(1) == match.group(2) == "":
        raise RangeNotSatisfiable(f"malformed range {value!r}")
    first, last = match.groups()
    if first == "":
        begin, end = max(0, size - int(last)), size
    else:
        begin, end = int(first), size if last == "" else min(int(last) + 1, size)
        if last != "" and int(last) < begin:
            raise RangeNotSatisfiable(f"the range {value!r} ends before it begins")
    if begin >= end:
        raise RangeNotSatisfiable(f"the range {value!r} is outside the file's {size} bytes")
    return begin, end


def parse_content_range(value: str) -> tuple[int, int, int | None]:
    """Return (begin, end, size) of a 206 response's Content-Range, half-open; size None if unknown.

    Raises ValueError for anything else.
    """
    match = _CONTENT_RANGE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"malformed Content-Range {value!r}")
    first, last, size = match.groups()
    return int(first), int(last) + 1, None if size == "*" else int(size)


def etag_matches(value: str, etag: str) -> bool:
    """Return True if an If-Match or If-Range field matches `etag` by strong comparison (RFC 9110 8.8.3.2)."""
    return value.strip() == "*" or (not etag.startswith("W/") and etag in _ENTITY_TAG.findall(value))


def bearer_token(fields: Mapping[str, str]) -> str | None:
    """Return the token of an Authorization field with the scheme Bearer (RFC 6750); None if there is none."""
    scheme, _, token = fields.get("authorization", "").strip().partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None
