"""What the forks of each group that ended have told, kept for a while beyond the group's last instance.

A model that is scaled to nothing comes back to what is known of it: how long storage takes, and what its
forks saved. Nothing of it is stored: every replica counts the same forks, and one that reads the store anew
counts those that are kept there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from planner.durations import Durations
from rfork.wire import ForkFinish, source_kind

if TYPE_CHECKING:
    from planner.store.records import ForkRecord, GroupKey

MOST_GONE: Final = 256
"""Groups without an instance of which this is kept, those that were there last: 1 kB each."""


class Past:
    """What the forks of one group that ended have told."""

    def __init__(self) -> None:
        self.durations = Durations()
        self.storage_bytes = 0
        """What they read from storage."""
        self.forked_bytes = 0
        """What they read from one another."""

    def count(self, fork: ForkRecord, finish: ForkFinish) -> None:
        """A fork ended by itself: what it read counts, and how long it took."""
        self.durations.learn(fork, finish)
        for name, nbytes in finish.sources.items():
            if source_kind(name) == "peer":
                self.forked_bytes += nbytes
            else:
                self.storage_bytes += nbytes

    @property
    def saved_s(self) -> float | None:
        """What forks from one another took less than storage would have; None until both kinds are known."""
        told = self.durations
        return None if told.storage_s is None or told.fork_s is None else told.saved_s

    @property
    def empty(self) -> bool:
        """Whether no fork has told anything."""
        known = self.durations.storage_s is not None or self.durations.fork_s is not None
        return not (known or self.storage_bytes or self.forked_bytes)


class PastGroups:
    """The pasts of the last `MOST_GONE` groups that lost their last instance."""

    def __init__(self) -> None:
        self._pasts: OrderedDict[GroupKey, Past] = OrderedDict()

    def keep(self, key: GroupKey, past: Past) -> None:
        """The group's last instance is gone. Where no fork told anything there is nothing to keep."""
        if past.empty:
            return
        self._pasts[key] = past
        self._pasts.move_to_end(key)
        while len(self._pasts) > MOST_GONE:
            self._pasts.popitem(last=False)

    def take(self, key: GroupKey) -> Past:
        """The past of a group that has an instance again, or for the first time: then an empty one."""
        return self._pasts.pop(key, None) or Past()

    def of(self, key: GroupKey) -> Past:
        """The past of a group without an instance; an empty one, which is not kept, where none is known."""
        return self._pasts.get(key) or Past()

    def count(self, key: GroupKey, fork: ForkRecord, finish: ForkFinish) -> None:
        """A fork of a group without an instance ended by itself."""
        past = self.of(key)
        past.count(fork, finish)
        self.keep(key, past)

    def all(self) -> list[Past]:
        """Of each of these groups."""
        return list(self._pasts.values())

    def clear(self) -> None:
        """Forget everything."""
        self._pasts.clear()
