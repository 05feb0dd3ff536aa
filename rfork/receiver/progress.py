"""Reports a fork's progress to the planner and the caller, and renews its leases, while it runs.

Runs on the target, on its own threads: it reports even while the fork waits, for example for its loader. The
caller's callback does not wait for the planner.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from rfork.errors import PlannerRejected, PlannerUnreachable
from rfork.image.chunk_state import ChunkState
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.receiver.phase_timer import PhaseTimer
from rfork.receiver.report import transports_by_source
from rfork.receiver.runner import Transfer
from rfork.receiver.throughput import ThroughputMeter, measurable_bytes, top_rates
from rfork.schema import ForkProgress
from rfork.tracing import TraceContext, current_context, use_context

log = logger(__name__)

REPORT_INTERVAL_S = 1.0
POLL_INTERVAL_S = REPORT_INTERVAL_S / 4

OnProgress = Callable[[ForkProgress, int], None]
"""Receives the progress and the image's size in bytes, about four times a second."""


class ProgressReporter:
    """Reports of one fork: reads the progress of `transfer`, and passes it the planner's responses."""

    def __init__(
        self,
        fork_id: str,
        planner: PlannerClient,
        transfer: Transfer,
        chunk_state: ChunkState,
        timer: PhaseTimer,
        on_progress: OnProgress | None,
    ) -> None:
        self.meter = ThroughputMeter()
        self._fork_id = fork_id
        self._planner = planner
        self._transfer = transfer
        self._chunk_state = chunk_state
        self._timer = timer
        self._on_progress = on_progress
        self._done = threading.Event()
        self._latest: ForkProgress | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Report while the block runs, and once more at its end."""
        threads = [
            threading.Thread(target=partial(self._work, work, current_context()), name=name, daemon=True)
            for name, work in (("rfork-progress", self._poll), ("rfork-progress-report", self._report_to_planner))
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._done.set()
            # A planner that does not respond must not delay a finished fork.
            until = time.monotonic() + POLL_INTERVAL_S
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))

    def _work(self, work: Callable[[], None], trace: TraceContext | None) -> None:
        with use_context(trace):
            work()

    def _poll(self) -> None:
        self.meter.add(time.monotonic(), 0)
        while True:
            last = self._done.wait(POLL_INTERVAL_S)
            now = time.monotonic()
            shares = self._transfer.shares
            bytes_by_source = {share.source_id: share.verified_bytes for share in shares}
            self.meter.add(now, self._transfer.measurable_bytes, measurable_bytes(bytes_by_source))
            self._latest = progress = ForkProgress(
                verified=self._chunk_state.verified,
                bytes_read=self._transfer.bytes_read,
                bytes_per_s=self.meter.bytes_per_s,
                sources=bytes_by_source,
                source_bytes_per_s=top_rates(self.meter.source_bytes_per_s),
                link_bytes_per_s=self.meter.max_bytes_per_s,
                transports=transports_by_source(shares),
                phases={phase: round(seconds, 4) for phase, seconds in self._timer.phases.items()},
            )
            self._run_callback(progress)
            if last:
                return

    def _report_to_planner(self) -> None:
        while not self._done.wait(REPORT_INTERVAL_S):
            if self._latest is not None:
                self._send_progress(self._latest)

    def _send_progress(self, progress: ForkProgress) -> None:
        try:
            ack = self._planner.progress(self._fork_id, progress)
        except PlannerRejected as error:
            if error.problem == "unknown-fork":
                self._transfer.request_replan("the planner does not know this fork")
            else:
                log.warning("planner rejected a progress report, leases will expire", reason=str(error))
        except PlannerUnreachable as error:
            log.debug("progress not reported to the planner", reason=str(error))
        else:
            self._transfer.update_leases(ack.leases)
            if ack.replan_suggested is not None:
                self._transfer.request_replan(ack.replan_suggested)

    def _run_callback(self, progress: ForkProgress) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress, self._chunk_state.chunks.image_bytes)
        except Exception:  # the callback may fail; the planner still gets the progress
            log.exception("progress callback failed and was disabled")
            self._on_progress = None
