"""Asks the planner for a seed in a stock client's stead, until one answers.

What a client wants is known by its model's name and its rank alone: what it has built is compared by the
client itself, name by name, with what the seed gives. So all seeds of that name and rank must be of one
kind.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rfork.engines.sglang_bridge.engine import WeightInfo
from rfork.engines.sglang_bridge.identity import PREFIX, TRANSPORT, client_report
from rfork.errors import (
    LayoutMismatch,
    LeaseRejected,
    NetworkError,
    NoSource,
    PlannerUnreachable,
    RforkError,
    SourceBusy,
    SourceError,
)
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkRequest, ForkResult, InstanceReport, Plan, Route, SourceFault
from rfork.settings import InstanceSettings

RETRY_INTERVAL_S: Final = 0.5
"""When to ask again where the planner does not say."""

FetchInfo = Callable[[Route, int], WeightInfo]
"""Gets the info of a rank from the route's source, by the route's lease; raises SourceError or
LeaseRejected.
"""

log = logger("rfork.sidecar.client")


@dataclass(frozen=True)
class SeedGrant:
    """A seed that a client may read from, and the client's own side of that fork."""

    fork_id: str
    target: InstanceReport
    route: Route
    info: WeightInfo


class SeedSelector:
    """Gets leases on seeds of `model`. Waits at most `seed_wait_timeout_s` for a place, and `settings.patience_s` where
    nobody gives the rank at all; `stopping` ends every wait.
    """

    def __init__(
        self, planner: PlannerClient, fetch: FetchInfo, settings: InstanceSettings, *, model: str, wait_s: float,
        stopping: threading.Event,
    ) -> None:  # fmt: skip
        self._planner = planner
        self._fetch = fetch
        self._settings = settings
        self._model = model
        self._wait_s = wait_s
        self._stopping = stopping

    def acquire(self, rank: int, avoided: str | None) -> SeedGrant:
        """A seed of this rank that has a place and answers; if there are others, not the one to be
        `avoided`.

        Raises NoSource, LayoutMismatch (seeds of several kinds), SourceBusy (no place, or several versions
        of the weights), or what kept the planner or the seeds from answering for so long.
        """
        fork_id, began = secrets.token_hex(16), time.monotonic()
        faults = () if avoided is None else (_fault(avoided, SourceBusy("its reader did not come up")),)
        target: InstanceReport | None = None
        while True:
            problem: RforkError
            wait_s, max_wait_s = RETRY_INTERVAL_S, self._wait_s
            try:
                target = client_report(self._settings, self._seed(rank), fork_id)
                plan = self._planner.request_plan(ForkRequest(fork_id=fork_id, instance=target, faults=faults))
                avoiding, faults = bool(faults), ()
                if plan.routes:
                    route = plan.routes[0]
                    try:
                        return SeedGrant(fork_id, target, route, self._fetch(route, rank))
                    except SourceError as error:
                        log.warning("seed did not answer", rank=rank, source=route.source_id, reason=str(error))
                        faults, problem = (_fault(route.source_id, error),), error
                elif avoiding:
                    continue  # then from the one that was to be avoided
                else:
                    problem, wait_s, max_wait_s = self._no_route(plan)
            except NoSource as error:
                problem, max_wait_s = error, self._settings.no_source_timeout_s
            except (PlannerUnreachable, LeaseRejected, SourceBusy) as error:
                problem = error
            except RforkError:
                self._withdraw(fork_id, target)
                raise
            left_s = began + max_wait_s - time.monotonic()
            if left_s <= 0 or self._stopping.wait(min(wait_s, left_s)):
                self._withdraw(fork_id, target)
                raise problem

    def release(self, fork_id: str, target: InstanceReport, finish: ForkResult) -> None:
        """End a fork at the planner, and its target with it, which serves nobody."""
        try:
            self._planner.finish(fork_id, finish)
            self._planner.remove(target.instance_id)
        except NetworkError as error:
            # A lease that nobody renews lapses by itself.
            log.warning("lease not given back", fork_id=fork_id, reason=str(error))

    def _seed(self, rank: int) -> InstanceReport:
        """One of the seeds of this rank, to ask for what it is one of."""
        views = self._planner.instances(model=PREFIX + self._model, state="serving")
        wanted = self._settings.version
        reports = [
            view.report for view in views if TRANSPORT in view.report.transports and wanted in (None, view.version)
        ]
        found = {(report.rank.key, report.layout_id): report for report in reports if report.rank.tp == rank}
        if not found:
            ranks = sorted({report.rank.tp for report in reports})
            available = f"only ranks {ranks} are given" if ranks else "none is given"
            raise NoSource(f"no stock seed of model {self._model} gives rank {rank}: {available}")
        if len(found) > 1:
            names = " and ".join(sorted(report.instance_id for report in found.values()))
            raise LayoutMismatch(
                f"stock seeds of model {self._model} give rank {rank} in {len(found)} layouts: dtype, "
                f"quantisation or parallel sizes differ between {names}",
                hint="give each kind a name of its own (rfork sidecar --model)",
            )
        if len({(report.version, report.weights_id) for report in reports}) > 1:
            # The ranks of one client ask one by one: each could get another.
            raise SourceBusy(f"stock seeds of model {self._model} hold several versions of its weights")
        return next(iter(found.values()))

    def _no_route(self, plan: Plan) -> tuple[RforkError, float, float]:
        """A plan without a route: what to say of it, when to ask again, and how long that is any use."""
        if plan.retry_after_s is not None:
            return SourceBusy(f"no seed has a place: {plan.reason}"), plan.retry_after_s, self._wait_s
        return NoSource(plan.reason), RETRY_INTERVAL_S, self._settings.no_source_timeout_s

    def _withdraw(self, fork_id: str, target: InstanceReport | None) -> None:
        """Nothing came of it."""
        if target is not None:
            finish = ForkResult(outcome="failed", seconds=0.0, bytes_read=0, reasons=("no seed was got",))
            self.release(fork_id, target, finish)


def _fault(source_id: str, error: SourceError) -> SourceFault:
    return SourceFault(instance_id=source_id, fault=error.fault, error=error.kind, detail=str(error))
