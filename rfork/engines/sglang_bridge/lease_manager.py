"""The client's side: which seed a stock client is told of, and its lease until the client has read.

A stock client asks once for each rank, waits as long as it takes, reads with no further word, and ends
itself where it gets no answer. So a lease is held and renewed in its stead, and given back once the engine
beside the sidecar turns healthy, or `lease_hold_s` is over. Nothing is verified, and the planner is told so.
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

RENEWALS: Final = 3
"""How often a lease is renewed within its time to live."""
POLL_INTERVAL_S: Final = 1.0
"""Seconds between two looks at what is held."""
IDLE: Final = ForkProgress(verified=(), bytes_read=0, bytes_per_s=0.0)
"""What is told of a read that nobody can watch."""
ENDED: Final = "the sidecar was ended"
READ: Final = "read by a stock client, unverified: that its engine is healthy is all that is known"

log = logger("rfork.sidecar.client")


class _UnknownSeed(Exception):
    """A planner that does not know of the seed yet."""


@dataclass
class ClientLease:
    """A lease that is held for one rank of the client."""

    granted: SeedGrant
    began: float
    was_up: bool
    """Whether the engine was healthy already: then its health says nothing of this read."""
    renew_at: float
    expires_at: float
    planner_restarted: bool = False
    """Whether the planner has restarted since, and may not have heard of the seed yet."""

    @property
    def source_id(self) -> str:
        """The seed's instance_id."""
        return self.granted.route.source_id

    def renewed(self, lease: Lease) -> None:
        """The planner gave a new lease just now."""
        now = time.monotonic()
        self.renew_at, self.expires_at = now + lease.expires_in_s / RENEWALS, now + lease.expires_in_s
        self.planner_restarted = False


