"""Leases of a stock client: selects a seed for each rank and renews its lease until the client has read.

A stock client sends one request per rank, waits for the response, reads without further messages, and exits
if there is no response. So the sidecar acquires the lease for it and renews it, and releases it once the
engine next to the sidecar is healthy or after `max_lease_s`. Nothing is verified, and the planner is informed
of that.

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
from rfork.engines.sglang_bridge.identity import SINGLE_CHUNK, STOCK_PREFIX, STOCK_TRANSPORT, client_report
from rfork.errors import (
    LayoutMismatch,
    LeaseRejected,
    NetworkError,
    NoSource,
    PlannerRejected,
    PlannerUnreachable,
    RforkError,
    SourceBusy,
    SourceError,
)
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.schema import (
    ChunkAssignment,
    ForkProgress,
    ForkRequest,
    ForkResult,
    InstanceReport,
    Lease,
    Outcome,
    Plan,
    Route,
    SourceFault,
)
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


SEED_WAIT_TIMEOUT_S: Final = 60.0
"""Time that a client waits for a seed with a free reader slot."""
MAX_LEASE_S: Final = 600.0
"""Time for which a client's lease is renewed while its engine is not healthy."""
RENEWALS_PER_TTL: Final = 3
"""Number of renewals of a lease within its time to live."""
POLL_INTERVAL_S: Final = 1.0
"""Interval at which the leases are checked."""
UNKNOWN_PROGRESS: Final = ForkProgress(verified=(), bytes_read=0, bytes_per_s=0.0)
"""Progress reported for a read that cannot be observed."""
STOPPED_REASON: Final = "the sidecar was stopped"
UNVERIFIED_REASON: Final = "read by an SGLang client, not verified: only the health of its engine is known"


@dataclass
class ClientLease:
    """Lease for one rank of the client. Times are monotonic."""

    grant: SeedGrant
    began_at: float
    was_healthy: bool
    """True if the engine was healthy before the lease, so that its health proves nothing about this read."""
    renew_at: float
    expires_at: float
    planner_restarted: bool = False
    """True if the planner has restarted since and may not know the seed yet."""

    @property
    def source_id(self) -> str:
        """The seed's instance_id."""
        return self.grant.route.source_id

    def record_renewal(self, lease: Lease) -> None:
        """Record a lease that the planner has just issued."""
        now = time.monotonic()
        self.renew_at = now + lease.expires_in_s / RENEWALS_PER_TTL
        self.expires_at = now + lease.expires_in_s
        self.planner_restarted = False


class _UnknownSeed(Exception):
    """The planner does not know the seed yet."""


