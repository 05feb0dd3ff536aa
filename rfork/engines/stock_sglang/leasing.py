"""The client's side: which seed a stock client is told of, and its lease until the client has read.

A stock client asks once for each rank, waits as long as it takes, reads with no further word, and ends
itself where it gets no answer. So a lease is held and renewed in its stead, and given back once the engine
beside the sidecar turns healthy, or `hold_s` is over. Nothing is verified, and the planner is told so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rfork.control.client import PlannerClient
from rfork.engines.stock_sglang.asking import Asking, FetchInfo, Granted
from rfork.engines.stock_sglang.engine import WeightInfo
from rfork.engines.stock_sglang.identity import WHOLE
from rfork.errors import PlannerRefused, PlannerUnreachable, SourceBusy
from rfork.fields import Outcome
from rfork.logs import logger
from rfork.settings import Settings
from rfork.wire import ForkFinish, ForkProgress, ForkRequest, Lease, Share

RENEWALS: Final = 3
"""How often a lease is renewed within its time to live."""
LOOK_S: Final = 1.0
"""Seconds between two looks at what is held."""
IDLE: Final = ForkProgress(verified=(), bytes_read=0, bytes_per_s=0.0)
"""What is told of a read that nobody can watch."""
ENDED: Final = "the sidecar was ended"
READ: Final = "read by a stock client, unverified: that its engine is healthy is all that is known"

log = logger("rfork.sidecar.client")


class _Unheard(Exception):
    """A planner that does not know of the seed yet."""


@dataclass
class Held:
    """A lease that is held for one rank of the client."""

    granted: Granted
    began: float
    was_up: bool
    """Whether the engine was healthy already: then its health says nothing of this read."""
    renew_at: float
    lapses_at: float
    forgotten: bool = False
    """Whether the planner has restarted since, and may not have heard of the seed yet."""

    @property
    def source_id(self) -> str:
        """The seed's instance_id."""
        return self.granted.route.source_id

    def renewed(self, lease: Lease) -> None:
        """The planner gave a new lease just now."""
        now = time.monotonic()
        self.renew_at, self.lapses_at = now + lease.expires_in_s / RENEWALS, now + lease.expires_in_s
        self.forgotten = False


