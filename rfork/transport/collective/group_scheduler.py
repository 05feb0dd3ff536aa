"""Who is in a group on the source, what each wants, and what goes next.

In the order in which it was asked for. When all readers of the group want the same block at about the
same time it is broadcast, otherwise each gets its own.
"""

from __future__ import annotations

import threading
import time

from rfork.errors import SourceBusy, SourceUnavailable
from rfork.transport.collective.group_member import (
    MAX_REQUESTS,
    BlockRequest,
    GroupMember,
    identical_requests,
)
from rfork.transport.collective.messages import RequestBlock

FORM_WINDOW_S = 0.05
"""Readers of one host that come within so long are one group."""
BROADCAST_WINDOW_S = 0.02
"""So long a block waits for the others of its group to want it too, while that has been worth it."""
MAX_MEMBERS = 8


class GroupScheduler:
    """The readers of a group, and their wants: from any thread; what goes next is for the group's own."""

    def __init__(self, image_bytes: int, block_bytes: int) -> None:
        self._image_bytes, self._block_bytes = image_bytes, block_bytes
        self._changed = threading.Condition()
        self._members: list[GroupMember] = []
        self._queue: list[BlockRequest] = []
        self._gathering = True
        self._close_reason = ""
        self._waits_for_more = True

    def add(self, member: GroupMember) -> bool:
        """Take a reader in, while it still gathers; whether it did."""
        with self._changed:
            if not self._gathering or self._close_reason or len(self._members) >= MAX_MEMBERS:
                return False
            self._members.append(member)
            member.rank = len(self._members)
            self._changed.notify_all()  # a full group gathers no longer
            return True

    @property
    def size(self) -> int:
        """Ranks, the source's included."""
        return len(self._members) + 1

    def contains(self, member: GroupMember) -> bool:
        """Whether the reader is in this group, and that not over."""
        with self._changed:
            return member in self._members and not self._close_reason

    def request(self, member: GroupMember, request: RequestBlock) -> None:
        """A reader wants a block. One that wants what cannot be is refused."""
        wanted = BlockRequest(member, request, request.begin)
        with self._changed:
            waiting = sum(each.member is member for each in self._queue)
            max_end = min(self._image_bytes, request.begin + self._block_bytes)
            is_valid = request.begin < request.end <= max_end
            if is_valid and waiting < MAX_REQUESTS:
                self._queue.append(wanted)
                self._changed.notify_all()
                return
        member.reject(wanted, SourceBusy(f"[{request.begin}, {request.end}) is no block, or too many are wanted"))

    def drop(self, member: GroupMember, number: int) -> None:
        """A reader does not want that any more."""
        with self._changed:
            for wanted in self._queue:
                if wanted.member is member and wanted.want.number == number:
                    wanted.dropped = True

    def _wait_for_members(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._close_reason or len(self._members) >= MAX_MEMBERS, FORM_WINDOW_S)
            self._gathering = False

    def _next_block(self) -> list[BlockRequest]:
        """What to give now: one reader's block, or the same block of all readers."""
        with self._changed:
            while True:
                self._queue = [wanted for wanted in self._queue if not wanted.dropped]
                self._check_open()
                if not self._queue:
                    self._changed.wait()
                    continue
                first = self._queue[0]
                same = {each.member: each for each in reversed(identical_requests(first, self._queue))}
                together = len(same) == len(self._members)
                remaining_s = first.since + BROADCAST_WINDOW_S - time.monotonic()
                if not together and self._waits_for_more and remaining_s > 0:
                    self._changed.wait(remaining_s)
                    continue
                self._waits_for_more = together
                selected = list(same.values()) if together else [first]
                self._queue = [wanted for wanted in self._queue if wanted not in selected]
                return selected

    def _check_open(self) -> None:
        if self._close_reason:
            raise SourceUnavailable(self._close_reason)
