"""Heartbeat: a daemon thread that reports an instance to the planner.

Runs in an inference instance. On a separate thread, so that a cold start that blocks the main thread for
minutes does not make the planner drop the instance. An unreachable planner is not an error: the heartbeat
continues, and the first successful report restores the registration.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final

from rfork.errors import NetworkError, PlannerRejected, RforkError
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.planner_clock import MAX_SKEW_S, PlannerClock
from rfork.planner_client.rest import RETRYABLE_STATUSES
from rfork.schema import InstanceAck, InstanceReport

FIRST_RETRY_S: Final = 0.25
DEFAULT_INTERVAL_S: Final = 5.0
MIN_INTERVAL_S: Final = 0.1
SAFETY_FACTOR: Final = 0.8
REMIND_S: Final = 60.0
STOP_S: Final = 1.0
"""Time for the last calls of an exiting instance; otherwise the planner removes it after a timeout."""


class Heartbeat:
    """Sends `report()` to the planner immediately, on each `send_now()`, and at the planner's interval.

    `report` and `on_ack` are called on the heartbeat's thread. The planner sets the interval in each response.
    `retry_s` is the first pause after a failure, doubled up to that interval; `min_interval_s` is the minimum
    time between two reports, which merges many `send_now()` calls.
    """

    def __init__(
        self,
        client: PlannerClient,
        report: Callable[[], InstanceReport],
        on_ack: Callable[[InstanceAck], None],
        *,
        instance_id: str | None = None,
        retry_s: float = FIRST_RETRY_S,
        min_interval_s: float = MIN_INTERVAL_S,
        remind_s: float = REMIND_S,
        clock: PlannerClock | None = None,
    ) -> None:
        """`instance_id`: instance that the planner may know before the first report, from a fork request.

        `remind_s`: interval at which a persistent rejection is logged. `clock` is updated with the planner's
        time from each acknowledgement.
        """
        self._client = client
        self._report = report
        self._on_ack = on_ack
        self._retry_s = retry_s
        self._min_interval_s = min_interval_s
        self._interval_s = DEFAULT_INTERVAL_S
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._send_immediately = threading.Event()  # if set, the next report is sent without delay
        self._connected = threading.Event()
        self._changed = threading.Condition()
        self._sent = self._acked = 0  # numbers of the last report created and the last acknowledged
        self._failures = 0
        self._remind_s = remind_s
        self._clock = clock or PlannerClock()
        self._skewed = False
        self._refusal: tuple[str, float] | None = None  # last logged problem and its time
        self._instance_id = instance_id
        self._log = logger("rfork.heartbeat")
        self._thread = threading.Thread(target=self._run, name="rfork-heartbeat", daemon=True)

    @property
    def is_registered(self) -> bool:
        """True if the last report succeeded."""
        return self._connected.is_set()

    def start(self) -> None:
        """Start the thread; the first report is sent immediately."""
        self._thread.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until a report has succeeded; return False after `timeout_s`."""
        return self._connected.wait(timeout_s)

    def send_now(self) -> None:
        """Request a report soon, because something changed. Never blocks."""
        self._wake.set()

    def wait_acked(self, timeout_s: float) -> bool:
        """Send a report now and wait for its acknowledgement; return False after `timeout_s`.

        Returns False immediately if the planner is unreachable; the heartbeat continues to retry.
        """
        with self._changed:
            expected = self._sent + 1
            self._send_immediately.set()
            self.send_now()
            self._changed.wait_for(lambda: self._failures or self._acked >= expected, timeout_s)
            return self._acked >= expected

    def stop(self, *, remove: bool, within_s: float = STOP_S) -> None:
        """Stop the thread and, with `remove`, remove this instance from the planner. Safe to call twice.

        Takes at most `within_s` seconds: a report in progress may use half of them, and is then aborted when
        the client is closed. An unreachable planner is logged.
        """
        deadline = time.monotonic() + within_s
        first = not self._stopping.is_set()
        self._stopping.set()
        self._send_immediately.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(within_s / 2)
        if not (first and remove and self._instance_id and self._thread.ident is not None):
            return
        try:
            self._client.remove(self._instance_id, deadline=deadline)
        except NetworkError as error:
            # The planner removes a silent instance after a timeout.
            self._log.warning("instance not removed from the planner", instance_id=self._instance_id, reason=str(error))

    def _run(self) -> None:
        while not self._stopping.is_set():
            sent_at = time.monotonic()
            try:
                self._send()
            except Exception:
                # Top level of the thread: one report that cannot be created must not stop the heartbeat.
                self._fail()
                self._log.exception("heartbeat failed")
            if self._failures:
                # send_now() does not shorten this pause, to protect an overloaded planner.
                self._stopping.wait(self._backoff_s())
            else:
                self._wake.wait(self._interval_s * SAFETY_FACTOR)
                self._send_immediately.wait(max(0.0, self._min_interval_s - (time.monotonic() - sent_at)))
            # Cleared before the report is created, so that a later send_now() causes another report.
            self._wake.clear()
            self._send_immediately.clear()

    def _fail(self) -> None:
        self._connected.clear()
        with self._changed:
            self._failures += 1
            self._changed.notify_all()

    def _backoff_s(self) -> float:
        pause_s = min(self._retry_s * 2.0 ** min(self._failures - 1, 16), self._interval_s)
        # Jitter keeps a fleet from retrying in step.
        return pause_s * random.uniform(0.5, 1.0)

    def _compare_clocks(self, ack: InstanceAck, sent_at: float) -> None:
        if ack.unix_s is None:
            return
        self._clock.record(ack.unix_s, sent_at, time.monotonic())
        skew_s = self._clock.skew_s or 0.0
        skewed = abs(skew_s) > MAX_SKEW_S
        if skewed and not self._skewed:
            self._log.warning(
                "clock differs from the planner's",
                ahead_s=round(skew_s, 1),
                hint="synchronise the clocks (NTP); leases are checked against the planner's time",
            )
        elif self._skewed and not skewed:
            self._log.info("clock agrees with the planner's again")
        self._skewed = skewed

    def _log_refusal(self, error: PlannerRejected) -> None:
        """Log a rejection when it begins, when its cause changes, and every `remind_s` while it lasts."""
        now = time.monotonic()
        if self._refusal is not None:
            problem, logged_at = self._refusal
            if problem == error.problem and now - logged_at < self._remind_s:
                return
        self._refusal = error.problem, now
        self._log.warning(
            "planner rejects this instance: forks cannot find it",
            planner=self._client.url,
            status=error.status,
            problem=error.problem,
            reason=str(error),
            hint=error.hint,
        )

    def _send(self) -> None:
        try:
            with self._changed:
                self._sent += 1
                number = self._sent
            report = self._report()
            self._instance_id = report.instance_id
            sent_at = time.monotonic()
            ack = self._client.report(report)
            self._compare_clocks(ack, sent_at)
        except RforkError as error:
            if self._stopping.is_set():
                return  # the report is no longer needed
            if isinstance(error, PlannerRejected) and error.status not in RETRYABLE_STATUSES:
                self._log_refusal(error)
            elif self._failures == 0:
                self._log.warning("planner unreachable, retrying", planner=self._client.url, reason=str(error))
            self._fail()
            return
        if self._failures:
            self._log.info("planner reachable again", planner=self._client.url, missed=self._failures)
        self._failures = 0
        self._refusal = None
        self._interval_s = max(ack.heartbeat_s, self._min_interval_s)
        # Call on_ack first, so that a thread waiting for the connection finds the lease keys in place.
        self._on_ack(ack)
        self._connected.set()
        with self._changed:
            self._acked = number
            self._changed.notify_all()
