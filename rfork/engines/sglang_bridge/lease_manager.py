"""Leases of a stock client: selects a seed for each rank and renews its lease until the client has read.

A stock client sends one request per rank, waits for the response, reads without further messages, and exits
if there is no response. So the sidecar keeps the lease for it and renews it, and returns it once the engine
next to the sidecar is healthy or after `max_lease_s`. Nothing is verified, and the planner is informed of
that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rfork.engines.sglang_bridge.engine import WeightInfo
from rfork.engines.sglang_bridge.identity import SINGLE_CHUNK
from rfork.engines.sglang_bridge.seed_selector import FetchInfo, SeedGrant, SeedSelector
from rfork.errors import PlannerRejected, PlannerUnreachable, SourceBusy
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.schema import ChunkAssignment, ForkProgress, ForkRequest, ForkResult, Lease
from rfork.schema.types import Outcome
from rfork.settings import InstanceSettings

SEED_WAIT_TIMEOUT_S: Final = 60.0
"""Time that a client waits for a seed with a free reader slot."""
MAX_LEASE_S: Final = 600.0
"""Time for which a client's lease is renewed while its engine is not healthy."""
RENEWALS: Final = 3
"""Renewals of a lease within its time to live."""
POLL_INTERVAL_S: Final = 1.0
"""Seconds between two polls of the leases."""
UNKNOWN_PROGRESS: Final = ForkProgress(verified=(), bytes_read=0, bytes_per_s=0.0)
"""Progress reported for a read that cannot be observed."""
STOPPED_REASON: Final = "the sidecar was stopped"
UNVERIFIED_REASON: Final = "read by a stock client, not verified: only the health of its engine is known"

log = logger("rfork.sidecar.client")


class _UnknownSeed(Exception):
    """The planner does not know the seed yet."""


@dataclass
class ClientLease:
    """Lease for one rank of the client."""

    grant: SeedGrant
    began: float
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
        self.renew_at, self.expires_at = now + lease.expires_in_s / RENEWALS, now + lease.expires_in_s
        self.planner_restarted = False


class LeaseManager:
    """Assigns seeds of `model` to the ranks of one client. Thread-safe. `stop` returns all leases.

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
        self._changing = threading.Lock()
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
        with self._changing:
            rank_lock = self._rank_locks.setdefault(rank, threading.Lock())
        with rank_lock:
            before = self._pop_lease(rank)
            if before is not None:
                self._end(
                    before,
                    "interrupted",
                    "the client sent another request: its engine did not start with the weights it read",
                )
            was_healthy = self._engine_up()
            grant = self._selector.acquire(rank, before.source_id if before is not None else None)
            now = time.monotonic()
            client_lease = ClientLease(grant, now, was_healthy, now, now)
            client_lease.record_renewal(grant.route.lease)
            with self._changing:
                stopped = self._stopping.is_set()
                if not stopped:
                    self._client_leases[rank] = client_lease
            if stopped:  # `stop` has returned the other leases
                self._end(client_lease, "interrupted", STOPPED_REASON)
                raise SourceBusy(STOPPED_REASON)
        log.info(
            "seed assigned to stock client", rank=rank, source=grant.route.source_id,
            session=grant.info.session, image_bytes=grant.info.image_bytes, fork_id=grant.fork_id,
        )  # fmt: skip
        return grant.info

    def poll(self) -> None:
        """Renew the leases and return those that are no longer needed."""
        with self._changing:
            client_leases = list(self._client_leases.items())
        # Query the engine after the leases are listed: a lease newer than the response must not be returned.
        now, is_healthy = time.monotonic(), self._engine_up()
        for rank, each in client_leases:
            if is_healthy and not each.was_healthy:
                self._release(rank, each, "forked", UNVERIFIED_REASON)
            elif now - each.began >= self._max_lease_s:
                reason = f"the client's engine was not healthy within {self._max_lease_s:g} s"
                self._release(rank, each, "interrupted", reason)
            elif now >= each.renew_at:
                self._renew(rank, each)

    def stop(self) -> None:
        """Return all leases and end all waits."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._changing:
            client_leases = list(self._client_leases.items())
        for rank, each in client_leases:
            self._release(rank, each, "interrupted", STOPPED_REASON)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_INTERVAL_S):
            try:
                self.poll()
            except Exception:  # top level of the thread: one failed poll must not end it
                log.exception("lease poll failed")

    def _renew(self, rank: int, client_lease: ClientLease) -> None:
        try:
            lease = self._request_renewal(client_lease)
        except (PlannerUnreachable, _UnknownSeed) as error:
            log.warning("lease not renewed", rank=rank, source=client_lease.source_id, reason=str(error))
            return
        if lease is None:
            reason = "the seed left or changed its weights while they may have been read"
            log.error("stock client may have torn weights", rank=rank, source=client_lease.source_id, reason=reason)
            self._release(rank, client_lease, "failed", reason)
        else:
            client_lease.record_renewal(lease)

    def _request_renewal(self, client_lease: ClientLease) -> Lease | None:
        """Return a new lease on the same seed, or None if the planner refuses.

        Raises PlannerUnreachable or _UnknownSeed; the current lease then stays valid until it expires.
        """
        fork_id = client_lease.grant.fork_id
        if not client_lease.planner_restarted:
            try:
                return self._planner.progress(fork_id, UNKNOWN_PROGRESS).leases.get(client_lease.source_id)
            except PlannerRejected as error:
                if error.problem != "unknown-fork":
                    log.warning("lease refused", fork_id=fork_id, reason=str(error))
                    return None
            client_lease.planner_restarted = True
        # The planner has restarted: report the current assignment again.
        is_registered = self._is_registered(
            client_lease.source_id
        )  # check first: a seed that reports in between is found by the plan request
        assignments = (ChunkAssignment(source_id=client_lease.source_id, chunks=SINGLE_CHUNK),)
        request = ForkRequest(fork_id=fork_id, instance=client_lease.grant.target, current_assignments=assignments)
        try:
            routes = self._planner.request_plan(request).routes
        except PlannerRejected as error:
            log.warning("lease refused", fork_id=fork_id, reason=str(error))
            client_lease.planner_restarted = False
            return None
        expected = (client_lease.source_id, client_lease.grant.route.generation)
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
        with self._changing:
            if self._client_leases.get(rank) is not client_lease:
                return
            del self._client_leases[rank]
        self._end(client_lease, outcome, reason)

    def _end(self, client_lease: ClientLease, outcome: Outcome, reason: str) -> None:
        target = client_lease.grant.target
        finish = ForkResult(
            outcome=outcome,
            seconds=time.monotonic() - client_lease.began,
            bytes_read=target.image_bytes if outcome == "forked" else 0,
            reasons=(reason,),
        )
        log.info("lease released", source=client_lease.source_id, outcome=outcome, reason=reason)
        self._selector.release(client_lease.grant.fork_id, target, finish)

    def _pop_lease(self, rank: int) -> ClientLease | None:
        with self._changing:
            return self._client_leases.pop(rank, None)
