"""Tells the page what the fleet is and what of it changes, as server-sent events.

A stream begins with `begin` (about the planner), goes on with `change` events that make up all that there
is, and `ready`; from then on a `change` tells what became otherwise since the last one, about twice a second.
A row is told whole the first time and by its changed fields after that, None for a field that is no more.

While nobody reads, none of this runs. While somebody does, one task looks at the planner's records, whoever
reads; it makes no more than `MOST_ROWS` rows a turn, so that a fleet in turmoil is told later rather than
planned later. The format is between this module and the page beside it: it may change with each release.
Used from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, TypeVar

from pydantic import JsonValue
from pydantic_core import to_json

import rfork
from planner.api.models import rows
from planner.problems import ProblemError
from planner.registry import Registry
from planner.store.records import ForkRecord, InstanceRecord
from planner.ui.reader import Reader
from planner.ui.rows import Row, changed, changes_at, fork_row, instance_row
from rfork.logs import logger

MOST_READERS: Final = 16
"""Pages that are told at a time."""
PACE_S: Final = 0.5
SUMS_S: Final = 2.0
"""Seconds between two looks at the sums over all instances of a model, and at scale-ups."""
MOST_ROWS: Final = 500
"""Rows of instances, and of forks, that one turn makes."""
ENDED: Final = 500
"""Forks that ended, which the page can show."""
PIECE: Final = 500
"""Rows that are sent together at the beginning."""
SILENT: Final = 2.5
"""Heartbeats that an instance may miss before it is shown as silent."""

Told = TypeVar("Told")


@dataclass(frozen=True)
class Known:
    """An instance as it was told last."""

    record: InstanceRecord
    row: Row
    until: float
    """Its row changes then, whatever is heard."""


class Feed:
    """All pages that look, and what they have been told."""

    def __init__(self, registry: Registry, *, heartbeat_s: float, pace_s: float = PACE_S) -> None:
        """`heartbeat_s`: in which instances report; `pace_s`: from one look at the records to the next."""
        self._registry = registry
        self._heartbeat_s = heartbeat_s
        self._silent_s = SILENT * heartbeat_s
        self._pace_s = pace_s
        self._readers: dict[Reader, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._instances: dict[str, Known] = {}
        self._forks: dict[str, Row] = {}
        self._ended: dict[str, None] = {}
        self._touched: dict[str, None] = {}  # forks that changed since they were told
        self._sums: dict[str, JsonValue] = {}
        self._sums_at = 0.0
        self._filled = asyncio.Event()
        self._next = 0
        self._stale = False
        self._closed = False
        registry.state.watch(self)

    async def join(self) -> Reader:
        """A page that looks from now on, until `leave` or `close`.

        ProblemError `too-many-streams` (503) where as many look as may, `not-ready` (503) where it fails.
        """
        if self._closed:
            raise ProblemError(503, "not-ready", "the planner stops", headers={"Retry-After": "2"})
        if len(self._readers) >= MOST_READERS:
            why = f"{MOST_READERS} pages are open already: close one of them"
            raise ProblemError(503, "too-many-streams", why, headers={"Retry-After": "10"})
        reader = Reader()
        self._readers[reader] = None
        if self._task is None or self._task.done():
            self._forget()
            self._task = asyncio.create_task(self._run(), name="rfork-page-feed")
        try:
            await self._filled.wait()
            if reader.closed:
                why = "the planner stops, or cannot show its fleet: its log says why"
                raise ProblemError(503, "not-ready", why, headers={"Retry-After": "2"})
        except BaseException:
            self.leave(reader)
            raise
        reader.begin(self._beginning())
        return reader

    def leave(self, reader: Reader) -> None:
        """The page is gone. With the last one all is forgotten."""
        reader.close()
        self._readers.pop(reader, None)
        if not self._readers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._forget()

    def close(self) -> None:
        """End every stream: the planner stops, and would wait for them."""
        self._closed = True
        self._filled.set()
        for reader in self._readers:
            reader.close()

    # -- as planner.state.Watcher ----------------------------------------------------------------------

    def came(self, record: InstanceRecord) -> None:
        """Found at the next look."""

    def announced(self, models: Iterable[str]) -> None:
        """Found at the next look."""

    def loaded(self) -> None:
        """The store was read anew: what was told may never have been."""
        self._stale = True

    # -- the task ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        silence = self._registry.state.subscribe(lambda fork: self._touched.setdefault(fork.fork_id))
        try:
            await self._fill()
            while True:
                await asyncio.sleep(self._pace_s)
                if self._stale:
                    await self._fill()
                    for reader in self._readers:
                        reader.begin(self._beginning())
                message = self._look()
                for reader in self._readers:
                    if reader.behind:
                        reader.begin(self._beginning())
                    elif message:
                        reader.put(message)
        except Exception:  # the task's outermost edge: pages come again, and it begins anew
            logger("planner.ui").exception("the page's feed failed")
            for reader in self._readers:
                reader.close()
            self._filled.set()  # whoever waits to begin is closed, too
        finally:
            silence()

    async def _fill(self) -> None:
        """Take in all that there is, with room for other work in between."""
        self._forget()
        state = self._registry.state
        ended = sorted((fork for fork in state.forks() if not fork.live), key=lambda fork: fork.seen_at)
        for fork in (*ended[-ENDED:], *state.live_forks()):
            self._touched[fork.fork_id] = None
        for _ in range(1 + max(state.instance_count, len(self._touched)) // MOST_ROWS):
            self._look()
            await asyncio.sleep(0)
        self._filled.set()

    def _forget(self) -> None:
        for table in (self._instances, self._forks, self._ended, self._touched, self._sums):
            table.clear()
        self._sums_at, self._stale = 0.0, False
        self._filled.clear()

    def _look(self) -> bytes:
        """What is otherwise than at the last look, as one message; empty where nothing is."""
        now = self._registry.now()
        forks, ended = self._changed_forks()
        parts: dict[str, JsonValue] = {
            "instances": [*self._changed_instances(now)],
            "gone": [*self._gone()],
            "forks": [*forks],
            "dropped": [*ended],
            **self._changed_sums(now),
        }
        told = {name: part for name, part in parts.items() if part or name in self._sums}
        return _message("change", {"now": round(now, 2), **told}) if told else b""

    def _changed_instances(self, now: float) -> list[Row]:
        """Heartbeats make new records, most of which tell the page nothing new."""
        found: list[Row] = []
        records = self._registry.state.instances()
        # Where the last turn had to stop, or those behind would never have theirs.
        start = self._next if self._next < len(records) else 0
        self._next = 0
        for index, record in enumerate(chain(records[start:], records[:start])):
            instance_id = record.report.instance_id
            known = self._instances.get(instance_id)
            if known is not None and known.record is record and now < known.until:
                continue
            row = instance_row(record, now, self._silent_s)
            self._instances[instance_id] = Known(record, row, changes_at(record, now, self._silent_s))
            if fields := changed(known.row if known else None, row):
                found.append(fields)
            if len(found) >= MOST_ROWS:
                self._next = (start + index + 1) % len(records)
                break
        return found

    def _gone(self) -> list[str]:
        state = self._registry.state
        if len(self._instances) <= state.instance_count:
            # Some of those that there are may not have been told of yet: then these wait for that.
            return []
        gone = [name for name in self._instances if state.instance(name) is None]
        for name in gone:
            del self._instances[name]
        return gone

    def _changed_forks(self) -> tuple[list[Row], list[str]]:
        """Rows, and the ids of those that ended and are told no more: the oldest, and the forgotten."""
        found: list[Row] = []
        dropped: list[str] = []
        for fork_id in list(islice(self._touched, MOST_ROWS)):
            del self._touched[fork_id]
            record = self._registry.state.fork(fork_id)
            if record is None:  # it ended and was forgotten since it was told
                if self._forks.pop(fork_id, None) is not None:
                    self._ended.pop(fork_id, None)
                    dropped.append(fork_id)
                continue
            row = fork_row(record)
            if fields := changed(self._forks.get(fork_id), row):
                found.append(fields)
            self._forks[fork_id] = row
            self._end(record)
        oldest = [*islice(self._ended, max(0, len(self._ended) - ENDED))]
        for fork_id in oldest:
            del self._ended[fork_id], self._forks[fork_id]
        return found, dropped + oldest

    def _end(self, record: ForkRecord) -> None:
        if record.live:
            self._ended.pop(record.fork_id, None)
        else:
            self._ended.setdefault(record.fork_id)

    def _changed_sums(self, now: float) -> dict[str, JsonValue]:
        """Models and scale-ups, and whether the store is there: whole, where they changed."""
        if now < self._sums_at:
            return {}
        self._sums_at = now + SUMS_S
        registry = self._registry
        groups = sorted(registry.state.groups(), key=lambda group: (group.model, group.rank_key))
        sums: dict[str, JsonValue] = {
            "models": [row.model_dump() for group in groups for row in rows(registry.state, group)],
            "scaleups": [view.model_dump(exclude={"expires_in_s"}) for view in registry.scaleups.views()],
            "ready": registry.store.ready,
        }
        changes = {name: value for name, value in sums.items() if self._sums.get(name) != value}
        self._sums = sums
        return changes

    # -- what a page is sent first -----------------------------------------------------------------------

    def _beginning(self) -> Iterator[bytes]:
        """All that was told until now; made while it is sent, but of the rows of this moment."""
        instances = [known.row for known in self._instances.values()]
        return self._pieces(instances, list(self._forks.values()), dict(self._sums))

    def _pieces(self, instances: list[Row], forks: list[Row], sums: dict[str, JsonValue]) -> Iterator[bytes]:
        now = round(self._registry.now(), 2)
        about: Row = {"version": rfork.__version__, "heartbeat_s": self._heartbeat_s, "now": now}
        yield _message("begin", about)
        for piece in pieces(instances):
            yield _message("change", {"now": now, "instances": [*piece]})
        for piece in pieces(forks):
            yield _message("change", {"now": now, "forks": [*piece]})
        yield _message("change", {"now": now, **sums})
        yield _message("ready", {"now": now})


def pieces(items: list[Told]) -> Iterator[list[Told]]:
    """The items, `PIECE` at a time."""
    for start in range(0, len(items), PIECE):
        yield items[start : start + PIECE]


def _message(event: str, data: Row) -> bytes:
    """One event. JSON has no line break in it, so that `data` is one line."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), to_json(data))
