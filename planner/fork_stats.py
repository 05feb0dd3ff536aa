"""Durations of one group's forks, from peers and from storage, and the time saved by forking from peers."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

from rfork.schema import ForkResult, source_type

if TYPE_CHECKING:
    from planner.store.records import ForkRecord

RECENT: Final = 32
"""Number of recent forks of each origin used for the median."""

Origin = Literal["peers", "storage", "both", "nothing"]
"""Origin of the bytes that a fork read."""


class ForkDurationStats:
    """Statistics of finished forks. Durations are in seconds as measured by the target, waits included.

    Only forks that read their complete image from one origin count: not those that kept chunks of a process
    that died, and not those that read from both storage and peers.
    """

    def __init__(self) -> None:
        self.total_seconds_saved = 0.0
        """Total time saved by forking from peers instead of storage; negative if slower."""
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

    def seconds_saved(self, fork: ForkRecord, finish: ForkResult) -> float | None:
        """Return the seconds that this fork saved compared with storage, or None if unknown."""
        storage_s = self.storage_s
        if storage_s is None or _origin_of_complete_fork(fork, finish) != "peers":
            return None
        return storage_s - finish.seconds

    def record(self, fork: ForkRecord, finish: ForkResult) -> None:
        """Add a finished fork."""
        origin = _origin_of_complete_fork(fork, finish)
        if origin == "storage":
            self._from_storage.append(finish.seconds)
        elif origin == "peers":
            self.total_seconds_saved += self.seconds_saved(fork, finish) or 0.0
            self._from_peers.append(finish.seconds)


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
    complete = finish.outcome == "forked" or (finish.outcome == "fallback" and origin_of(finish) == "storage")
    if not complete or not fork.image_bytes or sum(finish.sources.values()) < fork.image_bytes:
        return None
    return origin_of(finish)
