"""Statistics of each group's finished forks, kept for a while after the group's last instance is removed.

A model that is scaled to zero and back keeps its statistics: how long storage takes, and what its forks
saved. They are not stored: every planner replica counts the same forks, and one that reloads the store counts
those that the store keeps.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import median
from typing import Final, Literal

from planner.core.records import ForkRecord, GroupKey
from rfork.schema import ForkResult, source_type

RECENT: Final = 32
"""Number of recent forks of each origin used for the median."""
OWN_LOAD_ALPHA: Final = 0.3
"""Weight of the newest load in the mean of their durations."""
MAX_RETAINED: Final = 256
"""Maximum number of groups without instances whose history is kept, most recent first: 1 kB each."""

Origin = Literal["peers", "storage", "both", "nothing"]
"""Origin of the bytes that a fork read."""


class GroupHistory:
    """Statistics of the finished forks of one group.

    Durations are in seconds as measured by the target, waits included. Only forks that read their complete
    image from one origin count for them: not those that kept chunks of a process that died, not those that
    read from both storage and peers, and not those of holders, which wait while engines need their sources.
    """

    def __init__(self) -> None:
        self.total_seconds_saved = 0.0
        """Total time saved by forking from peers instead of storage; negative if slower."""
        self.storage_bytes = 0
        """Bytes read from storage."""
        self.forked_bytes = 0
        """Bytes read from peers."""
        self.own_load_s: float | None = None
        """Duration of the loads that replaced forks, without the time before them: a mean that favours recent ones."""
        self._from_peers: deque[float] = deque(maxlen=RECENT)
        self._from_storage: deque[float] = deque(maxlen=RECENT)

    @property
    def storage_s(self) -> float | None:
        """Median of the recent forks, fallbacks included, that read everything from storage."""
        return median(self._from_storage) if self._from_storage else None

    @property
    def fork_s(self) -> float | None:
        """Median of the recent forks that read everything from peers."""
        return median(self._from_peers) if self._from_peers else None

    @property
    def seconds_saved(self) -> float | None:
        """Seconds saved by forking from peers, or None until both durations are known."""
        return self.total_seconds_saved if self._from_storage and self._from_peers else None

    @property
    def is_empty(self) -> bool:
        """True if no fork has been recorded."""
        return not (self._from_storage or self._from_peers or self.storage_bytes or self.forked_bytes)

    def seconds_saved_by(self, fork: ForkRecord, finish: ForkResult) -> float | None:
        """Return the seconds that this fork saved compared with storage, or None if unknown."""
        storage_s = self.storage_s
        if storage_s is None or _origin_of_complete_fork(fork, finish) != "peers":
            return None
        return storage_s - finish.seconds

    def record(self, fork: ForkRecord, finish: ForkResult) -> None:
        """Add the bytes and the duration of a fork that its target finished."""
        if fork.holder is None and finish.outcome == "fallback" and (load_s := finish.phases.get("fallback")):
            before = self.own_load_s
            self.own_load_s = load_s if before is None else before + OWN_LOAD_ALPHA * (load_s - before)
        origin = _origin_of_complete_fork(fork, finish)
        if origin == "storage":
            self._from_storage.append(finish.seconds)
        elif origin == "peers":
            self.total_seconds_saved += self.seconds_saved_by(fork, finish) or 0.0
            self._from_peers.append(finish.seconds)
        for name, nbytes in finish.sources.items():
            if source_type(name) == "peer":
                self.forked_bytes += nbytes
            else:
                self.storage_bytes += nbytes


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


def origin_of(finish: ForkResult) -> Origin:
    """Return the origin of the bytes that were read."""
    is_peer = {source_type(name) == "peer" for name, nbytes in finish.sources.items() if nbytes}
    if len(is_peer) == 2:
        return "both"
    if not is_peer:
        return "nothing"
    return "peers" if is_peer.pop() else "storage"


def _origin_of_complete_fork(fork: ForkRecord, finish: ForkResult) -> Origin | None:
    """Return the origin of the complete image, or None if the fork did not read all of it."""
    if fork.holder is not None:
        return None
    complete = finish.outcome == "forked" or (finish.outcome == "fallback" and origin_of(finish) == "storage")
    if not complete or not fork.image_bytes or sum(finish.sources.values()) < fork.image_bytes:
        return None
    return origin_of(finish)
