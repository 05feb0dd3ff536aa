"""One reader's line on the source, and what it wants."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rfork.errors import RforkError
from rfork.transport.base import ControlStream
from rfork.transport.collective.messages import FromSource, Rejected, RequestBlock, send_message

MAX_REQUESTS = 256
"""Of one reader at once: two for each thread that reads."""


@dataclass(eq=False)
class BlockRequest:
    """A range that a reader wants, and how far it has come."""

    member: GroupMember
    want: RequestBlock
    at: int
    since: float = field(default_factory=time.monotonic)
    dropped: bool = False


@dataclass(eq=False)
class GroupMember:
    """A reader that talks with the exporter: `rank` in the group that it is in."""

    channel_id: str
    address: str
    line: ControlStream
    rank: int = 0
    left: bool = False

    def send(self, message: FromSource) -> None:
        """Say it; a reader that is gone hears nothing, and the group learns of that elsewhere."""
        try:
            send_message(self.line, message)
        except RforkError:
            self.left = True

    def reject(self, wanted: BlockRequest, error: RforkError) -> None:
        """Say that it does not get this, and why."""
        wanted.dropped = True
        self.send(Rejected(number=wanted.want.number, error=error.kind, text=str(error)))


def identical_requests(one: BlockRequest, others: Sequence[BlockRequest]) -> list[BlockRequest]:
    """Those of the others that are the same bytes, of which nothing has moved yet."""
    same = (one.want.begin, one.want.end)
    return [each for each in others if (each.want.begin, each.want.end) == same and each.at == each.want.begin]
