"""Interpretation of responses to ranged reads, without sockets."""

from __future__ import annotations

from datetime import datetime, timezone
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.errors import StorageChanged, StorageError
from rfork.net.http_heads import ResponseHead
from rfork.storage.http.responses import (
    ObjectVersion,
    check_content_range,
    error_from_response,
    version_from_response,
)
from rfork.storage.http.retry import RetryableError

URI = "https://models.example/llama.bin"
NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=timezone.utc)
NO_RANGE = f"the server responded 416 {HTTPStatus(416).phrase} to a range request"  # Python 3.13 has another phrase


def head(status: int, **fields: str) -> ResponseHead:
    return ResponseHead(status, "1.1", {name.replace("_", "-"): value for name, value in fields.items()})


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (
            head(206, etag='"a"', last_modified="then", content_range="bytes 0-0/77", content_length="1"),
            ObjectVersion(77, '"a"', "then"),
        ),
        (head(416, content_range="bytes */0"), ObjectVersion(0, "", "")),
        (head(416, content_range="Bytes  */0", etag='"e"'), ObjectVersion(0, '"e"', "")),
        (head(200, content_length="0", etag='"e"'), ObjectVersion(0, '"e"', "")),
    ],
)
def test_the_first_byte_identifies_the_object(response: ResponseHead, expected: ObjectVersion) -> None:
    """Size, entity tag and date come from the response; empty objects are recognised by the server's refusal."""
    assert expected == version_from_response(URI, response)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (head(200, content_length="77"), "the server does not support range requests: it would send the complete file"),
        (head(416, content_range="bytes */5"), NO_RANGE),
        (head(416), NO_RANGE),
        (head(412), "the server responded 412 Precondition Failed to a range request"),
        (
            head(206, content_range="bytes 0-0/*", content_length="1"),
            "the server does not report its size",
        ),
        (
            head(206, content_range="bytes 0-1/9", content_length="2"),
            "the server sent bytes [0, 2) instead of [0, 1)",
        ),
        (head(206, content_range="bytes 0-0/9"), "the server does not declare a body of 1 bytes"),
        (
            head(206, content_range="bytes 0-0/9", content_length="1", transfer_encoding="chunked"),
            "the server does not declare a body of 1 bytes",
        ),
        (head(206, content_length="1"), "the server sent a malformed Content-Range ''"),
    ],
)
def test_an_invalid_first_response_is_refused(response: ResponseHead, message: str) -> None:
    """Each defect has its own message."""
    with pytest.raises(StorageError) as raised:
        version_from_response(URI, response)
    assert f"{URI}: {message}" == str(raised.value)


@pytest.mark.parametrize(
    ("identity", "version", "conditions"),
    [
        (ObjectVersion(9, '"a"', "then"), '"a"', {"If-Match": '"a"'}),
        (ObjectVersion(9, 'W/"a"', "then"), 'W/"a"', {"If-Unmodified-Since": "then"}),
        (ObjectVersion(9, "", "then"), "then", {"If-Unmodified-Since": "then"}),
        (ObjectVersion(9, 'W/"a"', ""), 'W/"a"', {}),
        (ObjectVersion(9, "", ""), None, {}),
    ],
)
def test_the_strongest_validator_is_used(
    identity: ObjectVersion, version: str | None, conditions: dict[str, str]
) -> None:
    """A strong entity tag is used, otherwise the date: a weak tag matches nothing."""
    assert version == identity.version
    assert conditions == identity.conditions


KNOWN_VERSION = ObjectVersion(77, '"a"', "then")


@pytest.mark.parametrize(
    "fields",
    [
        {"etag": '"b"'},
        {"etag": '"a"', "content_range": "bytes 5-9/78"},
        {"content_range": "bytes 5-7/8", "content_length": "3"},
    ],
)
def test_a_response_for_another_object_is_a_change(fields: dict[str, str]) -> None:
    """Another entity tag or size is a change, even if the server ignores the conditions."""
    response = head(206, **{"content_range": "bytes 5-9/77", "content_length": "5", **fields})
    with pytest.raises(StorageChanged, match="was replaced during the read"):
        check_content_range(URI, response, KNOWN_VERSION, 5, 10)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"etag": 'W/"a"', "last_modified": "later"},
        {"content_range": "bytes 5-9/*"},
    ],
)
def test_a_response_with_fewer_validators_is_accepted(fields: dict[str, str]) -> None:
    """Missing validators are ignored, and so is a date if there is an entity tag."""
    response = head(206, **{"content_range": "bytes 5-9/77", "content_length": "5", **fields})
    check_content_range(URI, response, KNOWN_VERSION, 5, 10)


@given(
    st.integers(100, 599),
    st.dictionaries(st.sampled_from(["content-range", "content-length", "etag"]), st.text(max_size=30)),
)
def test_a_response_is_exactly_the_requested_range_or_an_error(status: int, fields: dict[str, str]) -> None:
    """Whatever a server sends, the read returns the exact range of this object or raises an rfork error."""
    try:
        check_content_range(URI, ResponseHead(status, "1.1", fields), KNOWN_VERSION, 5, 10)
    except StorageError:
        return
    assert 206 == status
    assert "5" == fields["content-length"]
    assert fields.get("etag", '"a"') in ("", '"a"')


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_transient_statuses_are_retried(status: int) -> None:
    """A busy or broken server is retried after its Retry-After."""
    error = error_from_response(URI, head(status, retry_after="7"), b"", lambda status, text: StorageError("explained"))
    assert RetryableError is type(error)
    assert 7.0 == (error.after_s if isinstance(error, RetryableError) else None)
