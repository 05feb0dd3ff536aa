"""Reader slots of one group: a member has one slot per reader, up to its maximum.

A reader is either a fork whose plan names the member, or an unplanned reader: a fork that the member reports
and that this planner did not plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.policy.transports import is_same_host_route
from rfork.image.ranges import count

if TYPE_CHECKING:
    from planner.store.records import ForkRecord

UNPLANNED_SHARE: Final = 0.5
"""Fraction of its speed that a reader without a known plan is assumed to use."""


class ReaderSlots:
    """The readers of every member. They outlive its record: a silent member may come back."""

    def __init__(self) -> None:
        self.readers: dict[str, dict[str, float]] = {}
        """Forks that have a slot at each member, by instance_id, with the fraction of its link's speed that
        each uses.
        """
        self.local: dict[str, set[str]] = {}
        """Those readers that stay within the member's host, by instance_id."""
        self._unplanned_readers: dict[str, tuple[str, ...]] = {}  # by instance_id

    def unplanned_readers(self, instance_id: str) -> tuple[str, ...] | None:
        """Return the unplanned readers that a member reported last; None if it is not a member."""
        return self._unplanned_readers.get(instance_id)

    def set_unplanned_readers(self, instance_id: str, unplanned_readers: tuple[str, ...]) -> None:
        """Assign slots to the unplanned readers that a member reports, and release those that it no longer
        reports.
        """
        readers, current = self.readers.setdefault(instance_id, {}), set(unplanned_readers)
        for name in self._unplanned_readers.get(instance_id, ()):
            if name not in current and readers.get(name) == UNPLANNED_SHARE:
                del readers[name]
        for name in unplanned_readers:
            readers.setdefault(name, UNPLANNED_SHARE)
        self._unplanned_readers[instance_id] = unplanned_readers

    def remove_member(self, instance_id: str) -> None:
        """Remove a member; its planned readers keep their slots."""
        self.set_unplanned_readers(instance_id, ())
        del self._unplanned_readers[instance_id]
        if not self.readers[instance_id]:
            del self.readers[instance_id]

    def add_reader(self, fork: ForkRecord, chunks: int, speed: float) -> None:
        """Assign a fork a slot at each source of its plan. `chunks`: total chunks of the image; `speed`: the
        fork's read rate as a fraction of its link.
        """
        for route in fork.reads:
            readers = self.readers.setdefault(route.source_id, {})
            readers[fork.fork_id] = speed * count(route.chunks) / chunks
            if is_same_host_route(route.transports):
                self.local.setdefault(route.source_id, set()).add(fork.fork_id)
            if unassigned := self._unplanned_readers.get(route.source_id):
                self._unplanned_readers[route.source_id] = tuple(name for name in unassigned if name != fork.fork_id)

    def release(self, fork: ForkRecord) -> list[str]:
        """Release the fork's slots, and return the sources that it had one at."""
        released: list[str] = []
        for route in fork.reads:
            if (local := self.local.get(route.source_id)) is not None:
                local.discard(fork.fork_id)
                if not local:
                    del self.local[route.source_id]
            readers = self.readers.get(route.source_id)
            if readers is not None and readers.pop(fork.fork_id, None) is not None:
                released.append(route.source_id)
                if not readers and route.source_id not in self._unplanned_readers:
                    del self.readers[route.source_id]
        return released

    def load(self, instance_id: str) -> float:
        """Return the load that an instance's readers put on its network link, in links."""
        local = self.local.get(instance_id, ())
        readers = self.readers.get(instance_id, {})
        return sum(share for fork_id, share in readers.items() if fork_id not in local)
