"""Messages of a same-host connection: one JSON object per packet, including errors. For both sides."""

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
from rfork.schema import MAX_TEXT_LENGTH

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
Message: TypeAlias = Mapping[str, JsonValue]

MAX_MESSAGE_BYTES: Final = 64 << 10
"""Maximum bytes of one packet."""

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
    """Encode a message as one packet. Raises ValueError if it is too large."""
    packet = json.dumps(message, separators=(",", ":")).encode()
    if len(packet) > MAX_MESSAGE_BYTES:
        raise ValueError(f"the message has {len(packet)} bytes, more than {MAX_MESSAGE_BYTES}")
    return packet


def decode(packet: bytes) -> Message:
    """Decode a packet. Raises SourceCorrupt if it is invalid."""
    try:
        message: JsonValue = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise SourceCorrupt(f"not a message: {error}") from None
    if not isinstance(message, dict):
        raise SourceCorrupt("not a message: not a JSON object")
    return message


def get_str(message: Message, name: str) -> str:
    """Return a text field. Raises SourceCorrupt if it is missing or of another type."""
    value = message.get(name)
    if not isinstance(value, str):
        raise SourceCorrupt(f"the message lacks the text {name!r}")
    return value


def get_int(message: Message, name: str) -> int:
    """Return an integer field. Raises SourceCorrupt if it is missing or of another type."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SourceCorrupt(f"the message lacks the number {name!r}")
    return value


def get_ints(message: Message, name: str) -> list[int]:
    """Return a field with a list of integers. Raises SourceCorrupt if it is missing or of another type."""
    value = message.get(name)
    numbers = [part for part in value if type(part) is int] if isinstance(value, list) else []
    if not isinstance(value, list) or len(numbers) != len(value):
        raise SourceCorrupt(f"the message lacks the numbers {name!r}")
    return numbers


def encode_error(error: RforkError) -> Message:
    """Encode an error, to be raised on the other side. Runs on the source."""
    return {"error": error.kind, "detail": str(error)[:MAX_TEXT_LENGTH], "hint": error.hint[:MAX_TEXT_LENGTH]}


def raise_error(message: Message) -> None:
    """Raise the error in a message, if it is one. Runs on the target.

    Known errors of the source and its gate are raised unchanged, any other as SourceUnavailable, so that the
    other side cannot blame this side.
    """
    error_name = message.get("error")
    if error_name is None:
        return
    detail, hint = message.get("detail"), message.get("hint")
    text = detail if isinstance(detail, str) and detail else f"the source reports {error_name!r}"
    error_type = _ERROR_TYPES.get(error_name, SourceUnavailable) if isinstance(error_name, str) else SourceUnavailable
    raise error_type(text[:MAX_TEXT_LENGTH], hint=hint[:MAX_TEXT_LENGTH] if isinstance(hint, str) else "")
