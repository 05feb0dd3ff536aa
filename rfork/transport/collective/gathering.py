"""Who is in a group on the source, what each wants, and what goes next.

In the order in which it was asked for. When all readers of the group want the same block at about the
same time it is broadcast, otherwise each gets its own.
"""

from __future__ import annotations

import threading
import time

from rfork.errors import SourceBusy, SourceGone
from rfork.transport.collective.member import MOST_WANTS, Member, Wanted, alike
from rfork.transport.collective.messages import Want

GATHER_S = 0.05
"""Readers of one host that come within so long are one group."""
LINGER_S = 0.02
"""So long a block waits for the others of its group to want it too, while that has been worth it."""
MOST_MEMBERS = 8


class Gathering:
    """The readers of a group, and their wants: from any thread; what goes next is for the group's own."""

    def __init__(self, image_bytes: int, block_bytes: int) -> None:
        self._image_bytes, self._block_bytes = image_bytes, block_bytes
        self._changed = threading.Condition()
        self._members: list[Member] = []
        self._queue: list[Wanted] = []
        self._gathering = True
        self._over = ""
        self._lingers = True

    def take(self, member: Member) -> bool:
        """Take a reader in, while it still gathers; whether it did."""
        with self._changed:
            if not self._gathering or self._over or len(self._members) >= MOST_MEMBERS:
                return False
            self._members.append(member)
            member.rank = len(self._members)
            self._changed.notify_all()  # a full group gathers no longer
            return True

    @property
    def size(self) -> int:
        """Ranks, the source's included."""
        return len(self._members) + 1

    def has(self, member: Member) -> bool:
        """Whether the reader is in this group, and that not over."""
        with self._changed:
            return member in self._members and not self._over

    def want(self, member: Member, want: Want) -> None:
        """A reader wants a block. One that wants what cannot be is refused."""
        wanted = Wanted(member, want, want.begin)
        with self._changed:
            waiting = sum(each.member is member for each in self._queue)
            most = min(self._image_bytes, want.begin + self._block_bytes)
            sane = want.begin < want.end <= most
            if sane and waiting < MOST_WANTS:
                self._queue.append(wanted)
                self._changed.notify_all()
                return
        member.refuse(wanted, SourceBusy(f"[{want.begin}, {want.end}) is no block, or too many are wanted"))

    def drop(self, member: Member, number: int) -> None:
        """A reader does not want that any more."""
        with self._changed:
            for wanted in self._queue:
                if wanted.member is member and wanted.want.number == number:
                    wanted.dropped = True

    def _gather(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self._members) >= MOST_MEMBERS, GATHER_S)
            self._gathering = False

    def _next(self) -> list[Wanted]:
        """What to give now: one reader's block, or the same block of all readers."""
        with self._changed:
            while True:
                self._queue = [wanted for wanted in self._queue if not wanted.dropped]
                self._raise_over()
                if not self._queue:
                    self._changed.wait()
                    continue
                first = self._queue[0]
                same = {each.member: each for each in reversed(alike(first, self._queue))}
                together = len(same) == len(self._members)
                patience = first.since + LINGER_S - time.monotonic()
                if not together and self._lingers and patience > 0:
                    self._changed.wait(patience)
                    continue
                self._lingers = together
                taken = list(same.values()) if together else [first]
                self._queue = [wanted for wanted in self._queue if wanted not in taken]
                return taken

    def _raise_over(self) -> None:
        if self._over:
            raise SourceGone(self._over)
