"""One fork's questions to the planner. Runs on the target.

What this instance could read by itself is said only once the planner knows of nobody to read from: a
fork that has sources then never waits for a disk. Where they changed their weights it is said `patience_s`
seconds later: by then they may give others.

As long as the fork has nothing to read from, a planner that does not answer is asked again, for so long as
disk is not the better choice: one that is away (it restarts, or another replica takes its place) for
`AWAY_S`; one that is silent once more. It may have the fork wait for others that were announced, and the same
fork asking again takes its own place among them.
"""

from __future__ import annotations

import time
from typing import Final, Literal

import httpx

from rfork.control.client import PlannerClient
from rfork.errors import (
    NoSource,
    PlannerRefused,
    PlannerUnreachable,
    RforkError,
    SourceChanged,
    WrongVersion,
)
from rfork.fork.cold import Offers
from rfork.fork.deadline import Deadline
from rfork.fork.explain import explain_mismatch
from rfork.fork.stopwatch import Stopwatch
from rfork.logs import logger
from rfork.peer.base import Dial
from rfork.seed.seed import Seed
from rfork.settings import Settings
from rfork.wire import ForkRequest, Plan, Share, SourceFault

log = logger(__name__)

COMPARE_S = 1.0
"""Most seconds for a word on why no seed fits, while those that wait for this instance's storage wait."""
AWAY_S: Final = 2.0
"""How long a planner may be away before the first plan, or `Settings.patience_s` if that is less. Where there
is none any more it costs so much before the fallback begins, and what the call lasts that is under way then:
nothing where connections are refused, up to `Settings.planner_timeout_s` where nothing answers at all. One
that connects and is silent costs two such timeouts."""
PAUSE_S: Final = 0.2
REPLICA_VERSION: Final = "replica-version"
"""The planner's problem where a rank's files are not of the version that its replica has."""
AWAY: Final = (
    httpx.codes.TOO_MANY_REQUESTS,
    httpx.codes.BAD_GATEWAY,
    httpx.codes.SERVICE_UNAVAILABLE,
    httpx.codes.GATEWAY_TIMEOUT,
)
"""Statuses of a planner whose store is away, that has too much to do, or that a proxy does not find."""


class Asking:
    """Asks for plans; see `rfork.fork.puller.Replan`."""

    def __init__(
        self,
        fork_id: str,
        planner: PlannerClient,
        seed: Seed,
        offers: Offers,
        dial: Dial,
        settings: Settings,
        watch: Stopwatch,
        deadline: Deadline,
    ) -> None:
        self._fork_id = fork_id
        self._planner = planner
        self._seed = seed
        self._offers = offers
        self._dial = dial
        self._settings = settings
        self._watch = watch
        self._deadline = deadline
        self.reasons: list[RforkError] = []
        """Why this instance was sent to its own storage; the last says it best."""
        self._compared: set[str] = set()
        self._named = False
        """Whether the last plan with routes named the weights."""
        self._open_from = 0.0
        self._planned = False
        """Whether there was ever anything to read from."""

    def __call__(self, faults: tuple[SourceFault, ...], current: tuple[Share, ...]) -> Plan:
        """The planner's plan. Raises as `PlannerClient.ask`, and NoSource where all hold other layouts."""
        named = self._named or self._seed.manifest is not None
        if named and any(fault.error == SourceChanged.__name__ for fault in faults):
            self._open_from = time.monotonic() + self._settings.patience_s
        plan = self._ask(faults, current)
        if not (plan.routes or plan.storage) and time.monotonic() >= self._open_from and self._open():
            before = plan.reason
            plan = self._ask((), current)
            if plan.storage:
                self.reasons.append(
                    NoSource(f"{': '.join(filter(None, (before, plan.reason)))}, for all that wait")
                )
        elif plan.storage and not self.reasons:
            self.reasons.append(NoSource(f"{plan.reason}, for all that wait"))
        self._planned = self._planned or bool(plan.routes or plan.storage)
        if plan.routes:
            self._named = plan.weights_id is not None
        if plan.other_layout is not None:
            self._explain(plan)
        return plan

    def _ask(self, faults: tuple[SourceFault, ...], current: tuple[Share, ...]) -> Plan:
        self._seed.storage = self._offers.told
        request = ForkRequest(
            fork_id=self._fork_id, instance=self._seed.report(), faults=faults, current=current
        )
        with self._watch.phase("plan"):
            # Who reads already goes on with that, and asks again by itself.
            try:
                if self._planned:
                    plan = self._planner.ask(request, deadline=self._deadline.at)
                else:
                    plan = self._ask_patiently(request)
            except PlannerRefused as error:
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
        if not self._seed.takes_any_version:
            raise NoSource(
                f"the planner planned version {plan.version}, and this instance wants {self._seed.version}"
            )
        log.info("version taken over", version=plan.version, before=self._seed.version)
        self._seed.version = plan.version

    def _ask_patiently(self, request: ForkRequest) -> Plan:
        """Ask until the planner answers, or has been away or silent for too long."""
        away_since: float | None = None
        silences, patience_s = 0, min(AWAY_S, self._settings.patience_s)
        while True:
            asked_at = time.monotonic()
            try:
                return self._planner.ask(request, deadline=self._deadline.at)
            except (PlannerUnreachable, PlannerRefused) as error:
                now, failure = time.monotonic(), _failure(error)
                if failure is None or now >= self._deadline.at:
                    raise
                if failure == "silent":
                    silences += 1
                    hopeless, pause_s = silences > 1 or not patience_s, 0.0
                else:
                    away_since = asked_at if away_since is None else away_since
                    hopeless, pause_s = now - away_since >= patience_s, PAUSE_S
                if hopeless:
                    raise
                log.info("the planner is asked again", because=str(error))
            time.sleep(min(pause_s, max(0.0, self._deadline.at - time.monotonic())))

    def _open(self) -> bool:
        with self._watch.phase("offer"):
            return self._offers.open()

    def _explain(self, plan: Plan) -> None:
        other, reads = plan.other_layout, bool(plan.routes or plan.storage)
        if other is None or (reads and other.source_id in self._compared):
            return
        self._compared.add(other.source_id)
        patience_s = min(COMPARE_S, self._settings.stall_s) if reads else self._settings.stall_s
        patience_s = min(patience_s, max(0.0, self._deadline.at - time.monotonic()))
        difference = explain_mismatch(other, self._seed.image.layout, self._dial, patience_s)
        if not reads:
            raise difference
        self.reasons.append(difference)
        log.warning("read from storage, since no seed fits", detail=str(difference))


def _failure(error: PlannerUnreachable | PlannerRefused) -> Literal["away", "silent"] | None:
    """Whether the same request may be answered a little later; None: the planner refuses it."""
    if isinstance(error, PlannerRefused):
        return "away" if error.status in AWAY else None
    return "silent" if error.silent else "away"
