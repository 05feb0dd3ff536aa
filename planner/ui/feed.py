"""Tells the page what the fleet is and what of it changes, as server-sent events.

A stream begins with `begin` (about the planner), goes on with `change` events that make up all that there
is, and `ready`; from then on a `change` tells what became otherwise since the last one, about twice a second.
A row is told whole the first time and by its changed fields after that, None for a field that is no more.

While nobody reads, none of this runs. While somebody does, one task looks at the planner's records, whoever
reads: `telling` says what it finds. The format is between that and the page beside it: it may change with
each release. Used from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from planner.problems import ProblemError
from planner.registry import Registry
from planner.store.records import InstanceRecord
from planner.ui.reader import Reader
from planner.ui.telling import Telling
from rfork.logs import logger

MOST_READERS: Final = 16
"""Pages that are told at a time."""
PACE_S: Final = 0.5


class Feed:
    """All pages that look, and the task that looks for them."""

    def __init__(self, registry: Registry, *, heartbeat_s: float, pace_s: float = PACE_S) -> None:
        """`heartbeat_s`: in which instances report; `pace_s`: from one look at the records to the next."""
        self._state = registry.state
        self._telling = Telling(registry, heartbeat_s=heartbeat_s)
        self._pace_s = pace_s
        self._readers: dict[Reader, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._filled = asyncio.Event()
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
        reader.begin(self._telling.beginning())
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
        silence = self._state.subscribe(self._telling.touch)
        try:
            await self._fill()
            while True:
                await asyncio.sleep(self._pace_s)
                if self._stale:
                    await self._fill()
                    for reader in self._readers:
                        reader.begin(self._telling.beginning())
                message = self._telling.look()
                for reader in self._readers:
                    if reader.behind:
                        reader.begin(self._telling.beginning())
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
        for _ in range(self._telling.start()):
            self._telling.look()
            await asyncio.sleep(0)
        self._filled.set()

    def _forget(self) -> None:
        self._telling.forget()
        self._stale = False
        self._filled.clear()
