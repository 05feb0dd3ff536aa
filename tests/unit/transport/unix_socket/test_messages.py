"""Messages between processes of one host: what is taken for one, and errors that cross over."""

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
from rfork.transport.unix_socket.messages import (
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


def test_a_message_comes_back() -> None:
    """What is encoded is decoded."""
    message: Message = {"token": "t", "begin": 5, "wishes": [1, 2]}
    assert message == decode(encode(message))


@pytest.mark.parametrize("packet", [b"", b"\xff", b"[]", b"5", b"{", b"[" * 60_000, b'{"a":' + b"9" * 5000 + b"}"])
def test_what_is_no_message(packet: bytes) -> None:
    """Whatever a stranger sends is SourceCorrupt at worst."""
    with pytest.raises(SourceCorrupt, match="not a message"):
        decode(packet)


def test_a_message_that_is_too_large() -> None:
    """Is not sent."""
    with pytest.raises(ValueError, match="more than"):
        encode({"token": "x" * MAX_MESSAGE_BYTES})


def test_fields_of_another_kind() -> None:
    """A field that is missing, or is something else, is SourceCorrupt."""
    messages: list[Message] = [{}, {"a": None}, {"a": True}, {"a": [True]}, {"a": ["x"]}, {"a": {}}]
    for message in messages:
        for field_in in (get_str, get_int, get_ints):
            with pytest.raises(SourceCorrupt):
                field_in(message, "a")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (LeaseRejected("no"), LeaseRejected),
        (SourceBusy("no"), SourceBusy),
        (SourceWeightsChanged("no"), SourceWeightsChanged),
        (RforkError("no"), SourceUnavailable),
    ],
)
def test_errors_cross_over(error: RforkError, raised: type[RforkError]) -> None:
    """As what they are; one that is not the source's or its guard's is SourceUnavailable."""
    with pytest.raises(raised, match="no") as caught:
        raise_error(encode_error(error))
    assert raised is caught.type


def test_no_error() -> None:
    """Any other message raises nothing."""
    assert raise_error({"begin": 5}) is None  # type: ignore[func-returns-value]
