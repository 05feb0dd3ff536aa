"""What the forks of each group that ended have told, kept for a while beyond the group's last instance.

A model that is scaled to nothing comes back to what is known of it: how long storage takes, and what its
forks saved. Nothing of it is stored: every replica counts the same forks, and one that reads the store anew
counts those that are kept there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from planner.fork_stats import ForkDurationStats
from rfork.schema import ForkResult, source_kind

if TYPE_CHECKING:
    from planner.store.records import ForkRecord, GroupKey

MAX_RETAINED: Final = 256
"""Groups without an instance of which this is kept, those that were there last: 1 kB each."""


class GroupHistory:
    """What the forks of one group that ended have told."""

    def __init__(self) -> None:
        self.durations = ForkDurationStats()
        self.storage_bytes = 0
        """What they read from storage."""
        self.forked_bytes = 0
        """What they read from one another."""

    def record(self, fork: ForkRecord, finish: ForkResult) -> None:
        """A fork ended by itself: what it read counts, and how long it took."""
        self.durations.record(fork, finish)
        for name, nbytes in finish.sources.items():
            if source_kind(name) == "peer":
                self.forked_bytes += nbytes
            else:
                self.storage_bytes += nbytes

    @property
    def seconds_saved(self) -> float | None:
        """What forks from one another took less than storage would have; None until both kinds are known."""
        durations = self.durations
        return None if durations.storage_s is None or durations.fork_s is None else durations.total_seconds_saved

    @property
    def is_empty(self) -> bool:
        """Whether no fork has told anything."""
        has_durations = self.durations.storage_s is not None or self.durations.fork_s is not None
        return not (has_durations or self.storage_bytes or self.forked_bytes)


class GroupHistoryCache:
    """The pasts of the last `MAX_RETAINED` groups that lost their last instance."""

    def __init__(self) -> None:
        self._histories: OrderedDict[GroupKey, GroupHistory] = OrderedDict()

    def keep(self, key: GroupKey, history: GroupHistory) -> None:
        """The group's last instance is gone. Where no fork told anything there is nothing to keep."""
        if history.is_empty:
            return
        self._histories[key] = history
        self._histories.move_to_end(key)
        while len(self._histories) > MAX_RETAINED:
            self._histories.popitem(last=False)

    def pop_group(self, key: GroupKey) -> GroupHistory:
        """The past of a group that has an instance again, or for the first time: then an empty one."""
        return self._histories.pop(key, None) or GroupHistory()

    def of(self, key: GroupKey) -> GroupHistory:
        """The past of a group without an instance; an empty one, which is not kept, where none is known."""
        return self._histories.get(key) or GroupHistory()

    def record(self, key: GroupKey, fork: ForkRecord, finish: ForkResult) -> None:
        """A fork of a group without an instance ended by itself."""
        history = self.of(key)
        history.record(fork, finish)
        self.keep(key, history)

    def all(self) -> list[GroupHistory]:
        """Of each of these groups."""
        return list(self._histories.values())

    def clear(self) -> None:
        """Forget everything."""
        self._histories.clear()
