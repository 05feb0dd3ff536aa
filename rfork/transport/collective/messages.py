"""What the two sides of a group say on the line: JSON, each message checked before it is believed.

A reader says hello, is put into a group of one or several readers, and from then on wants blocks. Before
each piece of a block moves, the source says so: all ranks of a group then do the same thing.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rfork.errors import RforkError, SourceCorrupt
from rfork.transport.base import Line

MOST_KEYS = 64
LONGEST_KEY = 256
LARGEST_VALUE = 8192

Number = Annotated[int, Field(ge=0, le=2**63 - 1)]
Key = Annotated[str, Field(max_length=LONGEST_KEY)]
Value = Annotated[bytes, Field(max_length=LARGEST_VALUE)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class Join(_Message):
    """Reader: put me into a group, the last one is over for me. All that I wanted is forgotten."""

    say: Literal["join"] = "join"


class Want(_Message):
    """Reader: image range `[begin, end)`, at most a block, under the newest token."""

    say: Literal["want"] = "want"
    number: Number
    begin: Number
    end: Number
    token: str


class Drop(_Message):
    """Reader: not that any more; what is said to move already still does."""

    say: Literal["drop"] = "drop"
    number: Number


class Put(_Message):
    """Reader: set a key of the group's store."""

    say: Literal["put"] = "put"
    group: Number
    key: Key
    value: Value


class Ask(_Message):
    """Reader: the values of keys; `wait`: once all are there."""

    say: Literal["ask"] = "ask"
    group: Number
    call: Number
    keys: Annotated[list[Key], Field(max_length=MOST_KEYS)]
    wait: bool


class Formed(_Message):
    """Source: you are this rank of a group of `size`, whose rank 0 I am."""

    say: Literal["formed"] = "formed"
    group: Number
    rank: Number
    size: Number


class Have(_Message):
    """Source: the values that were asked for, none for those that are not there."""

    say: Literal["have"] = "have"
    call: Number
    values: list[Value | None]


class Sending(_Message):
    """Source: these bytes of what you want move next; `together`: to all ranks of the group at once."""

    say: Literal["sending"] = "sending"
    group: Number
    number: Number
    begin: Number
    end: Number
    together: bool


class Refused(_Message):
    """Source: this you do not get, and why."""

    say: Literal["refused"] = "refused"
    number: Number
    error: str
    text: str


class Over(_Message):
    """Source: that group is no more; join the next one."""

    say: Literal["over"] = "over"
    group: Number
    text: str


Said = TypeVar("Said")
FromReader = Join | Want | Drop | Put | Ask
FromSource = Formed | Have | Sending | Refused | Over
_from_reader: TypeAdapter[FromReader] = TypeAdapter(Annotated[FromReader, Field(discriminator="say")])
_from_source: TypeAdapter[FromSource] = TypeAdapter(Annotated[FromSource, Field(discriminator="say")])


def say(line: Line, message: FromReader | FromSource) -> None:
    """Send it; raises as `Line.send` does."""
    line.send(message.model_dump_json().encode())


def hear_reader(line: Line, deadline: float) -> FromReader:
    """On the source. Raises as `Line.receive` does, and SourceCorrupt for what cannot be understood."""
    return _understood(_from_reader, line.receive(deadline))


def hear_source(line: Line, deadline: float) -> FromSource:
    """On the target; see `hear_reader`."""
    return _understood(_from_source, line.receive(deadline))


def _understood(kinds: TypeAdapter[Said], message: bytes) -> Said:
    try:
        return kinds.validate_json(message)
    except ValidationError as error:
        raise SourceCorrupt(f"a message on the line makes no sense: {error.errors()[0]['msg']}") from None


def error_of(refused: Refused, kinds: tuple[type[RforkError], ...]) -> RforkError:
    """The error that a refusal tells of: one of `kinds`, the last of them where it names none."""
    kind = next((kind for kind in kinds if kind.__name__ == refused.error), kinds[-1])
    return kind(refused.text)
