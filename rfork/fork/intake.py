"""What the planner and the sources of a fork say, the latter on their threads, and what becomes of it.

Runs on the target. Each call of a source takes the puller's lock, and rings its bell where there is
something to read, or to plan anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from rfork.errors import RforkError, SourceChanged, SourceGone, TransportUnusable
from rfork.fork.deadline import Deadline
from rfork.fork.digests import Digests
from rfork.fork.giver import Giver
from rfork.fork.resume import Resume
from rfork.fork.schedule import Schedule
from rfork.fork.sources import Open, Sources
from rfork.image import ranges
from rfork.image.board import ChunkBoard
from rfork.image.manifest import Manifest
from rfork.image.ranges import Range
from rfork.logs import logger
from rfork.storage.base import name_of
from rfork.wire import Plan

log = logger(__name__)


class Intake:
    """See `rfork.fork.giver.Listener`; keeps the sources, as whoever has ended is told from who has not."""

    def __init__(
        self,
        changed: threading.Condition,
        board: ChunkBoard,
        schedule: Schedule,
        digests: Digests,
        opening: Open,
        resume: Resume,
        deadline: Deadline,
    ) -> None:
        """`changed` is the puller's lock and its bell; `deadline` the fork's own."""
        self.sources = Sources(schedule, digests, opening, self)
        self.stopping = False
        """Whether the fork is over: who fails now is not at fault."""
        self.expected: str | None = None
        """The weights_id of the plan."""
        self._left: str | None = None
        """The weights_id of what was dropped since the plan."""
        self._version: str | None = None
        """The version of the plan."""
        self._changed = changed
        self._board = board
        self._schedule = schedule
        self._digests = digests
        self._resume = resume
        self._deadline = deadline
        self._count = len(board.chunks)

    # -- what the puller does; it holds the lock -------------------------------------------------------

    def adopt(self, plan: Plan) -> None:
        """Follow a plan."""
        self.expected, self._left, self._version = plan.weights_id, None, plan.version
        self.sources.adopt(plan.routes, plan.storage)
        log.info(
            "planned",
            fork=plan.fork_id,
            routes={route.source_id[:8]: ranges_text(route.chunks) for route in plan.routes},
            storage={name_of(read.kind, read.uri): ranges_text(read.chunks) for read in plan.storage},
            reason=plan.reason,
        )
        self._changed.notify_all()

    @property
    def changing(self) -> bool:
        """Whether the weights that were read change at their source: others will soon be had there."""
        known = self._digests.manifest is not None or self.expected is not None or self._left is not None
        return known and self.sources.changing

    def start_over(self) -> bool:
        """Drop what was begun of weights that nobody gives any more; whether there was anything."""
        manifest = self._digests.manifest
        if manifest is None:
            return False
        self._left = manifest.weights_id
        if chunks := self._digests.start_over():
            why = f"the weights changed at the source: started over, {chunks} chunks are compared anew"
            log.warning("started over", chunks=chunks, weights_id=self._left)
            self.sources.reasons.append(SourceChanged(why))
        return True

    def is_other(self, plan: Plan) -> bool:
        """Whether a plan is of other weights than those that were begun: of another version."""
        manifest = self._digests.manifest
        if manifest is None:
            return False
        if plan.weights_id is None:
            return plan.version != self._version
        return plan.weights_id != manifest.weights_id

    def leads_back(self, plan: Plan) -> bool:
        """Whether a plan names the weights that were dropped, and some that have yet to drop them too.

        Who holds all of them leads on: they were changed back.
        """
        parts = [part for route in plan.routes for part in route.chunks]
        parts += [part for read in plan.storage for part in read.chunks]
        partial = ranges.count(ranges.normalise(parts)) < self._count
        return plan.weights_id is not None and plan.weights_id == self._left and partial

    # -- what sources say, on their threads ------------------------------------------------------------

    def on_manifest(self, feed: Giver, manifest: Manifest) -> None:
        """See `rfork.fork.giver.Listener`; every source must hold the bytes that the first one named."""
        with self._changed:
            self._check_current(feed)
            known = self._digests.manifest
            begun = len(self._board) > 0 or self._schedule.in_flight > 0
            expected = known.weights_id if known and begun else self.expected
            if expected not in (None, manifest.weights_id):
                raise SourceChanged(
                    f"{feed.address}: holds weights {manifest.weights_id}, this fork is of {expected}"
                )
            self._digests.learn(manifest)
            if known is None or known.weights_id != manifest.weights_id:
                self._resume.know(manifest)
            self._changed.notify_all()

    def on_draft(self, feed: Giver, draft: str, digests: Mapping[int, bytes]) -> None:
        """See `rfork.fork.giver.Listener`."""
        with self._changed:
            self._check_current(feed)
            alone = not self.sources.giving_besides(feed)
            self._digests.announce(feed.source_id, draft, digests, alone=alone)

    def on_offer(self, feed: Giver, chunks: tuple[Range, ...]) -> None:
        """See `rfork.fork.giver.Listener`."""
        with self._changed:
            if self.sources.find(feed.source_id) is feed:
                self._schedule.offer(feed.source_id, chunks)
                self._changed.notify_all()

    def upcoming(self, feed: Giver, count: int) -> tuple[Sequence[int], Sequence[int]]:
        """See `rfork.fork.giver.Listener`."""
        with self._changed:
            if self.sources.find(feed.source_id) is not feed:
                return (), ()
            return self._schedule.upcoming(feed.source_id, count)

    def on_detour(self, feed: Giver, error: TransportUnusable) -> None:
        """See `rfork.fork.giver.Listener`."""
        log.warning(
            "transport cannot be used",
            source=feed.address,
            error=error.kind,
            detail=str(error),
            hint=error.hint,
        )
        with self._changed:
            self.sources.note(error)

    def on_failure(self, feed: Giver, error: RforkError) -> None:
        """See `rfork.fork.giver.Listener`."""
        with self._changed:
            self.fail(feed, error)

    def held(self) -> Mapping[int, bytes]:
        """See `rfork.fork.giver.Listener`."""
        with self._changed:
            return self._digests.held()

    def on_files(
        self, feed: Giver, origin: str, compared: Mapping[int, bytes], *, agrees: bool
    ) -> Mapping[int, bytes]:
        """See `rfork.fork.giver.Listener`."""
        with self._changed:
            self._check_current(feed)
            left = self._digests.read_files(feed.source_id, origin, compared, agrees=agrees)
            self._changed.notify_all()
            return left

    def _check_current(self, feed: Giver) -> None:
        if self.sources.find(feed.source_id) is not feed:
            raise SourceGone(f"{feed.address}: was given up")

    def fail(self, feed: Giver, error: RforkError) -> None:
        """Give up on a source; the caller holds the lock. Past the deadline nobody but time is at fault."""
        if not self.stopping and time.monotonic() < self._deadline.at:
            self.sources.fail(feed, error)
        self._changed.notify_all()


def ranges_text(parts: tuple[Range, ...]) -> str:
    """Chunk ranges as people read them: ``0-63,80-127``."""
    return ",".join(f"{begin}-{end - 1}" for begin, end in parts)
