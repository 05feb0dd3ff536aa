"""Tells the planner and the caller how a fork goes, and keeps its leases alive, while it runs.

Runs on the target, on threads of its own: whatever the fork waits for, also its own loader, it is heard of.
What the caller sees does not wait for the planner either.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from rfork.control.client import PlannerClient
from rfork.errors import PlannerRefused, PlannerUnreachable
from rfork.fork.meter import Meter, fastest, timed
from rfork.fork.puller import Puller
from rfork.fork.report import transports_of
from rfork.fork.stopwatch import Stopwatch
from rfork.image.board import ChunkBoard
from rfork.logs import logger
from rfork.tracing import TraceContext, here, within
from rfork.wire import ForkProgress

log = logger(__name__)

PROGRESS_S = 1.0
LOOK_S = PROGRESS_S / 4

OnProgress = Callable[[ForkProgress, int], None]
"""Told the progress about four times a second, and the image's size in bytes."""


class Reporter:
    """One fork's reports. `puller` is asked how it goes, and told what the planner answers."""

    def __init__(
        self,
        fork_id: str,
        planner: PlannerClient,
        puller: Puller,
        board: ChunkBoard,
        watch: Stopwatch,
        on_progress: OnProgress | None,
    ) -> None:
        self.meter = Meter()
        self._fork_id = fork_id
        self._planner = planner
        self._puller = puller
        self._board = board
        self._watch = watch
        self._on_progress = on_progress
        self._done = threading.Event()
        self._newest: ForkProgress | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Report while the block runs, and show how it stands once more at its end."""
        threads = [
            threading.Thread(target=partial(self._work, work, here()), name=name, daemon=True)
            for name, work in (("rfork-progress", self._look), ("rfork-telling", self._tell_planner))
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._done.set()
            # A planner that does not answer must not hold up a fork that is done.
            until = time.monotonic() + LOOK_S
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))

    def _work(self, work: Callable[[], None], trace: TraceContext | None) -> None:
        with within(trace):
            work()

    def _look(self) -> None:
        self.meter.add(time.monotonic(), 0)
        while True:
            last = self._done.wait(LOOK_S)
            now = time.monotonic()
            shares = self._puller.shares
            given = {share.source_id: share.verified_bytes for share in shares}
            self.meter.add(now, self._puller.bytes_timed, timed(given))
            self._newest = progress = ForkProgress(
                verified=self._board.verified,
                bytes_read=self._puller.bytes_read,
                bytes_per_s=self.meter.last,
                sources=given,
                source_bytes_per_s=fastest(self.meter.last_sources),
                link_bytes_per_s=self.meter.best,
                transports=transports_of(shares),
                phases={phase: round(seconds, 4) for phase, seconds in self._watch.phases.items()},
            )
            self._show(progress)
            if last:
                return

    def _tell_planner(self) -> None:
        while not self._done.wait(PROGRESS_S):
            if self._newest is not None:
                self._tell(self._newest)

    def _tell(self, progress: ForkProgress) -> None:
        try:
            ack = self._planner.progress(self._fork_id, progress)
        except PlannerRefused as error:
            if error.problem == "unknown-fork":
                self._puller.plan_again("the planner does not know this fork")
            else:
                log.warning("progress refused, so leases will run out", detail=str(error))
        except PlannerUnreachable as error:
            log.debug("progress not told", detail=str(error))
        else:
            self._puller.renew(ack.leases)
            if ack.ask_again is not None:
                self._puller.plan_again(ack.ask_again)

    def _show(self, progress: ForkProgress) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress, self._board.chunks.image_bytes)
        except Exception:  # what shows the progress may fail; the planner is told of it all the same
            log.exception("progress not shown, and not shown again")
            self._on_progress = None