class LeaseManager:
    """Assigns seeds of `model` to the ranks of one client. Thread-safe. `stop` releases all leases.

    `engine_up` returns True while the client's own engine is healthy; None if that is unknown.
    """

    def __init__(
        self, planner: PlannerClient, fetch: FetchInfo, settings: InstanceSettings, *, model: str,
        wait_s: float, max_lease_s: float, engine_up: Callable[[], bool] | None,
    ) -> None:  # fmt: skip
        self._planner = planner
        self._max_lease_s = max_lease_s
        self._engine_up = engine_up or (lambda: False)
        self._client_leases: dict[int, ClientLease] = {}
        self._rank_locks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._selector = SeedSelector(planner, fetch, settings, model=model, wait_s=wait_s, stopping=self._stopping)
        self._thread = threading.Thread(target=self._run, name="rfork-sidecar-leases", daemon=True)

    def start(self) -> None:
        """Start renewing leases."""
        self._thread.start()

    def weight_info_for(self, rank: int) -> WeightInfo:
        """Return the weight info of a seed for this rank and keep its lease.

        Raises the errors of `SeedSelector.acquire`.
        """
        with self._lock:
            rank_lock = self._rank_locks.setdefault(rank, threading.Lock())
        with rank_lock:
            with self._lock:
                previous = self._client_leases.pop(rank, None)
            if previous is not None:
                self._report_end(
                    previous,
                    "interrupted",
                    "the client sent another request: its engine did not start with the weights it read",
                )
            was_healthy = self._engine_up()
            grant = self._selector.acquire(rank, previous.source_id if previous is not None else None)
            now = time.monotonic()
            client_lease = ClientLease(grant, now, was_healthy, now, now)
            client_lease.record_renewal(grant.route.lease)
            with self._lock:
                stopped = self._stopping.is_set()
                if not stopped:
                    self._client_leases[rank] = client_lease
            if stopped:  # `stop` has released the other leases
                self._report_end(client_lease, "interrupted", STOPPED_REASON)
                raise SourceBusy(STOPPED_REASON)
        log.info(
            "seed assigned to SGLang client", rank=rank, source=grant.route.source_id,
            session=grant.info.session, image_bytes=grant.info.image_bytes, fork_id=grant.fork_id,
        )  # fmt: skip
        return grant.info

    def poll(self) -> None:
        """Renew the leases and release those that are no longer needed."""
        with self._lock:
            client_leases = list(self._client_leases.items())
        # Query the engine after the leases are listed: a lease newer than the response must not be released.
        now, is_healthy = time.monotonic(), self._engine_up()
        for rank, client_lease in client_leases:
            if is_healthy and not client_lease.was_healthy:
                self._release(rank, client_lease, "forked", UNVERIFIED_REASON)
            elif now - client_lease.began_at >= self._max_lease_s:
                reason = f"the client's engine was not healthy within {self._max_lease_s:g} s"
                self._release(rank, client_lease, "interrupted", reason)
            elif now >= client_lease.renew_at:
                self._renew(rank, client_lease)

    def stop(self) -> None:
        """Release all leases and end all waits."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            client_leases = list(self._client_leases.items())
        for rank, client_lease in client_leases:
            self._release(rank, client_lease, "interrupted", STOPPED_REASON)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_INTERVAL_S):
            try:
                self.poll()
            except Exception:  # top level of the thread: one failed poll must not end it
                log.exception("failed to check the leases of SGLang clients, retrying")

    def _renew(self, rank: int, client_lease: ClientLease) -> None:
        try:
            lease = self._request_renewal(client_lease)
        except (PlannerUnreachable, _UnknownSeed) as error:
            log.warning("lease not renewed", rank=rank, source=client_lease.source_id, reason=str(error))
            return
        if lease is None:
            reason = "the seed left or changed its weights while they may have been read"
            log.error(
                "SGLang client may have a mixture of old and new weights",
                rank=rank,
                source=client_lease.source_id,
                reason=reason,
            )
            self._release(rank, client_lease, "failed", reason)
        else:
            client_lease.record_renewal(lease)

    def _request_renewal(self, client_lease: ClientLease) -> Lease | None:
        """Return a new lease on the same seed, or None if the planner refuses.

        Raises PlannerUnreachable or _UnknownSeed; the current lease then stays valid until it expires.
        """
        fork_id, source_id = client_lease.grant.fork_id, client_lease.source_id
        if not client_lease.planner_restarted:
            try:
                return self._planner.progress(fork_id, UNKNOWN_PROGRESS).leases.get(source_id)
            except PlannerRejected as error:
                if error.problem != "unknown-fork":
                    log.warning("planner refused to renew a lease", fork_id=fork_id, reason=str(error))
                    return None
            client_lease.planner_restarted = True
        # The planner has restarted: report the current assignment again. Check the seed's registration first,
        # because the plan request finds a seed that reports in between.
        is_registered = self._is_registered(source_id)
        assignments = (ChunkAssignment(source_id=source_id, chunks=SINGLE_CHUNK),)
        request = ForkRequest(fork_id=fork_id, instance=client_lease.grant.target, current_assignments=assignments)
        try:
            routes = self._planner.request_plan(request).routes
        except PlannerRejected as error:
            log.warning("planner refused to renew a lease", fork_id=fork_id, reason=str(error))
            client_lease.planner_restarted = False
            return None
        expected = (source_id, client_lease.grant.route.generation)
        leases = [route.lease for route in routes if (route.source_id, route.generation) == expected]
        if not leases and not is_registered and time.monotonic() < client_lease.expires_at:
            raise _UnknownSeed("the planner has restarted and does not know the seed yet")
        return leases[0] if leases else None

    def _is_registered(self, source_id: str) -> bool:
        """Return True if the seed has reported to the planner. Raises PlannerUnreachable."""
        try:
            self._planner.instance(source_id)
        except PlannerRejected as error:
            return error.problem != "unknown-instance"
        return True

    def _release(self, rank: int, client_lease: ClientLease, outcome: Outcome, reason: str) -> None:
        """Release a lease, unless it has been released or replaced already."""
        with self._lock:
            if self._client_leases.get(rank) is not client_lease:
                return
            del self._client_leases[rank]
        self._report_end(client_lease, outcome, reason)

    def _report_end(self, client_lease: ClientLease, outcome: Outcome, reason: str) -> None:
        target = client_lease.grant.target
        result = ForkResult(
            outcome=outcome,
            seconds=time.monotonic() - client_lease.began_at,
            bytes_read=target.image_bytes if outcome == "forked" else 0,
            reasons=(reason,),
        )
        log.info("lease released", source=client_lease.source_id, outcome=outcome, reason=reason)
        self._selector.release(client_lease.grant.fork_id, target, result)
