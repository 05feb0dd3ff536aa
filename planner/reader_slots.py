"""Who reads from whom in one group: a member has as many slots as it takes readers, and each reader has one.

A reader is a fork whose plan names the member, or a stranger: a fork that the member says reads from it and
that nobody here planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.policy.transports import is_same_host_route
from rfork.image.ranges import count

if TYPE_CHECKING:
    from planner.store.records import ForkRecord

UNPLANNED_SHARE: Final = 0.5
"""Part of its speed that a reader is taken to want whose plan is not known."""


class ReaderSlots:
    """The readers of every member. They outlive its record: it may have been silent only, and come back."""

    def __init__(self) -> None:
        self.readers: dict[str, dict[str, float]] = {}
        """By instance_id: the forks that have a slot there, and what part of its link's speed each wants."""
        self.local: dict[str, set[str]] = {}
        """By instance_id: those of them that stay within its host."""
        self._unplanned_readers: dict[str, tuple[str, ...]] = {}  # of each member

    def unplanned_readers(self, instance_id: str) -> tuple[str, ...] | None:
        """The strangers that a member named last; None where it is no member."""
        return self._unplanned_readers.get(instance_id)

    def set_unplanned_readers(self, instance_id: str, unplanned_readers: tuple[str, ...]) -> None:
        """A member names its strangers: they have slots, and those that it names no more have none."""
        readers, current = self.readers.setdefault(instance_id, {}), set(unplanned_readers)
        for name in self._unplanned_readers.get(instance_id, ()):
            if name not in current and readers.get(name) == UNPLANNED_SHARE:
                del readers[name]
        for name in unplanned_readers:
            readers.setdefault(name, UNPLANNED_SHARE)
        self._unplanned_readers[instance_id] = unplanned_readers

    def remove_member(self, instance_id: str) -> None:
        """It is no member any more; the readers that were planned keep their slots."""
        self.set_unplanned_readers(instance_id, ())
        del self._unplanned_readers[instance_id]
        if not self.readers[instance_id]:
            del self.readers[instance_id]

    def add_reader(self, fork: ForkRecord, chunks: int, speed: float) -> None:
        """A fork takes a slot at each source of its plan, which is of so many chunks in all; it reads at
        `speed`, as a part of its link's.
        """
        for route in fork.reads:
            readers = self.readers.setdefault(route.source_id, {})
            readers[fork.fork_id] = speed * count(route.chunks) / chunks
            if is_same_host_route(route.transports):
                self.local.setdefault(route.source_id, set()).add(fork.fork_id)
            if unassigned := self._unplanned_readers.get(route.source_id):
                self._unplanned_readers[route.source_id] = tuple(name for name in unassigned if name != fork.fork_id)

    def release(self, fork: ForkRecord) -> list[str]:
        """The fork gives its slots back; at which sources it had one."""
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
        """What the readers of an instance want of its network link, in links."""
        local = self.local.get(instance_id, ())
        readers = self.readers.get(instance_id, {})
        return sum(share for fork_id, share in readers.items() if fork_id not in local)
