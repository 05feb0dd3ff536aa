"""Requests a seed from the planner for a stock client until one responds.

Only the model's name and rank of a client are known. The client itself compares what it has built with the
seed's info, name by name. So all seeds of one name and rank must have the same layout.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rfork.engines.sglang_bridge.engine import WeightInfo
from rfork.engines.sglang_bridge.identity import STOCK_PREFIX, STOCK_TRANSPORT, client_report
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
"""Retry interval if the planner sets none."""

FetchInfo = Callable[[Route, int], WeightInfo]
"""Fetches the weight info of a rank from the route's source with the route's lease. Raises SourceError or
LeaseRejected.
"""

log = logger("rfork.sidecar.client")


@dataclass(frozen=True)
class SeedGrant:
    """A seed that a client may read from, and the client's side of that fork."""

    fork_id: str
    target: InstanceReport
    route: Route
    info: WeightInfo


class SeedSelector:
    """Acquires leases on seeds of `model`.

    Waits at most `wait_s` for a free reader slot, and `settings.no_source_timeout_s` if no instance serves
    the rank. `stopping` ends every wait.
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
        """Return a seed of this rank that has a free reader slot and responds, preferably not the one to be `avoided`.

        Raises NoSource, LayoutMismatch (the seeds have several layouts), SourceBusy (no free slot, or several
        versions of the weights), or the last error of the planner or the seeds.
        """
        fork_id, began = secrets.token_hex(16), time.monotonic()
        faults = () if avoided is None else (_fault(avoided, SourceBusy("its reader did not start")),)
        target: InstanceReport | None = None
        while True:
            problem: RforkError
            wait_s, max_wait_s = RETRY_INTERVAL_S, self._wait_s
            try:
                target = client_report(self._settings, self._seed(rank), fork_id)
                plan = self._planner.request_plan(ForkRequest(fork_id=fork_id, instance=target, faults=faults))
                is_avoiding, faults = bool(faults), ()
                if plan.routes:
                    route = plan.routes[0]
                    try:
                        return SeedGrant(fork_id, target, route, self._fetch(route, rank))
                    except SourceError as error:
                        log.warning(
                            "seed failed, requesting another", rank=rank, source=route.source_id, reason=str(error)
                        )
                        faults, problem = (_fault(route.source_id, error),), error
                elif is_avoiding:
                    continue  # no other seed: use the one to be avoided
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
        """Finish a fork at the planner and remove its target, which serves no readers."""
        try:
            self._planner.finish(fork_id, finish)
            self._planner.remove(target.instance_id)
        except NetworkError as error:
            # A lease that is not renewed expires automatically.
            log.warning("lease not released, it expires by itself", fork_id=fork_id, reason=str(error))

    def _seed(self, rank: int) -> InstanceReport:
        """Return one seed of this rank as the template of the request."""
        views = self._planner.instances(model=STOCK_PREFIX + self._model, state="serving")
        wanted = self._settings.version
        reports = [
            view.report
            for view in views
            if STOCK_TRANSPORT in view.report.transports and wanted in (None, view.version)
        ]
        found = {(report.rank.key, report.layout_id): report for report in reports if report.rank.tp == rank}
        if not found:
            ranks = sorted({report.rank.tp for report in reports})
            available = f"only ranks {ranks} are served" if ranks else "no rank is served"
            raise NoSource(f"no SGLang seed of model {self._model} serves rank {rank}: {available}")
        if len(found) > 1:
            names = " and ".join(sorted(report.instance_id for report in found.values()))
            raise LayoutMismatch(
                f"SGLang seeds of model {self._model} serve rank {rank} in {len(found)} layouts: dtype, "
                f"quantisation or parallel sizes differ between {names}",
                hint="use a separate model name for each layout (rfork sidecar --model)",
            )
        if len({(report.version, report.weights_id) for report in reports}) > 1:
            # A client requests its ranks one by one, so each could get another version.
            raise SourceBusy(f"SGLang seeds of model {self._model} serve several versions of its weights")
        return next(iter(found.values()))

    def _no_route(self, plan: Plan) -> tuple[RforkError, float, float]:
        """Return the error for a plan without routes, the retry delay, and the maximum wait."""
        if plan.retry_after_s is not None:
            return SourceBusy(f"no seed has a free reader slot: {plan.reason}"), plan.retry_after_s, self._wait_s
        return NoSource(plan.reason), RETRY_INTERVAL_S, self._settings.no_source_timeout_s

    def _withdraw(self, fork_id: str, target: InstanceReport | None) -> None:
        """Report a fork that did not get a seed."""
        if target is not None:
            finish = ForkResult(outcome="failed", seconds=0.0, bytes_read=0, reasons=("no seed acquired",))
            self.release(fork_id, target, finish)


def _fault(source_id: str, error: SourceError) -> SourceFault:
    return SourceFault(instance_id=source_id, fault=error.fault, error=error.kind, detail=str(error))
