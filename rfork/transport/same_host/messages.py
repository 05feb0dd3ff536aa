"""What is said over a same-host connection: one JSON object a packet, and errors as such. For both sides."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from rfork.errors import (
    LeaseRefused,
    NoPeerAccess,
    NotOneHost,
    RforkError,
    SourceBusy,
    SourceChanged,
    SourceCorrupt,
    SourceGone,
    SourceStalled,
    TransportUnusable,
    VersionMismatch,
)
from rfork.fields import MOST_TOLD

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
Message: TypeAlias = Mapping[str, JsonValue]

LARGEST_MESSAGE: Final = 64 << 10
"""Bytes of one packet, at most."""

_KINDS: Final[Mapping[str, type[RforkError]]] = {
    kind.__name__: kind
    for kind in (
        LeaseRefused,
        NoPeerAccess,
        NotOneHost,
        SourceBusy,
        SourceChanged,
        SourceCorrupt,
        SourceGone,
        SourceStalled,
        TransportUnusable,
        VersionMismatch,
    )
}


def encode(message: Message) -> bytes:
    """One packet. Raises ValueError for a message that is too large."""
    packet = json.dumps(message, separators=(",", ":")).encode()
    if len(packet) > LARGEST_MESSAGE:
        raise ValueError(f"a message has {len(packet)} bytes, more than {LARGEST_MESSAGE}")
    return packet


def decode(packet: bytes) -> Message:
    """The message in a packet. Raises SourceCorrupt for what is none."""
    try:
        message: JsonValue = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise SourceCorrupt(f"not a message: {error}") from None
    if not isinstance(message, dict):
        raise SourceCorrupt("not a message: no JSON object")
    return message


def text_in(message: Message, name: str) -> str:
    """A field that is text. Raises SourceCorrupt where it is not."""
    value = message.get(name)
    if not isinstance(value, str):
        raise SourceCorrupt(f"a message without the text {name!r}")
    return value


def number_in(message: Message, name: str) -> int:
    """A field that is a whole number. Raises SourceCorrupt where it is not."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SourceCorrupt(f"a message without the number {name!r}")
    return value


def numbers_in(message: Message, name: str) -> list[int]:
    """A field that is a list of whole numbers. Raises SourceCorrupt where it is not."""
    value = message.get(name)
    numbers = [part for part in value if type(part) is int] if isinstance(value, list) else []
    if not isinstance(value, list) or len(numbers) != len(value):
        raise SourceCorrupt(f"a message without the numbers {name!r}")
    return numbers


def problem_of(error: RforkError) -> Message:
    """The message that raises this error on the other side. Runs on the source."""
    return {"error": error.kind, "detail": str(error)[:MOST_TOLD], "hint": error.hint[:MOST_TOLD]}


def raise_problem(message: Message) -> None:
    """Raise the error that a message is; nothing where it is none. Runs on the target.

    Errors of the source and its guard as what they are, any other as SourceGone: whatever the other side
    says, this side is not to blame for it.
    """
    kind = message.get("error")
    if kind is None:
        return
    detail, hint = message.get("detail"), message.get("hint")
    text = detail if isinstance(detail, str) and detail else f"the source says {kind!r}"
    raised = _KINDS.get(kind, SourceGone) if isinstance(kind, str) else SourceGone
    raise raised(text[:MOST_TOLD], hint=hint[:MOST_TOLD] if isinstance(hint, str) else "")
