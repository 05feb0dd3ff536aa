"""Who reads from whom in one group: a member has as many slots as it takes readers, and each reader has one.

A reader is a fork whose plan names the member, or a stranger: a fork that the member says reads from it and
that nobody here planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from planner.policy.ways import takes_one_host
from rfork.image.ranges import count

if TYPE_CHECKING:
    from planner.store.records import ForkRecord

STRANGER: Final = 0.5
"""Part of its speed that a reader is taken to want whose plan is not known."""


class Slots:
    """The readers of every member. They outlive its record: it may have been silent only, and come back."""

    def __init__(self) -> None:
        self.readers: dict[str, dict[str, float]] = {}
        """By instance_id: the forks that have a slot there, and what part of its link's speed each wants."""
        self.local: dict[str, set[str]] = {}
        """By instance_id: those of them that stay within its host."""
        self._strangers: dict[str, tuple[str, ...]] = {}  # of each member

    def strangers(self, instance_id: str) -> tuple[str, ...] | None:
        """The strangers that a member named last; None where it is no member."""
        return self._strangers.get(instance_id)

    def greet(self, instance_id: str, strangers: tuple[str, ...]) -> None:
        """A member names its strangers: they have slots, and those that it names no more have none."""
        readers, now = self.readers.setdefault(instance_id, {}), set(strangers)
        for name in self._strangers.get(instance_id, ()):
            if name not in now and readers.get(name) == STRANGER:
                del readers[name]
        for name in strangers:
            readers.setdefault(name, STRANGER)
        self._strangers[instance_id] = strangers

    def dismiss(self, instance_id: str) -> None:
        """It is no member any more; the readers that were planned keep their slots."""
        self.greet(instance_id, ())
        del self._strangers[instance_id]
        if not self.readers[instance_id]:
            del self.readers[instance_id]

    def take(self, fork: ForkRecord, chunks: int, speed: float) -> None:
        """A fork takes a slot at each source of its plan, which is of so many chunks in all; it reads at
        `speed`, as a part of its link's.
        """
        for read in fork.reads:
            readers = self.readers.setdefault(read.source_id, {})
            readers[fork.fork_id] = speed * count(read.chunks) / chunks
            if takes_one_host(read.transports):
                self.local.setdefault(read.source_id, set()).add(fork.fork_id)
            if unknown := self._strangers.get(read.source_id):
                self._strangers[read.source_id] = tuple(name for name in unknown if name != fork.fork_id)

    def release(self, fork: ForkRecord) -> list[str]:
        """The fork gives its slots back; at which sources it had one."""
        released: list[str] = []
        for read in fork.reads:
            if (local := self.local.get(read.source_id)) is not None:
                local.discard(fork.fork_id)
                if not local:
                    del self.local[read.source_id]
            readers = self.readers.get(read.source_id)
            if readers is not None and readers.pop(fork.fork_id, None) is not None:
                released.append(read.source_id)
                if not readers and read.source_id not in self._strangers:
                    del self.readers[read.source_id]
        return released

    def load(self, instance_id: str) -> float:
        """What the readers of an instance want of its network link, in links."""
        local = self.local.get(instance_id, ())
        readers = self.readers.get(instance_id, {})
        return sum(part for fork_id, part in readers.items() if fork_id not in local)
