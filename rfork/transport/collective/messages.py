"""What the two sides of a group say on the line: JSON, each message checked before it is believed.

A reader says hello, is put into a group of one or several readers, and from then on wants blocks. Before
each piece of a block moves, the source says so: all ranks of a group then do the same thing.
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
    """Reader: put me into a group, the last one is over for me. All that I wanted is forgotten."""

    send_message: Literal["join"] = "join"


class RequestBlock(_Message):
    """Reader: image range `[begin, end)`, at most a block, under the newest token."""

    send_message: Literal["want"] = "want"
    number: Number
    begin: Number
    end: Number
    token: str


class CancelBlock(_Message):
    """Reader: not that any more; what is said to move already still does."""

    send_message: Literal["drop"] = "drop"
    number: Number


class StorePut(_Message):
    """Reader: set a key of the group's store."""

    send_message: Literal["put"] = "put"
    group: Number
    key: Key
    value: Value


class StoreGet(_Message):
    """Reader: the values of keys; `wait`: once all are there."""

    send_message: Literal["ask"] = "ask"
    group: Number
    call: Number
    keys: Annotated[list[Key], Field(max_length=MAX_KEYS)]
    wait: bool


class GroupFormed(_Message):
    """Source: you are this rank of a group of `size`, whose rank 0 I am."""

    send_message: Literal["formed"] = "formed"
    group: Number
    rank: Number
    size: Number


class StoreValues(_Message):
    """Source: the values that were asked for, none for those that are not there."""

    send_message: Literal["have"] = "have"
    call: Number
    values: list[Value | None]


class SendingBlock(_Message):
    """Source: these bytes of what you want move next; `together`: to all ranks of the group at once."""

    send_message: Literal["sending"] = "sending"
    group: Number
    number: Number
    begin: Number
    end: Number
    together: bool


class Rejected(_Message):
    """Source: this you do not get, and why."""

    send_message: Literal["refused"] = "refused"
    number: Number
    error: str
    text: str


class GroupClosed(_Message):
    """Source: that group is no more; join the next one."""

    send_message: Literal["over"] = "over"
    group: Number
    text: str


Message = TypeVar("Message")
FromReader = JoinGroup | RequestBlock | CancelBlock | StorePut | StoreGet
FromSource = GroupFormed | StoreValues | SendingBlock | Rejected | GroupClosed
_from_reader: TypeAdapter[FromReader] = TypeAdapter(Annotated[FromReader, Field(discriminator="say")])
_from_source: TypeAdapter[FromSource] = TypeAdapter(Annotated[FromSource, Field(discriminator="say")])


def send_message(line: ControlStream, message: FromReader | FromSource) -> None:
    """Send it; raises as `Line.send` does."""
    line.send(message.model_dump_json().encode())


def receive_from_reader(line: ControlStream, deadline: float) -> FromReader:
    """On the source. Raises as `Line.receive` does, and SourceCorrupt for what cannot be understood."""
    return _validate(_from_reader, line.receive(deadline))


def receive_from_source(line: ControlStream, deadline: float) -> FromSource:
    """On the target; see `receive_from_reader`."""
    return _validate(_from_source, line.receive(deadline))


def _validate(adapter: TypeAdapter[Message], message: bytes) -> Message:
    try:
        return adapter.validate_json(message)
    except ValidationError as error:
        raise SourceCorrupt(f"a message on the line makes no sense: {error.errors()[0]['msg']}") from None


def error_of(refused: Rejected, error_types: tuple[type[RforkError], ...]) -> RforkError:
    """The error that a refusal tells of: one of `kinds`, the last of them where it names none."""
    error_type = next(
        (error_type for error_type in error_types if error_type.__name__ == refused.error), error_types[-1]
    )
    return error_type(refused.text)
