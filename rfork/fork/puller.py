"""The puller: fills an image from the routes of a plan, verifies each chunk, and re-plans when it must.

Runs on the target. A window of worker threads each read one chunk and verify it where it landed, so
that verification of one overlaps the arrival of others; a feed thread a source follows what can be
read from it; the caller's thread watches over both. A verified chunk goes to the board, from where
this instance, as a relay, gives it onwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rfork.errors import (
    DeadlinePassed,
    NoSource,
    PlannerRefused,
    PlannerUnreachable,
    RforkError,
    SourceChanged,
    SourceCorrupt,
    SourceGone,
    TargetError,
)
from rfork.fork.feed import Feed
from rfork.fork.report import SourceShare
from rfork.fork.schedule import Read, Schedule
from rfork.fork.sources import OpenFeed, Sources
from rfork.image.board import ChunkBoard
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.logs import logger
from rfork.settings import Settings
from rfork.wire import Lease, Plan, SourceFault

log = logger(__name__)

TICK_S = 0.25
"""How often stalls, silence and the deadline are looked at; events are acted on at once."""
FIRST_RETRY_S = 0.2
LEAST_REPLAN_S = 0.05
UNCOVERED_S = 0.8
"""Time to the next request for a plan while some chunks have a source and others have none."""

Replan = Callable[[tuple[SourceFault, ...]], Plan]
Learn = Callable[[Manifest], None]


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull did; sizes in bytes."""

    bytes_read: int
    bytes_repeated: int
    replans: int
    sources: tuple[SourceShare, ...]


