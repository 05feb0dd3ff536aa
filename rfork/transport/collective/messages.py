"""Messages on the control stream of a group: JSON, each validated on receipt.

A reader requests to join, is placed in a group of one or more readers, and then requests blocks. The source
announces each piece of a block before sending it, so that all ranks of the group run the same operation.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rfork.errors import RforkError, SourceCorrupt
from rfork.transport.base import ControlStream

MAX_KEYS = 64
MAX_KEY_CHARS = 256
MAX_VALUE_BYTES = 8192

Number = Annotated[int, Field(ge=0, le=2**63 - 1)]
Key = Annotated[str, Field(max_length=MAX_KEY_CHARS)]
Value = Annotated[bytes, Field(max_length=MAX_VALUE_BYTES)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class JoinGroup(_Message):
    """Reader: add me to a new group. Leaves the previous group and cancels all its requests."""

    type: Literal["join"] = "join"


class RequestBlock(_Message):
    """Reader: request image range `[begin, end)`, at most one block, with the newest token."""

    type: Literal["request"] = "request"
    number: Number
    begin: Number
    end: Number
    token: str


class CancelBlock(_Message):
    """Reader: cancel a request. A piece that was already announced is still sent."""

    type: Literal["cancel"] = "cancel"
    number: Number


class StorePut(_Message):
    """Reader: set a key of the group's store."""

    type: Literal["store_put"] = "store_put"
    group: Number
    key: Key
    value: Value


class StoreGet(_Message):
    """Reader: get the values of keys; with `wait`, once all are set."""

    type: Literal["store_get"] = "store_get"
    group: Number
    call: Number
    keys: Annotated[list[Key], Field(max_length=MAX_KEYS)]
    wait: bool


class GroupFormed(_Message):
    """Source: the group has `size` ranks, this is yours, and mine is 0."""

    type: Literal["formed"] = "formed"
    group: Number
    rank: Number
    size: Number


class StoreValues(_Message):
    """Source: reply to `StoreGet`; None for a missing key."""

    type: Literal["store_values"] = "store_values"
    call: Number
    values: list[Value | None]


class SendingBlock(_Message):
    """Source: this piece of your request is sent next; `is_broadcast`: as a broadcast to all ranks of the group."""

    type: Literal["sending"] = "sending"
    group: Number
    number: Number
    begin: Number
    end: Number
    is_broadcast: bool


class Rejected(_Message):
    """Source: the request is rejected with this error."""

    type: Literal["rejected"] = "rejected"
    number: Number
    error: str
    text: str


class GroupClosed(_Message):
    """Source: the group is closed; join the next one."""

    type: Literal["closed"] = "closed"
    group: Number
    text: str


Message = TypeVar("Message")
FromReader = JoinGroup | RequestBlock | CancelBlock | StorePut | StoreGet
FromSource = GroupFormed | StoreValues | SendingBlock | Rejected | GroupClosed
_from_reader: TypeAdapter[FromReader] = TypeAdapter(Annotated[FromReader, Field(discriminator="type")])
_from_source: TypeAdapter[FromSource] = TypeAdapter(Annotated[FromSource, Field(discriminator="type")])


def send_message(stream: ControlStream, message: FromReader | FromSource) -> None:
    """Send a message; raises as `ControlStream.send`."""
    stream.send(message.model_dump_json().encode())


def receive_from_reader(stream: ControlStream, deadline: float) -> FromReader:
    """Receive on the source. Raises as `ControlStream.receive`, and SourceCorrupt for an invalid message."""
    return _validate(_from_reader, stream.receive(deadline))


def receive_from_source(stream: ControlStream, deadline: float) -> FromSource:
    """Receive on the target; see `receive_from_reader`."""
    return _validate(_from_source, stream.receive(deadline))


def _validate(adapter: TypeAdapter[Message], message: bytes) -> Message:
    try:
        return adapter.validate_json(message)
    except ValidationError as error:
        raise SourceCorrupt(f"invalid message on the control stream: {error.errors()[0]['msg']}") from None


def rejection_error(rejection: Rejected, error_types: tuple[type[RforkError], ...]) -> RforkError:
    """Return the error of a rejection: one of `error_types`, or the last of them for an unknown name."""
    error_type = next(
        (error_type for error_type in error_types if error_type.__name__ == rejection.error), error_types[-1]
    )
    return error_type(rejection.text)
