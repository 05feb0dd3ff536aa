"""Messages between processes of one host: encoding, validation and errors."""

from __future__ import annotations

import pytest

from rfork.errors import (
    LeaseRejected,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceUnavailable,
    SourceWeightsChanged,
)
from rfork.transport.same_host.connection import (
    MAX_MESSAGE_BYTES,
    Message,
    decode,
    encode,
    encode_error,
    get_int,
    get_ints,
    get_str,
    raise_error,
)


def test_a_message_survives_encoding() -> None:
    """Decoding an encoded message returns an equal one."""
    message: Message = {"token": "t", "begin": 5, "alignment": [1, 2]}
    assert message == decode(encode(message))


@pytest.mark.parametrize("packet", [b"", b"\xff", b"[]", b"5", b"{", b"[" * 60_000, b'{"a":' + b"9" * 5000 + b"}"])
def test_an_invalid_packet_is_source_corrupt(packet: bytes) -> None:
    """Arbitrary input from a client raises at worst SourceCorrupt."""
    with pytest.raises(SourceCorrupt, match="not a message"):
        decode(packet)


def test_a_message_that_is_too_large_is_rejected() -> None:
    """Encoding raises ValueError."""
    with pytest.raises(ValueError, match="more than"):
        encode({"token": "x" * MAX_MESSAGE_BYTES})


def test_a_field_of_the_wrong_type_is_source_corrupt() -> None:
    """A missing field or one of another type raises SourceCorrupt."""
    messages: list[Message] = [{}, {"a": None}, {"a": True}, {"a": [True]}, {"a": ["x"]}, {"a": {}}]
    for message in messages:
        for getter in (get_str, get_int, get_ints):
            with pytest.raises(SourceCorrupt):
                getter(message, "a")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (LeaseRejected("no"), LeaseRejected),
        (SourceBusy("no"), SourceBusy),
        (SourceWeightsChanged("no"), SourceWeightsChanged),
        (RforkError("no"), SourceUnavailable),
    ],
)
def test_errors_are_raised_on_the_other_side(error: RforkError, raised: type[RforkError]) -> None:
    """Errors of the source and its gate are unchanged; any other becomes SourceUnavailable."""
    with pytest.raises(raised, match="no") as caught:
        raise_error(encode_error(error))
    assert raised is caught.type


def test_a_message_without_an_error_does_not_raise() -> None:
    """Other messages raise nothing."""
    assert raise_error({"begin": 5}) is None  # type: ignore[func-returns-value]