class SeedDesk:
    """Answers one client's ranks with seeds of `model`. Thread-safe; `stop` gives all leases back.

    `engine_up` says whether the client's own engine is healthy; None: that is not known.
    """

    def __init__(
        self, planner: PlannerClient, fetch: FetchInfo, settings: Settings, *, model: str,
        wait_s: float, hold_s: float, engine_up: Callable[[], bool] | None,
    ) -> None:  # fmt: skip
        self._planner = planner
        self._hold_s = hold_s
        self._engine_up = engine_up or (lambda: False)
        self._held: dict[int, Held] = {}
        self._turns: dict[int, threading.Lock] = {}
        self._changing = threading.Lock()
        self._stopping = threading.Event()
        self._asking = Asking(planner, fetch, settings, model=model, wait_s=wait_s, stopping=self._stopping)
        self._thread = threading.Thread(target=self._run, name="rfork-sidecar-leases", daemon=True)

    def start(self) -> None:
        """Look after the leases from now on."""
        self._thread.start()

    def answer(self, rank: int) -> WeightInfo:
        """The info of a seed for this rank, under a lease from now on; raises as `Asking.granted`."""
        with self._changing:
            turn = self._turns.setdefault(rank, threading.Lock())
        with turn:
            before = self._take(rank)
            if before is not None:
                self._end(
                    before, "interrupted", "the client asked again: it did not come up with what it read"
                )
            was_up = self._engine_up()
            granted = self._asking.granted(rank, before.source_id if before is not None else None)
            now = time.monotonic()
            held = Held(granted, now, was_up, now, now)
            held.renewed(granted.route.lease)
            with self._changing:
                stopped = self._stopping.is_set()
                if not stopped:
                    self._held[rank] = held
            if stopped:  # which gave back all that was held by then
                self._end(held, "interrupted", ENDED)
                raise SourceBusy(ENDED)
        log.info(
            "stock client sent to a seed", rank=rank, source=granted.route.source_id,
            session=granted.info.session, image_bytes=granted.info.image_bytes, fork_id=granted.fork_id,
        )  # fmt: skip
        return granted.info

    def look(self) -> None:
        """Renew what is held, and give back what is done with."""
        with self._changing:
            held = list(self._held.items())
        # Only then: a lease that is younger than the answer would be given back by it.
        now, up = time.monotonic(), self._engine_up()
        for rank, each in held:
            if up and not each.was_up:
                self._give_back(rank, each, "forked", READ)
            elif now - each.began >= self._hold_s:
                why = f"its client's engine is not known to be healthy after {self._hold_s:g} s"
                self._give_back(rank, each, "interrupted", why)
            elif now >= each.renew_at:
                self._renew(rank, each)

    def stop(self) -> None:
        """Give every lease back, and let nobody wait."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._changing:
            held = list(self._held.items())
        for rank, each in held:
            self._give_back(rank, each, "interrupted", ENDED)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                self.look()
            except Exception:  # the thread's outermost edge: one look that fails must not be the last
                log.exception("look failed")

    def _renew(self, rank: int, held: Held) -> None:
        try:
            lease = self._renewed(held)
        except (PlannerUnreachable, _Unheard) as error:
            log.warning("lease not renewed", rank=rank, source=held.source_id, reason=str(error))
            return
        if lease is None:
            why = "the seed left, or changed its weights, while it may have been read"
            log.error("A STOCK CLIENT MAY HOLD TORN WEIGHTS", rank=rank, source=held.source_id, reason=why)
            self._give_back(rank, held, "failed", why)
        else:
            held.renewed(lease)

    def _renewed(self, held: Held) -> Lease | None:
        """A new lease on the same seed; None where the planner gives none any more.

        Raises PlannerUnreachable, or _Unheard: the lease that is held is good until it lapses.
        """
        fork_id = held.granted.fork_id
        if not held.forgotten:
            try:
                return self._planner.progress(fork_id, IDLE).leases.get(held.source_id)
            except PlannerRefused as error:
                if error.problem != "unknown-fork":
                    log.warning("lease refused", fork_id=fork_id, reason=str(error))
                    return None
            held.forgotten = True
        # The planner has restarted: tell it who reads from whom.
        heard = self._hears_of(held.source_id)  # first: one that reports in between is found later
        current = (Share(source_id=held.source_id, chunks=WHOLE),)
        request = ForkRequest(fork_id=fork_id, instance=held.granted.target, current=current)
        try:
            routes = self._planner.ask(request).routes
        except PlannerRefused as error:
            log.warning("lease refused", fork_id=fork_id, reason=str(error))
            held.forgotten = False
            return None
        meant = (held.source_id, held.granted.route.generation)
        leases = [route.lease for route in routes if (route.source_id, route.generation) == meant]
        if not leases and not heard and time.monotonic() < held.lapses_at:
            raise _Unheard("the planner has restarted, and has not heard of the seed yet")
        return leases[0] if leases else None

    def _hears_of(self, source_id: str) -> bool:
        """Whether the seed has reported to the planner. Raises PlannerUnreachable."""
        try:
            self._planner.instance(source_id)
        except PlannerRefused as error:
            return error.problem != "unknown-instance"
        return True

    def _give_back(self, rank: int, held: Held, outcome: Outcome, reason: str) -> None:
        with self._changing:
            if self._held.get(rank) is not held:
                return
            del self._held[rank]
        self._end(held, outcome, reason)

    def _end(self, held: Held, outcome: Outcome, reason: str) -> None:
        target = held.granted.target
        finish = ForkFinish(
            outcome=outcome,
            seconds=time.monotonic() - held.began,
            bytes_read=target.image_bytes if outcome == "forked" else 0,
            reasons=(reason,),
        )
        log.info("lease given back", source=held.source_id, outcome=outcome, reason=reason)
        self._asking.forget(held.granted.fork_id, target, finish)

    def _take(self, rank: int) -> Held | None:
        with self._changing:
            return self._held.pop(rank, None)
