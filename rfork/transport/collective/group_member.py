"""A reader of a group, as the source sees it, and its block requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rfork.errors import RforkError
from rfork.transport.base import ControlStream
from rfork.transport.collective.messages import FromSource, Rejected, RequestBlock, send_message

MAX_REQUESTS = 256
"""Limit per reader: two for each reading thread."""


@dataclass(eq=False)
class BlockRequest:
    """A requested range and its progress."""

    member: GroupMember
    message: RequestBlock
    at: int
    since: float = field(default_factory=time.monotonic)
    dropped: bool = False


@dataclass(eq=False)
class GroupMember:
    """A connected reader; `rank` is its rank in its current group."""

    channel_id: str
    address: str
    stream: ControlStream
    rank: int = 0
    left: bool = False

    def send(self, message: FromSource) -> None:
        """Send a message. A closed stream is not an error here: the group detects it elsewhere."""
        try:
            send_message(self.stream, message)
        except RforkError:
            self.left = True

    def reject(self, request: BlockRequest, error: RforkError) -> None:
        """Reject a request with an error."""
        request.dropped = True
        self.send(Rejected(number=request.message.number, error=error.kind, text=str(error)))


def identical_requests(request: BlockRequest, candidates: Sequence[BlockRequest]) -> list[BlockRequest]:
    """Return the requests among `candidates` for the same range that have not been started."""
    same = (request.message.begin, request.message.end)
    return [
        candidate
        for candidate in candidates
        if (candidate.message.begin, candidate.message.end) == same and candidate.at == candidate.message.begin
    ]
