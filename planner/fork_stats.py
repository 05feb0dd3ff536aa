"""How long the forks of one group took, from one another and from storage, and what the former saved."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

from rfork.schema import ForkResult, source_kind

if TYPE_CHECKING:
    from planner.store.records import ForkRecord

RECENT: Final = 32
"""Forks of each kind that a median is of: the last ones."""

Origin = Literal["peers", "storage", "both", "nothing"]
"""Where what a fork read came from."""


class ForkDurationStats:
    """Learns from each fork that ended. Seconds are as the target measured them, waits included.

    Only forks that read all of their image count: not those that kept a part from a process that died, and
    not those that read one part from storage and another from one another.
    """

    def __init__(self) -> None:
        self.total_seconds_saved = 0.0
        """What forks from one another took less than storage would have, in all; below 0: more."""
        self._from_peers: deque[float] = deque(maxlen=RECENT)
        self._from_storage: deque[float] = deque(maxlen=RECENT)

    @property
    def storage_s(self) -> float | None:
        """The median of the last forks, fallbacks among them, that read everything from storage."""
        return median(self._from_storage) if self._from_storage else None

    @property
    def fork_s(self) -> float | None:
        """The median of the last forks that read everything from one another."""
        return median(self._from_peers) if self._from_peers else None

    def seconds_saved(self, fork: ForkRecord, finish: ForkResult) -> float | None:
        """What a fork that ends so took less than storage would have; None where that is not known."""
        storage_s = self.storage_s
        if storage_s is None or _origin_of_complete_fork(fork, finish) != "peers":
            return None
        return storage_s - finish.seconds

    def record(self, fork: ForkRecord, finish: ForkResult) -> None:
        """A fork ended so."""
        origin = _origin_of_complete_fork(fork, finish)
        if origin == "storage":
            self._from_storage.append(finish.seconds)
        elif origin == "peers":
            self.total_seconds_saved += self.seconds_saved(fork, finish) or 0.0
            self._from_peers.append(finish.seconds)


def origin_of(finish: ForkResult) -> Origin:
    """Where what was read came from."""
    is_peer = {source_kind(name) == "peer" for name, nbytes in finish.sources.items() if nbytes}
    if len(is_peer) == 2:
        return "both"
    if not is_peer:
        return "nothing"
    return "peers" if is_peer.pop() else "storage"


def _origin_of_complete_fork(fork: ForkRecord, finish: ForkResult) -> Origin | None:
    """Where the whole image came from; None where this fork did not read, or not get, all of it."""
    complete = finish.outcome == "forked" or (finish.outcome == "fallback" and origin_of(finish) == "storage")
    if not complete or not fork.image_bytes or sum(finish.sources.values()) < fork.image_bytes:
        return None
    return origin_of(finish)
