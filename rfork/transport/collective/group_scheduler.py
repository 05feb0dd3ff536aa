"""Membership and request queue of a group on the source.

Requests are served in order of arrival. If all readers of the group request the same block at about the same
time, it is broadcast; otherwise it is sent to each reader separately.
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
"""Readers of one host that join within this time form one group."""
BROADCAST_WINDOW_S = 0.02
"""Maximum time that a block waits for the other readers to request it too, if the last block was broadcast."""
MAX_MEMBERS = 8


class GroupScheduler:
    """Readers of a group and their requests. Thread-safe; only the group's thread takes blocks from the
    queue.
    """

    def __init__(self, image_bytes: int, block_bytes: int) -> None:
        self._image_bytes, self._block_bytes = image_bytes, block_bytes
        self._changed = threading.Condition()
        self._members: list[GroupMember] = []
        self._queue: list[BlockRequest] = []
        self._gathering = True
        self._close_reason = ""
        self._waits_for_more = True

    def add(self, member: GroupMember) -> bool:
        """Add a reader while the group is forming; return False if it cannot be added."""
        with self._changed:
            if not self._gathering or self._close_reason or len(self._members) >= MAX_MEMBERS:
                return False
            self._members.append(member)
            member.rank = len(self._members)
            self._changed.notify_all()  # a full group stops waiting
            return True

    @property
    def size(self) -> int:
        """Number of ranks, including the source."""
        return len(self._members) + 1

    def contains(self, member: GroupMember) -> bool:
        """Return True if the reader is in this group and the group is not closed."""
        with self._changed:
            return member in self._members and not self._close_reason

    def request(self, member: GroupMember, message: RequestBlock) -> None:
        """Queue a reader's request, or reject it if it is invalid."""
        request = BlockRequest(member, message, message.begin)
        with self._changed:
            waiting = sum(request.member is member for request in self._queue)
            max_end = min(self._image_bytes, message.begin + self._block_bytes)
            is_valid = message.begin < message.end <= max_end
            if is_valid and waiting < MAX_REQUESTS:
                self._queue.append(request)
                self._changed.notify_all()
                return
        member.reject(
            request,
            SourceBusy(f"[{message.begin}, {message.end}) is not a valid block, or too many blocks are requested"),
        )

    def cancel(self, member: GroupMember, number: int) -> None:
        """Cancel a reader's request."""
        with self._changed:
            for request in self._queue:
                if request.member is member and request.message.number == number:
                    request.dropped = True

    def _wait_for_members(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._close_reason or len(self._members) >= MAX_MEMBERS, FORM_WINDOW_S)
            self._gathering = False

    def _next_block(self) -> list[BlockRequest]:
        """Return the next block to send: one reader's request, or the same block for all readers."""
        with self._changed:
            while True:
                self._queue = [request for request in self._queue if not request.dropped]
                self._check_open()
                if not self._queue:
                    self._changed.wait()
                    continue
                first = self._queue[0]
                same = {request.member: request for request in reversed(identical_requests(first, self._queue))}
                together = len(same) == len(self._members)
                remaining_s = first.since + BROADCAST_WINDOW_S - time.monotonic()
                if not together and self._waits_for_more and remaining_s > 0:
                    self._changed.wait(remaining_s)
                    continue
                self._waits_for_more = together
                selected = list(same.values()) if together else [first]
                self._queue = [request for request in self._queue if request not in selected]
                return selected

    def _check_open(self) -> None:
        if self._close_reason:
            raise SourceUnavailable(self._close_reason)
