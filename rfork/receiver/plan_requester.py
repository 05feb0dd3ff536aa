"""One fork's questions to the planner. Runs on the target.

What this instance could read by itself is said only once the planner knows of nobody to read from: a
fork that has sources then never waits for a disk. Where they changed their weights it is said `timeout_s`
seconds later: by then they may give others.

As long as the fork has nothing to read from, a planner that does not answer is asked again, for so long as
disk is not the better choice: one that is away (it restarts, or another replica takes its place) for
`MAX_PLANNER_OUTAGE_S`; one that is silent once more. It may have the fork wait for others that were announced, and the same
fork asking again takes its own place among them.
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
"""Most seconds for a word on why no seed fits, while those that wait for this instance's storage wait."""
MAX_PLANNER_OUTAGE_S: Final = 2.0
"""How long a planner may be away before the first plan, or `InstanceSettings.timeout_s` if that is less. Where there
is none any more it costs so much before the fallback begins, and what the call lasts that is under way then:
nothing where connections are refused, up to `InstanceSettings.planner_timeout_s` where nothing answers at all. One
that connects and is silent costs two such timeouts."""
RETRY_INTERVAL_S: Final = 0.2
REPLICA_VERSION: Final = "replica-version"
"""The planner's problem where a rank's files are not of the version that its replica has."""
RETRYABLE_STATUSES: Final = (
    httpx.codes.TOO_MANY_REQUESTS,
    httpx.codes.BAD_GATEWAY,
    httpx.codes.SERVICE_UNAVAILABLE,
    httpx.codes.GATEWAY_TIMEOUT,
)
"""Statuses of a planner whose store is away, that has too much to do, or that a proxy does not find."""


class PlanRequester:
    """Asks for plans; see `rfork.receiver.transfer.Replan`."""

    def __init__(
        self,
        fork_id: str,
        planner: PlannerClient,
        seed: Seed,
        offers: StorageCandidates,
        dial: Dial,
        settings: InstanceSettings,
        timer: PhaseTimer,
        deadline: Deadline,
    ) -> None:
        self._fork_id = fork_id
        self._planner = planner
        self._seed = seed
        self._offers = offers
        self._dial = dial
        self._settings = settings
        self._timer = timer
        self._deadline = deadline
        self.reasons: list[RforkError] = []
        """Why this instance was sent to its own storage; the last says it best."""
        self._compared: set[str] = set()
        self._plan_named_weights = False
        """Whether the last plan with routes named the weights."""
        self._open_candidates_at = 0.0
        self._had_sources = False
        """Whether there was ever anything to read from."""

    def __call__(self, faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        """The planner's plan. Raises as `PlannerClient.ask`, and NoSource where all hold other layouts."""
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
                self.reasons.append(NoSource(f"{': '.join(filter(None, (before, plan.reason)))}, for all that wait"))
        elif plan.storage and not self.reasons:
            self.reasons.append(NoSource(f"{plan.reason}, for all that wait"))
        self._had_sources = self._had_sources or bool(plan.routes or plan.storage)
        if plan.routes:
            self._plan_named_weights = plan.weights_id is not None
        if plan.mismatched_source is not None:
            self._explain_mismatch(plan)
        return plan

    def _request(self, faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
        self._seed.storage = self._offers.advertised
        request = ForkRequest(
            fork_id=self._fork_id, instance=self._seed.report(), faults=faults, current_assignments=current
        )
        with self._timer.phase("plan"):
            # Who reads already goes on with that, and asks again by itself.
            try:
                if self._had_sources:
                    plan = self._planner.request_plan(request, deadline=self._deadline.monotonic_time)
                else:
                    plan = self._request_with_retry(request)
            except PlannerRejected as error:
                if error.problem != REPLICA_VERSION:
                    raise
                hint = "make the files equal on all nodes, or state the version (RFORK_VERSION)"
                raise WrongVersion(str(error), hint=hint) from None
        self._adopt_version(plan)
        return plan

    def _adopt_version(self, plan: Plan) -> None:
        """Take over the version that the planner chose, or check that it is this instance's own.

        Raises NoSource for a plan of another version, which must not be followed.
        """
        if plan.version is None or plan.version == self._seed.version:
            return
        if not self._seed.adopts_version:
            raise NoSource(f"the planner planned version {plan.version}, and this instance wants {self._seed.version}")
        log.info("version taken over", version=plan.version, before=self._seed.version)
        self._seed.version = plan.version

    def _request_with_retry(self, request: ForkRequest) -> Plan:
        """Ask until the planner answers, or has been away or silent for too long."""
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
                log.info("the planner is asked again", reason=str(error))
            time.sleep(min(pause_s, max(0.0, self._deadline.monotonic_time - time.monotonic())))

    def _open_candidates(self) -> bool:
        with self._timer.phase("offer"):
            return self._offers.open()

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
        log.warning("read from storage, since no seed fits", detail=str(difference))


def _failure_type(error: PlannerUnreachable | PlannerRejected) -> Literal["away", "silent"] | None:
    """Whether the same request may be answered a little later; None: the planner refuses it."""
    if isinstance(error, PlannerRejected):
        return "away" if error.status in RETRYABLE_STATUSES else None
    return "silent" if error.silent else "away"
