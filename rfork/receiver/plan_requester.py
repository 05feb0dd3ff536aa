"""Requests plans for one fork from the planner. Runs on the target.

This instance's own storage is reported only if the planner knows no source: a fork with sources never waits
for a disk. If the sources changed their weights, it is reported `no_source_timeout_s` seconds later, as they
may serve the new weights by then.

While the fork has nothing to read from, it retries a planner that does not respond, as long as that is likely
to be faster than loading from disk: an unreachable one (it restarts, or another replica replaces it) for
`MAX_PLANNER_OUTAGE_S`, a silent one once. The planner may make the fork wait for announced instances; a retry
by the same fork keeps its place.
"""

from __future__ import annotations

import time
from typing import Final, Literal

import httpx

from rfork.errors import (
    NoSource,
    PlannerRejected,
    PlannerUnreachable,
    RforkError,
    SourceWeightsChanged,
    WrongVersion,
)
from rfork.logs import logger
from rfork.peer.base import Dial
from rfork.planner_client.client import PlannerClient
from rfork.receiver.cold_start import StorageCandidates
from rfork.receiver.deadline import Deadline
from rfork.receiver.layout_diff import explain_layout_mismatch
from rfork.receiver.phase_timer import PhaseTimer
from rfork.schema import ChunkAssignment, ForkRequest, Plan, SourceFault
from rfork.settings import InstanceSettings
from rfork.source.seed import Seed

log = logger(__name__)

LAYOUT_DIFF_TIMEOUT_S = 1.0
"""Maximum time to find out why no seed fits, while other instances wait for this instance's storage."""
MAX_PLANNER_OUTAGE_S: Final = 2.0
"""Maximum planner outage before the first plan, limited by `InstanceSettings.no_source_timeout_s`. Without a
planner, this delays the fallback, plus the duration of the last call: none if connections are refused, up to
`InstanceSettings.planner_timeout_s` if nothing responds. A planner that accepts connections and is silent
costs two of these timeouts.
"""
RETRY_INTERVAL_S: Final = 0.2
REPLICA_VERSION: Final = "replica-version"
"""Type of the planner's problem if a rank's files are not of its replica's version."""
RETRYABLE_STATUSES: Final = (
    httpx.codes.TOO_MANY_REQUESTS,
    httpx.codes.BAD_GATEWAY,
    httpx.codes.SERVICE_UNAVAILABLE,
    httpx.codes.GATEWAY_TIMEOUT,
)
"""Statuses of a planner whose store is unavailable, that is overloaded, or that a proxy cannot reach."""