class LeaseManager:
    """Answers one client's ranks with seeds of `model`. Thread-safe; `stop` gives all leases back.

    `engine_up` says whether the client's own engine is healthy; None: that is not known.
    """

    def __init__(
        self, planner: PlannerClient, fetch: FetchInfo, settings: InstanceSettings, *, model: str,
        wait_s: float, lease_hold_s: float, engine_up: Callable[[], bool] | None,
    ) -> None:  # fmt: skip
        self._planner = planner
        self._lease_hold_s = lease_hold_s
        self._engine_up = engine_up or (lambda: False)
        self._client_leases: dict[int, ClientLease] = {}
        self._rank_locks: dict[int, threading.Lock] = {}
        self._changing = threading.Lock()
        self._stopping = threading.Event()
        self._selector = SeedSelector(planner, fetch, settings, model=model, wait_s=wait_s, stopping=self._stopping)
        self._thread = threading.Thread(target=self._run, name="rfork-sidecar-leases", daemon=True)

    def start(self) -> None:
        """Look after the leases from now on."""
        self._thread.start()

    def weight_info_for(self, rank: int) -> WeightInfo:
        """The info of a seed for this rank, under a lease from now on; raises as `Asking.granted`."""
        with self._changing:
            turn = self._rank_locks.setdefault(rank, threading.Lock())
        with turn:
            before = self._pop_lease(rank)
            if before is not None:
                self._end(before, "interrupted", "the client asked again: it did not come up with what it read")
            was_up = self._engine_up()
            granted = self._selector.acquire(rank, before.source_id if before is not None else None)
            now = time.monotonic()
            client_lease = ClientLease(granted, now, was_up, now, now)
            client_lease.renewed(granted.route.lease)
            with self._changing:
                stopped = self._stopping.is_set()
                if not stopped:
                    self._client_leases[rank] = client_lease
            if stopped:  # which gave back all that was held by then
                self._end(client_lease, "interrupted", ENDED)
                raise SourceBusy(ENDED)
        log.info(
            "stock client sent to a seed", rank=rank, source=granted.route.source_id,
            session=granted.info.session, image_bytes=granted.info.image_bytes, fork_id=granted.fork_id,
        )  # fmt: skip
        return granted.info

    def poll(self) -> None:
        """Renew what is held, and give back what is done with."""
        with self._changing:
            client_leases = list(self._client_leases.items())
        # Only then: a lease that is younger than the answer would be given back by it.
        now, up = time.monotonic(), self._engine_up()
        for rank, each in client_leases:
            if up and not each.was_up:
                self._release(rank, each, "forked", READ)
            elif now - each.began >= self._lease_hold_s:
                why = f"its client's engine is not known to be healthy after {self._lease_hold_s:g} s"
                self._release(rank, each, "interrupted", why)
            elif now >= each.renew_at:
                self._renew(rank, each)

    def stop(self) -> None:
        """Give every lease back, and let nobody wait."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._changing:
            client_leases = list(self._client_leases.items())
        for rank, each in client_leases:
            self._release(rank, each, "interrupted", ENDED)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_INTERVAL_S):
            try:
                self.poll()
            except Exception:  # the thread's outermost edge: one look that fails must not be the last
                log.exception("look failed")

    def _renew(self, rank: int, client_lease: ClientLease) -> None:
        try:
            lease = self._renewed(client_lease)
        except (PlannerUnreachable, _UnknownSeed) as error:
            log.warning("lease not renewed", rank=rank, source=client_lease.source_id, reason=str(error))
            return
        if lease is None:
            why = "the seed left, or changed its weights, while it may have been read"
            log.error("A STOCK CLIENT MAY HOLD TORN WEIGHTS", rank=rank, source=client_lease.source_id, reason=why)
            self._release(rank, client_lease, "failed", why)
        else:
            client_lease.renewed(lease)

    def _renewed(self, client_lease: ClientLease) -> Lease | None:
        """A new lease on the same seed; None where the planner gives none any more.

        Raises PlannerUnreachable, or _Unheard: the lease that is held is good until it lapses.
        """
        fork_id = client_lease.granted.fork_id
        if not client_lease.planner_restarted:
            try:
                return self._planner.progress(fork_id, IDLE).leases.get(client_lease.source_id)
            except PlannerRejected as error:
                if error.problem != "unknown-fork":
                    log.warning("lease refused", fork_id=fork_id, reason=str(error))
                    return None
            client_lease.planner_restarted = True
        # The planner has restarted: tell it who reads from whom.
        is_registered = self._is_registered(client_lease.source_id)  # first: one that reports in between is found later
        current = (ChunkAssignment(source_id=client_lease.source_id, chunks=SINGLE_CHUNK),)
        request = ForkRequest(fork_id=fork_id, instance=client_lease.granted.target, current_assignments=current)
        try:
            routes = self._planner.request_plan(request).routes
        except PlannerRejected as error:
            log.warning("lease refused", fork_id=fork_id, reason=str(error))
            client_lease.planner_restarted = False
            return None
        meant = (client_lease.source_id, client_lease.granted.route.generation)
        leases = [route.lease for route in routes if (route.source_id, route.generation) == meant]
        if not leases and not is_registered and time.monotonic() < client_lease.expires_at:
            raise _UnknownSeed("the planner has restarted, and has not heard of the seed yet")
        return leases[0] if leases else None

    def _is_registered(self, source_id: str) -> bool:
        """Whether the seed has reported to the planner. Raises PlannerUnreachable."""
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
        target = client_lease.granted.target
        finish = ForkResult(
            outcome=outcome,
            seconds=time.monotonic() - client_lease.began,
            bytes_read=target.image_bytes if outcome == "forked" else 0,
            reasons=(reason,),
        )
        log.info("lease given back", source=client_lease.source_id, outcome=outcome, reason=reason)
        self._selector.release(client_lease.granted.fork_id, target, finish)

    def _pop_lease(self, rank: int) -> ClientLease | None:
        with self._changing:
            return self._client_leases.pop(rank, None)
