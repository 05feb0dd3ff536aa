"""Messages between processes of one host: what is taken for one, and errors that cross over."""

from __future__ import annotations

import pytest

from rfork.errors import LeaseRefused, RforkError, SourceBusy, SourceChanged, SourceCorrupt, SourceGone
from rfork.transport.same_host.messages import (
    LARGEST_MESSAGE,
    Message,
    decode,
    encode,
    number_in,
    numbers_in,
    problem_of,
    raise_problem,
    text_in,
)


def test_a_message_comes_back() -> None:
    """What is encoded is decoded."""
    message: Message = {"token": "t", "begin": 5, "wishes": [1, 2]}
    assert message == decode(encode(message))


@pytest.mark.parametrize(
    "packet", [b"", b"\xff", b"[]", b"5", b"{", b"[" * 60_000, b'{"a":' + b"9" * 5000 + b"}"]
)
def test_what_is_no_message(packet: bytes) -> None:
    """Whatever a stranger sends is SourceCorrupt at worst."""
    with pytest.raises(SourceCorrupt, match="not a message"):
        decode(packet)


def test_a_message_that_is_too_large() -> None:
    """Is not sent."""
    with pytest.raises(ValueError, match="more than"):
        encode({"token": "x" * LARGEST_MESSAGE})


def test_fields_of_another_kind() -> None:
    """A field that is missing, or is something else, is SourceCorrupt."""
    messages: list[Message] = [{}, {"a": None}, {"a": True}, {"a": [True]}, {"a": ["x"]}, {"a": {}}]
    for message in messages:
        for field_in in (text_in, number_in, numbers_in):
            with pytest.raises(SourceCorrupt):
                field_in(message, "a")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (LeaseRefused("no"), LeaseRefused),
        (SourceBusy("no"), SourceBusy),
        (SourceChanged("no"), SourceChanged),
        (RforkError("no"), SourceGone),
    ],
)
def test_errors_cross_over(error: RforkError, raised: type[RforkError]) -> None:
    """As what they are; one that is not the source's or its guard's is SourceGone."""
    with pytest.raises(raised, match="no") as caught:
        raise_problem(problem_of(error))
    assert raised is caught.type


def test_no_error() -> None:
    """Any other message raises nothing."""
    assert raise_problem({"begin": 5}) is None  # type: ignore[func-returns-value]