class PlanRequester:
    """Requests plans; see `rfork.receiver.transfer.Replan`."""

    def __init__(
        self,
        fork_id: str,
        planner: PlannerClient,
        seed: Seed,
        candidates: StorageCandidates,
        dial: Dial,
        settings: InstanceSettings,
        timer: PhaseTimer,
        deadline: Deadline,
    ) -> None:
        self._fork_id = fork_id
        self._planner = planner
        self._seed = seed
        self._candidates = candidates
        self._dial = dial
        self._settings = settings
        self._timer = timer
        self._deadline = deadline
        self.reasons: list[RforkError] = []
        """Reasons why this instance was assigned its own storage; the last one is the most specific."""
        self._compared: set[str] = set()
        self._plan_named_weights = False
        """True if the last plan with routes named the weights."""
        self._open_candidates_at = 0.0
        self._had_sources = False
        """True if any plan had sources."""

    def __call__(self, faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        """Return the planner's plan.

        Raises as `PlannerClient.request_plan`, and NoSource if all sources have other layouts.
        """
        named = self._plan_named_weights or self._seed.manifest is not None
        if named and any(fault.error == SourceWeightsChanged.__name__ for fault in faults):
            self._open_candidates_at = time.monotonic() + self._settings.no_source_timeout_s
        plan = self._request(faults, current)
        if (
            not (plan.routes or plan.storage)
            and time.monotonic() >= self._open_candidates_at
            and self._open_candidates()
        ):
            before = plan.reason
            plan = self._request((), current)
            if plan.storage:
                self.reasons.append(
                    NoSource(f"{': '.join(filter(None, (before, plan.reason)))}, for all waiting instances")
                )
        elif plan.storage and not self.reasons:
            self.reasons.append(NoSource(f"{plan.reason}, for all waiting instances"))
        self._had_sources = self._had_sources or bool(plan.routes or plan.storage)
        if plan.routes:
            self._plan_named_weights = plan.weights_id is not None
        if plan.mismatched_source is not None:
            self._explain_mismatch(plan)
        return plan

    def _request(self, faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        self._seed.storage = self._candidates.advertised
        request = ForkRequest(
            fork_id=self._fork_id, instance=self._seed.report(), faults=faults, current_assignments=current
        )
        with self._timer.phase("plan"):
            # A fork with sources continues with them, and requests a plan again later.
            try:
                if self._had_sources:
                    plan = self._planner.request_plan(request, deadline=self._deadline.monotonic_time)
                else:
                    plan = self._request_with_retry(request)
            except PlannerRejected as error:
                if error.problem != REPLICA_VERSION:
                    raise
                hint = "make the files equal on all nodes, or set the version (RFORK_VERSION)"
                raise WrongVersion(str(error), hint=hint) from None
        self._adopt_version(plan)
        return plan

    def _adopt_version(self, plan: Plan) -> None:
        """Adopt the version that the planner chose, or check that it is this instance's own.

        Raises NoSource for a plan of another version, which must not be followed.
        """
        if plan.version is None or plan.version == self._seed.version:
            return
        if not self._seed.adopts_version:
            raise NoSource(f"the plan has version {plan.version}, but this instance requires {self._seed.version}")
        log.info("version adopted from the fleet", version=plan.version, previous=self._seed.version)
        self._seed.version = plan.version

    def _request_with_retry(self, request: ForkRequest) -> Plan:
        """Request a plan until the planner responds, or was unreachable or silent for too long."""
        away_since: float | None = None
        silences, timeout_s = 0, min(MAX_PLANNER_OUTAGE_S, self._settings.no_source_timeout_s)
        while True:
            requested_at = time.monotonic()
            try:
                return self._planner.request_plan(request, deadline=self._deadline.monotonic_time)
            except (PlannerUnreachable, PlannerRejected) as error:
                now, failure = time.monotonic(), _failure_type(error)
                if failure is None or now >= self._deadline.monotonic_time:
                    raise
                if failure == "silent":
                    silences += 1
                    hopeless, pause_s = silences > 1 or not timeout_s, 0.0
                else:
                    away_since = requested_at if away_since is None else away_since
                    hopeless, pause_s = now - away_since >= timeout_s, RETRY_INTERVAL_S
                if hopeless:
                    raise
                log.info("planner unreachable, retrying", reason=str(error))
            time.sleep(min(pause_s, max(0.0, self._deadline.monotonic_time - time.monotonic())))

    def _open_candidates(self) -> bool:
        with self._timer.phase("offer"):
            return self._candidates.open()

    def _explain_mismatch(self, plan: Plan) -> None:
        other, reads = plan.mismatched_source, bool(plan.routes or plan.storage)
        if other is None or (reads and other.source_id in self._compared):
            return
        self._compared.add(other.source_id)
        timeout_s = (
            min(LAYOUT_DIFF_TIMEOUT_S, self._settings.source_idle_timeout_s)
            if reads
            else self._settings.source_idle_timeout_s
        )
        timeout_s = min(timeout_s, max(0.0, self._deadline.monotonic_time - time.monotonic()))
        difference = explain_layout_mismatch(other, self._seed.image.layout, self._dial, timeout_s)
        if not reads:
            raise difference
        self.reasons.append(difference)
        log.warning("no seed has this layout, reading from storage", detail=str(difference))


def _failure_type(error: PlannerUnreachable | PlannerRejected) -> Literal["away", "silent"] | None:
    """Return why a retry may succeed, or None if the planner refuses the request."""
    if isinstance(error, PlannerRejected):
        return "away" if error.status in RETRYABLE_STATUSES else None
    return "silent" if error.silent else "away"
