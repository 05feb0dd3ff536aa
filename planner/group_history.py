"""Statistics of each group's finished forks, kept for a while after the group's last instance is removed.

A model that is scaled to zero and back keeps its statistics: how long storage takes, and what its forks
saved. They are not stored: every planner replica counts the same forks, and one that reloads the store counts
those that the store keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from planner.fork_stats import ForkDurationStats
from rfork.schema import ForkResult, source_type

if TYPE_CHECKING:
    from planner.store.records import ForkRecord, GroupKey

MAX_RETAINED: Final = 256
"""Maximum number of groups without instances whose history is kept, most recent first: 1 kB each."""


class GroupHistory:
    """Statistics of the finished forks of one group."""

    def __init__(self) -> None:
        self.durations = ForkDurationStats()
        self.storage_bytes = 0
        """Bytes read from storage."""
        self.forked_bytes = 0
        """Bytes read from peers."""

    def record(self, fork: ForkRecord, finish: ForkResult) -> None:
        """Add the bytes and the duration of a fork that its target finished."""
        self.durations.record(fork, finish)
        for name, nbytes in finish.sources.items():
            if source_type(name) == "peer":
                self.forked_bytes += nbytes
            else:
                self.storage_bytes += nbytes

    @property
    def seconds_saved(self) -> float | None:
        """Seconds saved by forking from peers, or None until both durations are known."""
        durations = self.durations
        return None if durations.storage_s is None or durations.fork_s is None else durations.total_seconds_saved

    @property
    def is_empty(self) -> bool:
        """True if no fork has been recorded."""
        has_durations = self.durations.storage_s is not None or self.durations.fork_s is not None
        return not (has_durations or self.storage_bytes or self.forked_bytes)


class GroupHistoryCache:
    """Histories of the last `MAX_RETAINED` groups that lost their last instance."""

    def __init__(self) -> None:
        self._histories: OrderedDict[GroupKey, GroupHistory] = OrderedDict()

    def keep(self, key: GroupKey, history: GroupHistory) -> None:
        """Keep the history of a group that lost its last instance, unless it is empty."""
        if history.is_empty:
            return
        self._histories[key] = history
        self._histories.move_to_end(key)
        while len(self._histories) > MAX_RETAINED:
            self._histories.popitem(last=False)

    def pop_group(self, key: GroupKey) -> GroupHistory:
        """Remove and return the history of a group that has an instance again; an empty one if none is kept."""
        return self._histories.pop(key, None) or GroupHistory()

    def of(self, key: GroupKey) -> GroupHistory:
        """Return the history of a group without instances; if none is kept, an empty one that is not kept
        either.
        """
        return self._histories.get(key) or GroupHistory()

    def record(self, key: GroupKey, fork: ForkRecord, finish: ForkResult) -> None:
        """Add a fork that its target finished, in a group without instances."""
        history = self.of(key)
        history.record(fork, finish)
        self.keep(key, history)

    def all(self) -> list[GroupHistory]:
        """Return all kept histories."""
        return list(self._histories.values())

    def clear(self) -> None:
        """Forget everything."""
        self._histories.clear()
