"""One reader's line on the source, and what it wants."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rfork.errors import RforkError
from rfork.transport.base import Line
from rfork.transport.collective.messages import FromSource, Refused, Want, say

MOST_WANTS = 256
"""Of one reader at once: two for each thread that reads."""


@dataclass(eq=False)
class Wanted:
    """A range that a reader wants, and how far it has come."""

    member: Member
    want: Want
    at: int
    since: float = field(default_factory=time.monotonic)
    dropped: bool = False


@dataclass(eq=False)
class Member:
    """A reader that talks with the exporter: `rank` in the group that it is in."""

    channel_id: str
    address: str
    line: Line
    rank: int = 0
    left: bool = False

    def tell(self, message: FromSource) -> None:
        """Say it; a reader that is gone hears nothing, and the group learns of that elsewhere."""
        try:
            say(self.line, message)
        except RforkError:
            self.left = True

    def refuse(self, wanted: Wanted, error: RforkError) -> None:
        """Say that it does not get this, and why."""
        wanted.dropped = True
        self.tell(Refused(number=wanted.want.number, error=error.kind, text=str(error)))


def alike(one: Wanted, others: Sequence[Wanted]) -> list[Wanted]:
    """Those of the others that are the same bytes, of which nothing has moved yet."""
    same = (one.want.begin, one.want.end)
    return [
        each for each in others if (each.want.begin, each.want.end) == same and each.at == each.want.begin
    ]
