"""Strict parser of HTTP/1.1 message heads (RFC 9112) and of the header fields of ranges (RFC 9110).

Hand-written because it runs between chunks, when the CPU caches hold only chunk data: a general parser costs
a tenth of the transport's throughput there. It rejects everything optional (bare line feeds, folded lines,
spaces around names), so it has few states.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rf"({_TOKEN}) ([\x21-\x7e]+) HTTP/([0-9]\.[0-9])")
_REQUEST_BEGUN = re.compile(rf"{_TOKEN}(?: [\x21-\x7e]*(?: [\x20-\x7e]*)?)?(?:\r|\Z)".encode())
_STATUS_LINE = re.compile(r"HTTP/(1\.[0-9]) ([0-9]{3})(?: [\t\x20-\x7e\x80-\xff]*)?")
_STATUS_BEGUN = b"HTTP/1."
_NAME = re.compile(_TOKEN)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_END = b"\r\n\r\n"
_ENTITY_TAG = re.compile(r'(?:W/)?"[^"]*"')
_RANGE = re.compile(r"([0-9]{0,19})\s*-\s*([0-9]{0,19})")
_CONTENT_RANGE = re.compile(r"bytes\s+([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", re.IGNORECASE)


class MalformedMessage(ValueError):
    """Not a valid HTTP/1.1 message; `status` is the server's response code for it."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request head; field names are in lower case."""

    method: str
    request_target: str
    version: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A final (not 1xx) response head; field names are in lower case."""

    status: int
    version: str
    fields: Mapping[str, str]


def parse_request(received: bytes, max_bytes: int) -> tuple[RequestHead, bytes] | None:
    """Return the head at the start of `received` and the bytes after it; None if it is incomplete.

    Raises MalformedMessage as early as possible, also for a head of more than `max_bytes` bytes.
    """
    received = received.removeprefix(b"\r\n")  # RFC 9112 2.2: some clients end the previous request like this
    if (end := _end_of_head(received, max_bytes)) is None:
        first = received.partition(b"\r\n")[0]
        if first and not _REQUEST_BEGUN.match(first):
            raise MalformedMessage("not an HTTP request")
        return None
    lines = _lines(received[:end])
    match = _REQUEST_LINE.fullmatch(lines[0])
    if match is None:
        raise MalformedMessage("malformed request line")
    method, request_target, version = match.groups()
    if not version.startswith("1."):
        raise MalformedMessage(f"HTTP/{version} is not supported", 505)
    fields = _fields(lines[1:])
    if version >= "1.1" and "," in fields.get("host", ","):
        raise MalformedMessage("a request must have exactly one Host field")
    return RequestHead(method, request_target, version, fields), received[end + len(_END) :]


def parse_response(received: bytes, max_bytes: int) -> tuple[ResponseHead, bytes] | None:
    """Return the final head in `received`, skipping 1xx heads, and the bytes after it; None if it is
    incomplete.

    Raises MalformedMessage.
    """
    while (end := _end_of_head(received, max_bytes)) is not None:
        lines = _lines(received[:end])
        match = _STATUS_LINE.fullmatch(lines[0])
        if match is None:
            raise MalformedMessage("malformed status line")
        received = received[end + len(_END) :]
        status = int(match.group(2))
        if status >= 200:
            return ResponseHead(status, match.group(1), _fields(lines[1:])), received
    if not received.startswith(_STATUS_BEGUN[: len(received)]):
        raise MalformedMessage("not an HTTP response")
    return None


def is_keep_alive(head: RequestHead | ResponseHead) -> bool:
    """Return True if the connection stays open after this message."""
    options = head.fields.get("connection", "").lower()
    return head.version >= "1.1" and "close" not in (option.strip() for option in options.split(","))


def _end_of_head(received: bytes, max_bytes: int) -> int | None:
    end = received.find(_END, 0, max_bytes)
    if end >= 0:
        return end
    if len(received) >= max_bytes:
        raise MalformedMessage(f"the head is longer than {max_bytes} bytes", 431)
    if b"\n" in received.replace(b"\r\n", b""):
        raise MalformedMessage("lines must end in CR LF")
    return None


def _lines(head: bytes) -> list[str]:
    lines = head.decode("latin-1").split("\r\n")
    if _CONTROL.search("".join(lines)):
        raise MalformedMessage("control characters are not allowed in a head")
    return lines


def _fields(lines: list[str]) -> dict[str, str]:
    """Return the fields by name; repeated fields are joined by commas (RFC 9110 5.2)."""
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise MalformedMessage("malformed header field")
        name, value = name.lower(), value.strip(" \t")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


class RangeNotSatisfiable(ValueError):
    """A Range field that selects no byte of the file or is malformed (416)."""


def parse_range(value: str, size: int) -> tuple[int, int] | None:
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
        raise ValueError(f"sent a malformed Content-Range {value!r}")
    first, last, size = match.groups()
    return int(first), int(last) + 1, None if size == "*" else int(size)


def check_partial_content(fields: Mapping[str, str], begin: int, end: int) -> None:
    """Raise ValueError, whose text is a predicate of the server, unless the fields of a 206 response announce a
    plain body with exactly the bytes `[begin, end)` of the file.
    """
    got_begin, got_end, _ = parse_content_range(fields.get("content-range", ""))
    if (got_begin, got_end) != (begin, end):
        raise ValueError(f"sent bytes [{got_begin}, {got_end}) instead of [{begin}, {end})")
    if fields.get("content-length") != str(end - begin) or "transfer-encoding" in fields:
        raise ValueError(f"does not declare a body of {end - begin} bytes")
    if fields.get("content-encoding", "identity") != "identity":
        raise ValueError(f"encodes the body as {fields['content-encoding'][:40]}")


def etag_matches(value: str, etag: str) -> bool:
    """Return True if an If-Match or If-Range field matches `etag` by strong comparison (RFC 9110 8.8.3.2)."""
    return value.strip() == "*" or (not etag.startswith("W/") and etag in _ENTITY_TAG.findall(value))


def bearer_token(fields: Mapping[str, str]) -> str | None:
    """Return the token of an Authorization field with the scheme Bearer (RFC 6750); None if there is none."""
    scheme, _, token = fields.get("authorization", "").strip().partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None
