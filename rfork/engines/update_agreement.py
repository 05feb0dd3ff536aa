"""Agreement of a replica's ranks that all of them have completed an update of their weights. Runs on the source.

A version that names an update (``update:REPLICA:N``) stands for the weights of all ranks together, so it is served
by all of them or by none: each rank records the update that it has completed, and serves only once all ranks have
recorded the same one. An update that failed on one rank, or did not reach it, is therefore never served.

The records are in the store of torch.distributed's default group, through which the ranks have met. No call
blocks the engine: the rank's own thread polls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final, Literal, Protocol

import torch.distributed

from rfork.logs import logger
from rfork.weights_version import is_single

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from rfork.source.seed import InstanceIdentity

log = logger(__name__)

TIMEOUT_S: Final = 600.0
"""Maximum time between the ends of one update on two ranks."""
MIN_POLL_S: Final = 0.02
MAX_POLL_S: Final = 0.25
MAX_NAMED: Final = 8
"""Maximum number of ranks named in a log line."""

Outcome = Literal["served", "withdrawn"]


def other_ranks(count: int, completed: Mapping[int, int | None]) -> dict[int, int | None]:
    """Return the ranks whose last completed update is not number `count`, with that update's number."""
    return {rank: last for rank, last in sorted(completed.items()) if last != count}


@dataclass(frozen=True)
class Decision:
    """The ranks' common decision about an update. The first rank that decides, decides for all of them."""

    count: int
    outcome: Outcome

    @classmethod
    def parse(cls, text: str) -> Decision:
        """Return the decision that a record states; an empty record is that of the weights before any update."""
        count, _, outcome = text.partition(":")
        return cls(int(count or 0), "withdrawn" if outcome == "withdrawn" else "served")

    def __str__(self) -> str:
        return f"{self.count}:{self.outcome}"

    def covers(self, count: int) -> bool:
        """Return True if no other decision about update `count` is possible: this one is about it or a later one."""
        return self.count >= count

    def serves(self, count: int) -> bool:
        """Return True if the ranks serve update `count`."""
        return self.count == count and self.outcome == "served"


class UpdateRecords(Protocol):
    """Records that the ranks of one model of a replica share. No call waits for another rank."""

    def record(self, count: int) -> None:
        """Record the last update that this rank has completed."""
        ...

    def completed(self) -> Mapping[int, int | None]:
        """Return the last completed update of each rank; None for a rank that has no record."""
        ...

    def decide(self, decision: Decision) -> Decision:
        """Record a decision unless there is one that covers it; returns the one that stands."""
        ...


class StoreRecords:
    """Records in a store of torch.distributed, one key for each rank and one for the decision."""

    def __init__(self, store: Store, model: str, role: str, rank: int, world_size: int) -> None:
        """`rank` and `world_size` are those of the process group. Records this rank as one that serves the model."""
        self._store = store
        self._prefix = f"rfork/updates/{role}/{model}"
        self._own_key = self._key(rank)
        # A draft model may be on some of the ranks only: those that had loaded it before the first update.
        self._is_on_all_ranks = role == "main"
        self._world_size = world_size
        self._decision_key = f"{self._prefix}/decision"
        self.record(0)

    def record(self, count: int) -> None:
        """See UpdateRecords."""
        self._store.set(self._own_key, str(count))

    def completed(self) -> Mapping[int, int | None]:
        """See UpdateRecords."""
        found = {rank: self._read(self._key(rank)) for rank in range(self._world_size)}
        return {rank: int(text) if text else None for rank, text in found.items() if text or self._is_on_all_ranks}

    def decide(self, decision: Decision) -> Decision:
        """See UpdateRecords."""
        while True:
            before = self._read(self._decision_key)
            current = Decision.parse(before)
            if current.covers(decision.count):
                return current
            found = self._store.compare_set(self._decision_key, before, str(decision)).decode()
            if found == str(decision):
                return decision

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _read(self, key: str) -> str:
        """Return a record; empty if there is none. A store would wait for a missing key."""
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


class UpdateAgreement:
    """One rank's part in the agreement. `reach` is called by one thread at a time."""

    def __init__(self, records: UpdateRecords, *, timeout_s: float = TIMEOUT_S) -> None:
        self._records = records
        self._timeout_s = timeout_s

    def reach(self, count: int, is_superseded: Callable[[], bool]) -> bool:
        """Return True once all ranks have completed update `count`, which this rank has completed.

        Returns False if `is_superseded` does, or if another rank has not completed it in time: then no rank serves
        it. Raises the exceptions of the store.
        """
        self._records.record(count)
        ended = monotonic() + self._timeout_s
        for pause_s in _pauses():
            if is_superseded():
                return False
            is_served = self.poll(count, is_expired=monotonic() > ended)
            if is_served is not None:
                return is_served
            time.sleep(pause_s)
        return False

    def poll(self, count: int, *, is_expired: bool) -> bool | None:
        """Return whether the ranks serve update `count`, which this rank has recorded; None: not decided yet.

        Once it `is_expired`, this rank decides for all of them.
        """
        others = other_ranks(count, self._records.completed())
        if others and not is_expired:
            return None
        decision = self._records.decide(Decision(count, "withdrawn" if others else "served"))
        if not decision.serves(count):
            log.error(
                "not seeding until the next weight update: the last one was not completed by all ranks",
                update=count,
                other_ranks=_format_ranks(others) or "too late",
            )
        return decision.serves(count)


def _pauses() -> Iterator[float]:
    """Yield the pauses between polls: most ranks complete an update together, some load from a slow disk."""
    pause_s = MIN_POLL_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, MAX_POLL_S)


def _format_ranks(others: Mapping[int, int | None]) -> str:
    named = [f"{rank} (update {last})" if last is not None else f"{rank} (no seed)" for rank, last in others.items()]
    more = [f"{len(named) - MAX_NAMED} more"] if len(named) > MAX_NAMED else []
    return ", ".join([*named[:MAX_NAMED], *more])


def agreement_of(identity: InstanceIdentity) -> UpdateAgreement | None:
    """Return the agreement of the process's replica; None for a complete model, or without a process group."""
    if is_single(identity.rank):
        return None
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    try:
        records = StoreRecords(
            torch.distributed.distributed_c10d._get_default_store(),
            identity.model,
            identity.rank.role,
            torch.distributed.get_rank(),
            torch.distributed.get_world_size(),
        )
    except Exception as error:  # a custom store may lack an operation
        log.warning("the ranks of this replica cannot agree on updates", reason=str(error))
        return None
    return UpdateAgreement(records)
