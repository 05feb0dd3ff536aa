"""The puller: fills an image from the sources of a plan, verifies each chunk, and re-plans when it must.

Runs on the target. Sources are peers and, where the planner elected this instance, its own storage. A
window of workers reads and checks chunks; a feed thread a source follows what can be read from it;
the caller's thread watches over both.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from rfork.errors import (
    DeadlinePassed,
    NoSource,
    PlannerRefused,
    PlannerUnreachable,
    RforkError,
)
from rfork.fork.deadline import Deadline
from rfork.fork.digests import Digests, Giving
from rfork.fork.intake import Intake
from rfork.fork.report import Pulled, SourceShare
from rfork.fork.resume import Resume
from rfork.fork.schedule import Schedule
from rfork.fork.sources import Open
from rfork.fork.whole import LoadWhole, Whole
from rfork.fork.workers import Workers
from rfork.image.board import ChunkBoard
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.settings import Settings
from rfork.storage.spool import Spool
from rfork.wire import Lease, Plan, Share, SourceFault

log = logger(__name__)

TICK_S = 0.25
"""How often stalls, silence and the deadline are looked at; events are acted on at once."""
LATE_S = 2 * TICK_S
"""Without a look for so long, this process was held up (stopped, or a call kept the interpreter)."""
FIRST_RETRY_S = 0.2
LEAST_REPLAN_S = 0.05
UNCOVERED_S = 0.8
"""Time to the next request for a plan while some chunks have a source and others have none."""

Replan = Callable[[tuple[SourceFault, ...], tuple[Share, ...]], Plan]
"""Asks the planner, given the faults since the last plan, and what is read by that plan now."""


class Puller:
    """One fork's pull. `run` it once.

    `opening` makes the (not yet started) feeds of a plan; `replan` asks the planner for a (new) one;
    `load_whole` is called on the caller's thread where the planner elected this instance to run its
    loader; `giving` is told the manifest before the first chunk that was checked against it is given.
    `identity` is this instance's id and host; `spool` is taken from as `rfork.fork.resume` says. Without
    a manifest, a fork that did not read all its chunks from files of its own waits at the end for whoever
    did: only that one can tell that they belong together.
    """

    def __init__(
        self,
        image: Image,
        board: ChunkBoard,
        settings: Settings,
        *,
        identity: tuple[str, str],
        opening: Open,
        replan: Replan,
        load_whole: LoadWhole,
        giving: Giving,
        deadline: Deadline,
        spool: Spool | None = None,
    ) -> None:
        self._board = board
        self._settings = settings
        self._replan = replan
        self._giving = giving
        self._deadline = deadline
        self._chunks = image.layout.chunks
        self._changed = threading.Condition()
        self._schedule = Schedule(len(self._chunks), board.verified)
        self._digests = Digests(image, board, self._schedule, giving)
        self._resume = Resume(spool, image, board, settings, self._schedule, self._digests, self._changed)
        self._intake = Intake(
            self._changed, board, self._schedule, self._digests, opening, self._resume, deadline
        )
        self._sources = self._intake.sources
        self._workers = Workers(
            image, board, settings, self._schedule, self._digests, self._intake, self._changed, deadline
        )
        self._whole = Whole(
            board, self._schedule, self._digests, self._sources, giving, load_whole, self._changed, identity
        )
        self._complete_since: float | None = None
        self._looked_at = self._judges_from = -math.inf
        self._stood_still = False
        self._plans = 0
        self._ask_again: str | None = None

    # -- the caller's thread --------------------------------------------------------------------

    def run(self) -> Pulled:
        """Fill the image; returns once every chunk is verified.

        Raises DeadlinePassed, NoSource (the planner knows none, or none that is left works),
        PlannerUnreachable or PlannerRefused. Nothing is written to the image after it returns or
        raises.
        """
        self._workers.start()
        self._resume.start()
        try:
            self._watch_over()
        finally:
            with self._changed:
                self._intake.stopping = True
                feeds = self._sources.everyone
            self._workers.stop()
            self._resume.stop()
            for feed in feeds:
                feed.close()
            self._workers.join()
            for feed in feeds:
                feed.join()
            self._giving.say_reading(None)
        return self.pulled

    @property
    def pulled(self) -> Pulled:
        """What was done so far, also by a pull that failed."""
        repeated = sum(
            times * (self._chunks[chunk][1] - self._chunks[chunk][0])
            for chunk, times in self._schedule.repeated.items()
        )
        shares = sorted((*self.shares, *self._resume.share), key=lambda share: -share.verified_bytes)
        replans = max(0, self._plans - 1)
        return Pulled(self.bytes_read, repeated, replans, tuple(shares), self._resume.seconds)

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
        return self.bytes_timed + self._whole.bytes_read

    @property
    def bytes_timed(self) -> int:
        """Of them those that were counted as they came: what a loader reads is known all at once."""
        return self._workers.bytes_read

    def renew(self, leases: Mapping[str, Lease]) -> None:
        """Newer lease tokens, by source."""
        with self._changed:
            self._sources.renew(leases)

    def plan_again(self, reason: str) -> None:
        """Ask for a new plan soon; until there is one the old one holds. Nothing is given up for it."""
        with self._changed:
            if self._ask_again is None:
                log.info("a new plan is wanted", because=reason)
            self._ask_again = reason
            self._changed.notify_all()

    def _watch_over(self) -> None:
        lonely_since: float | None = None
        retry_at = 0.0
        while True:
            with self._changed:
                retired = self._sources.take_retired()
            # Outside the lock: closing a reader waits until nothing more of it can land.
            for feed in retired:
                feed.close()
            with self._changed:
                if self._schedule.complete and self._digests.seal():
                    return
                now = time.monotonic()
                self._look(now)
                if self._sources.any_retired:
                    continue
                due = self._schedule.unassigned or self._ask_again is not None
                if self._schedule.complete or not due or now < retry_at:
                    until = now + TICK_S if self._schedule.complete or not due else retry_at
                    self._changed.wait(max(0.01, min(until, now + TICK_S, self._deadline.at) - now))
                    continue
            plan, refusal = self._ask()
            now = time.monotonic()
            whole = next((read for read in plan.storage if read.kind == "loader"), None) if plan else None
            if whole is not None and not self._schedule.complete:
                self._plans += 1
                self._ask_again = None
                self._resume.stop()  # the loader writes every byte
                self._whole.load(whole)
                lonely_since, retry_at = None, time.monotonic() + FIRST_RETRY_S
                continue
            with self._changed:
                if plan is not None and (plan.routes or plan.storage) and not self._intake.leads_back(plan):
                    if self._intake.is_other(plan):
                        if self._schedule.in_flight:
                            retry_at = now + LEAST_REPLAN_S  # what lands must not count for the next weights
                            continue
                        self._intake.start_over()
                    self._plans += 1
                    self._ask_again, lonely_since = None, None
                    self._intake.adopt(plan)
                    again_s = plan.retry_after_s if self._schedule.unassigned else LEAST_REPLAN_S
                    retry_at = now + max(LEAST_REPLAN_S, UNCOVERED_S if again_s is None else again_s)
                    continue
                if self._schedule.in_flight or self._sources.giving or not self._schedule.unassigned:
                    retry_at = now + UNCOVERED_S  # others still give: no hurry
                    continue
                again_s = plan.retry_after_s if plan is not None else FIRST_RETRY_S
                changing = self._intake.changing
                if changing and again_s is None and self._intake.start_over():
                    continue  # it asks for any weights now
                lonely_since = lonely_since or now
                worth_it = changing or (again_s is not None and (plan is not None or self._plans > 0))
                if not worth_it or now - lonely_since >= self._settings.patience_s:
                    raise refusal
                retry_at = now + (again_s or FIRST_RETRY_S)

    def _look(self, now: float) -> None:
        """What time brings; the caller holds the lock. Raises DeadlinePassed."""
        gave_at = self._sources.gave_at
        if gave_at is not None:
            self._deadline.put_off(gave_at + self._settings.storage_stall_s)
        if now >= self._deadline.at:
            raise DeadlinePassed(
                f"the deadline passed with {len(self._board)} of {len(self._chunks)} chunks verified"
            )
        if self._judges(now):
            self._resume.look(now, self.bytes_read)
            self._sources.fail_stalled(now)
            if self._sources.look_for_late(now):
                self._changed.notify_all()
        at, relayed = self._sources.reading or (None, False)
        self._giving.say_reading((lambda: at) if at is not None else None, relayed=relayed)
        if not self._schedule.complete:
            self._complete_since = None
            return
        # All chunks are held, but not yet known to be of one image: whoever reads storage will say so.
        self._complete_since = self._complete_since or now
        if not self._sources.any_left or now - self._complete_since > 3 * self._settings.stall_s:
            self._complete_since = None
            self._digests.doubt()

    def _judges(self, now: float) -> bool:
        """Whether silence counts: not right after this process itself stood still for a while.

        What the sources said meanwhile has yet to be heard; the threads that do so get a moment first.
        """
        late, self._looked_at = LATE_S < now - self._looked_at < math.inf, now
        if late and not self._stood_still:
            self._stood_still, self._judges_from = True, now + TICK_S
        if now < self._judges_from:
            return False
        self._stood_still = False
        return True

    def _ask(self) -> tuple[Plan | None, RforkError]:
        """One call to the planner: its plan, if any, and the error to end with if there is no route."""
        with self._changed:
            faults, current = self._sources.faults, self._sources.current
        try:
            plan = self._replan(faults, current)
        except (NoSource, PlannerUnreachable, PlannerRefused) as error:
            return None, error
        with self._changed:
            self._sources.told(faults)
        return plan, NoSource(plan.reason or "the planner knows no source")
