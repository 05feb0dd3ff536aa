"""What is said over a same-host connection: one JSON object a packet, and errors as such. For both sides."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from rfork.errors import (
    LeaseRejected,
    NotSameHost,
    PeerAccessUnavailable,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
    SourceWeightsChanged,
    TransportUnavailable,
    VersionMismatch,
)
from rfork.schema.types import MAX_TEXT_LENGTH

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
Message: TypeAlias = Mapping[str, JsonValue]

MAX_MESSAGE_BYTES: Final = 64 << 10
"""Bytes of one packet, at most."""

_ERROR_TYPES: Final[Mapping[str, type[RforkError]]] = {
    error_type.__name__: error_type
    for error_type in (
        LeaseRejected,
        PeerAccessUnavailable,
        NotSameHost,
        SourceBusy,
        SourceWeightsChanged,
        SourceCorrupt,
        SourceUnavailable,
        SourceTimeout,
        TransportUnavailable,
        VersionMismatch,
    )
}


def encode(message: Message) -> bytes:
    """One packet. Raises ValueError for a message that is too large."""
    packet = json.dumps(message, separators=(",", ":")).encode()
    if len(packet) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has {len(packet)} bytes, more than {MAX_MESSAGE_BYTES}")
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


def get_str(message: Message, name: str) -> str:
    """A field that is text. Raises SourceCorrupt where it is not."""
    value = message.get(name)
    if not isinstance(value, str):
        raise SourceCorrupt(f"a message without the text {name!r}")
    return value


def get_int(message: Message, name: str) -> int:
    """A field that is a whole number. Raises SourceCorrupt where it is not."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SourceCorrupt(f"a message without the number {name!r}")
    return value


def get_ints(message: Message, name: str) -> list[int]:
    """A field that is a list of whole numbers. Raises SourceCorrupt where it is not."""
    value = message.get(name)
    numbers = [part for part in value if type(part) is int] if isinstance(value, list) else []
    if not isinstance(value, list) or len(numbers) != len(value):
        raise SourceCorrupt(f"a message without the numbers {name!r}")
    return numbers


def encode_error(error: RforkError) -> Message:
    """The message that raises this error on the other side. Runs on the source."""
    return {"error": error.kind, "detail": str(error)[:MAX_TEXT_LENGTH], "hint": error.hint[:MAX_TEXT_LENGTH]}


def raise_error(message: Message) -> None:
    """Raise the error that a message is; nothing where it is none. Runs on the target.

    Errors of the source and its guard as what they are, any other as SourceUnavailable: whatever the other side
    says, this side is not to blame for it.
    """
    error_name = message.get("error")
    if error_name is None:
        return
    detail, hint = message.get("detail"), message.get("hint")
    text = detail if isinstance(detail, str) and detail else f"the source says {error_name!r}"
    raised = _ERROR_TYPES.get(error_name, SourceUnavailable) if isinstance(error_name, str) else SourceUnavailable
    raise raised(text[:MAX_TEXT_LENGTH], hint=hint[:MAX_TEXT_LENGTH] if isinstance(hint, str) else "")