class Puller:
    """One fork's pull. `run` it once.

    `open_feed` makes the (not yet started) feed of one route; `replan` asks the planner for a (new)
    plan, given the faults since the last one; `learn` is told the manifest before the first chunk is
    verified.
    """

    def __init__(
        self,
        image: Image,
        board: ChunkBoard,
        settings: Settings,
        *,
        open_feed: OpenFeed,
        replan: Replan,
        learn: Learn,
        deadline: float,
    ) -> None:
        self._image = image
        self._board = board
        self._settings = settings
        self._replan = replan
        self._learn = learn
        self._deadline = deadline
        self._chunks = image.layout.chunks
        self._changed = threading.Condition()
        self._schedule = Schedule(len(self._chunks), board.verified)
        self._sources = Sources(self._schedule, open_feed, self)
        self._manifest: Manifest | None = None
        self._bytes_read = 0
        self._replans = 0
        self._stopping = False
        self._forgotten = False
        self._expected: str | None = None

    # -- the caller's thread --------------------------------------------------------------------

    def run(self) -> Pulled:
        """Fill the image; returns once every chunk is verified.

        Raises DeadlinePassed, NoSource (the planner knows none, or none that is left works),
        PlannerUnreachable or PlannerRefused. Nothing is written to the image after it returns or
        raises.
        """
        workers = [
            threading.Thread(target=self._work, name=f"rfork-pull-{number}", daemon=True)
            for number in range(self._settings.window)
        ]
        for worker in workers:
            worker.start()
        try:
            self._watch_over()
        finally:
            with self._changed:
                self._stopping = True
                feeds = self._sources.everyone
                self._changed.notify_all()
            for feed in feeds:
                feed.close()
            for worker in workers:
                worker.join()
            for feed in feeds:
                feed.join()
        repeated = sum(
            times * (self._chunks[chunk][1] - self._chunks[chunk][0])
            for chunk, times in self._schedule.repeated.items()
        )
        return Pulled(self._bytes_read, repeated, max(0, self._replans - 1), self.shares)

    @property
    def shares(self) -> tuple[SourceShare, ...]:
        """What each source gave so far, most first."""
        with self._changed:
            return self._sources.shares

    @property
    def reasons(self) -> tuple[RforkError, ...]:
        """Each failure of a source so far, in order."""
        with self._changed:
            return tuple(self._sources.reasons)

    @property
    def bytes_read(self) -> int:
        """Bytes of the chunks that arrived so far, right or wrong."""
        return self._bytes_read

    def renew(self, leases: Mapping[str, Lease]) -> None:
        """Newer lease tokens, by source."""
        with self._changed:
            self._sources.renew(leases)

    def plan_again(self) -> None:
        """Ask for a new plan (the planner forgot this fork); until it has routes the old one holds."""
        with self._changed:
            self._forgotten = True
            self._changed.notify_all()

    def _watch_over(self) -> None:
        lonely_since: float | None = None
        retry_at = 0.0
        while True:
            # Outside the lock: closing a reader waits until nothing more of it can land.
            for feed in self._sources.take_retired():
                feed.close()
            with self._changed:
                if self._schedule.complete:
                    return
                now = time.monotonic()
                if now >= self._deadline:
                    raise DeadlinePassed(
                        f"the deadline passed with {len(self._board)} of {len(self._chunks)} chunks verified"
                    )
                self._sources.fail_stalled(now)
                if self._sources.any_retired:
                    continue
                due = self._schedule.unassigned or self._forgotten
                if not due or now < retry_at:
                    until = retry_at if due else now + TICK_S
                    self._changed.wait(max(0.01, min(until, now + TICK_S, self._deadline) - now))
                    continue
            plan, refusal = self._ask()
            now = time.monotonic()
            with self._changed:
                if plan is not None and plan.routes:
                    self._adopt(plan)
                    lonely_since = None
                    retry_at = now + (UNCOVERED_S if self._schedule.unassigned else LEAST_REPLAN_S)
                    continue
                if self._schedule.in_flight or self._sources.giving:
                    retry_at = now + UNCOVERED_S  # others still give: no hurry
                    continue
                lonely_since = lonely_since or now
                again_s = plan.retry_after_s if plan is not None else FIRST_RETRY_S
                worth_it = again_s is not None and (plan is not None or self._replans > 0)
                if not worth_it or now - lonely_since >= self._settings.patience_s:
                    raise refusal
                retry_at = now + (again_s or FIRST_RETRY_S)

    def _ask(self) -> tuple[Plan | None, RforkError]:
        """One call to the planner: its plan, if any, and the error to end with if there is no route."""
        with self._changed:
            faults = self._sources.faults
        try:
            plan = self._replan(faults)
        except (NoSource, PlannerUnreachable, PlannerRefused) as error:
            return None, error
        with self._changed:
            self._sources.told(faults)
        return plan, NoSource(plan.reason or "the planner knows no source")

    def _adopt(self, plan: Plan) -> None:
        self._replans += 1
        self._forgotten = False
        self._expected = plan.weights_id
        self._sources.adopt(plan.routes)
        log.info(
            "planned",
            fork=plan.fork_id,
            routes={route.source_id[:8]: ranges_text(route.chunks) for route in plan.routes},
            reason=plan.reason,
        )
        self._changed.notify_all()

    # -- feed threads -----------------------------------------------------------------------------

    def on_manifest(self, feed: Feed, manifest: Manifest) -> None:
        """See `rfork.fork.feed.FeedListener`; every source must hold the bytes that the first one named."""
        with self._changed:
            if self._sources.find(feed.source_id) is not feed:
                raise SourceGone(f"{feed.address}: was given up")
            begun = len(self._board) > 0 or self._schedule.in_flight > 0
            expected = self._manifest.weights_id if self._manifest and begun else self._expected
            if expected not in (None, manifest.weights_id):
                raise SourceChanged(
                    f"{feed.address}: holds weights {manifest.weights_id}, this fork is of {expected}"
                )
            if self._manifest is None or manifest.weights_id != self._manifest.weights_id:
                self._manifest = manifest
                self._learn(manifest)

    def on_offer(self, feed: Feed, chunks: tuple[Range, ...]) -> None:
        """See `rfork.fork.feed.FeedListener`."""
        with self._changed:
            if self._sources.find(feed.source_id) is feed:
                self._schedule.offer(feed.source_id, chunks)
                self._changed.notify_all()

    def on_failure(self, feed: Feed, error: RforkError) -> None:
        """See `rfork.fork.feed.FeedListener`."""
        with self._changed:
            self._fail(feed, error)

    def _fail(self, feed: Feed, error: RforkError) -> None:
        """Give up on a source; the caller holds the lock. Past the deadline nobody but time is at fault."""
        if not self._stopping and time.monotonic() < self._deadline:
            self._sources.fail(feed, error)
        self._changed.notify_all()

    # -- worker threads -----------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                read = None
                while not self._stopping and (read := self._schedule.take()) is None:
                    self._changed.wait()
                if read is None:
                    return
                feed = self._sources.find(read.source_id)
                manifest = self._manifest
            error: RforkError | None = None
            try:
                if feed is None or manifest is None:
                    raise SourceGone("the source was given up")
                self._fetch(feed, read, manifest)
            except RforkError as caught:
                error = caught
            except Exception as caught:  # out of memory, or a bug: this side's failure, and not a hang
                log.exception("reader failed", source=read.source_id[:8])
                error = TargetError(f"{type(caught).__name__}: {caught}")
            with self._changed:
                if error is None and feed is not None:
                    begin, end = self._chunks[read.chunk]
                    self._schedule.verified(read)
                    self._sources.credit(feed, end - begin)
                    # One chunk less is news for the caller's thread only, and only if it was the last.
                    if self._schedule.complete:
                        self._changed.notify_all()
                else:
                    self._schedule.dropped(read)
                    if feed is not None and error is not None:
                        self._fail(feed, error)
                    self._changed.notify_all()
            if error is None:
                self._board.mark(read.chunk)

    def _fetch(self, feed: Feed, read: Read, manifest: Manifest) -> None:
        begin, end = self._chunks[read.chunk]
        patience = self._settings.stall_s + (end - begin) / self._settings.min_rate
        feed.read(begin, end, min(time.monotonic() + patience, self._deadline))
        feed.advanced_at = time.monotonic()
        with self._changed:
            self._bytes_read += end - begin
        if self._settings.verify and self._image.digest(read.chunk) != manifest.digests[read.chunk]:
            raise SourceCorrupt(f"{feed.address}: chunk {read.chunk} does not match its digest")


def ranges_text(parts: tuple[Range, ...]) -> str:
    """Chunk ranges as people read them: ``0-63,80-127``."""
    return ",".join(f"{begin}-{end - 1}" for begin, end in parts)
