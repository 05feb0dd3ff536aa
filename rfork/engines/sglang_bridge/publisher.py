"""The seed's side: an engine's ranks as instances at the planner, for as long as the engine is healthy.

A thread looks at the engine; each rank has a heartbeat of its own. What is given to whom: the info of a
rank, to other sidecars, under a lease that the planner signed for this rank. The info alone is under that
lease: the memory that it tells of is open to whoever reaches the engine's TransferEngine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from rfork.engines.sglang_bridge.engine import EngineDescription, StockEngine, Version, WeightInfo
from rfork.engines.sglang_bridge.identity import instance_id, seed_report, version_of, weights_id
from rfork.errors import (
    LeaseRejected,
    NetworkError,
    RforkError,
    SettingsError,
    SourceUnavailable,
    SourceWeightsChanged,
)
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.heartbeat import Heartbeat
from rfork.planner_client.lease import decode_key, verify
from rfork.planner_client.planner_clock import PlannerClock
from rfork.schema import InstanceAck, InstanceReport
from rfork.settings import InstanceSettings

CLOCK_SKEW_S: Final = 5.0
"""Seconds that the planner's clock may be ahead of this one's."""
KEYS_S: Final = 4.0
"""Seconds that who shows a lease waits for its keys: the planner gives it a moment before they come."""
DRAIN_POLL_INTERVAL_S: Final = 0.5
FINAL_POLL_TIMEOUT_S: Final = 2.0
"""Seconds that a stop waits for a look under way."""

log = logger("rfork.sidecar.seed")


class _Rank:
    """One rank at the planner, and what signs the leases on it."""

    def __init__(self, planner: PlannerClient, rank: int, report: InstanceReport) -> None:
        self.rank = rank
        self.report = report
        self.keys: tuple[bytes, ...] = ()
        self.clock = PlannerClock()
        self.heartbeat = Heartbeat(planner, lambda: self.report, self._on_ack, clock=self.clock)

    def _on_ack(self, ack: InstanceAck) -> None:
        self.keys = tuple(decode_key(key) for key in ack.lease_keys)


class Publisher:
    """Looks at one engine each `poll_interval_s` seconds, and keeps the planner told of its ranks.

    `address` says host:port at which other sidecars ask `serve_info`. Thread-safe; `stop` ends it.
    """

    def __init__(
        self, engine: StockEngine, planner: PlannerClient, settings: InstanceSettings, *, model: str | None,
        address: Callable[[], str], poll_interval_s: float,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._planner = planner
        self._settings = settings
        self._model = model
        self._address = address
        self._poll_interval_s = poll_interval_s
        self._first: Version | None = None
        self._last: Version | None = None
        self._published = False
        self._generation = 0
        self._ranks: dict[str, _Rank] = {}
        self._up = self._was_up = self._draining = self._version_in_doubt = False
        self._logged_reason = ""
        self._changing = threading.Lock()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rfork-sidecar-look", daemon=True)

    @property
    def engine_up(self) -> bool:
        """Whether the engine was healthy at the last look."""
        return self._up

    def start(self) -> None:
        """Look at the engine at once, and go on."""
        self._thread.start()

    def poll(self) -> None:
        """One look: publish what is healthy and new, unpublish what is gone. Raises nothing of rfork's."""
        self._up = self._engine.healthy()
        self._was_up = self._was_up or self._up
        why = ""
        try:
            if not self._up:
                raise SourceUnavailable(f"engine {self._engine.url} is not healthy")
            self._publish()
        except RforkError as error:
            self._unpublish()
            why = f"{error}; {error.hint}" if error.hint else str(error)
        if why and why != self._logged_reason:
            # One that is still coming up is nothing to be warned of.
            (log.warning if self._was_up else log.info)("engine not published", reason=why)
        self._logged_reason = why

    def serve_info(self, wanted: str, token: str) -> tuple[int, WeightInfo]:
        """The rank of an instance and where its weights lie, for the holder of a lease on it.

        Raises LeaseRejected; SourceUnavailable or SourceWeightsChanged where the engine has no such run of it any more.
        """
        known = self._ranks.get(wanted)
        if known is None:
            raise SourceUnavailable(f"{wanted} is not given here any more")
        if not known.keys and not known.heartbeat.wait_connected(KEYS_S):
            raise LeaseRejected("the planner has not answered this seed's heartbeat yet")
        claims = verify(token, known.keys, source_id=wanted, leeway_s=CLOCK_SKEW_S, now=known.clock.now())
        report = known.report
        if claims.layout_id != report.layout_id:
            raise LeaseRejected(f"the lease is for layout {claims.layout_id}, this is {report.layout_id}")
        if (claims.generation, claims.weights_id) != (report.generation, report.weights_id):
            raise SourceWeightsChanged(f"the weights of {wanted} are not those that the lease is for any more")
        info = self._engine.info(known.rank)
        if instance_id(self._settings, known.rank, info) != wanted:
            self._version_in_doubt = True
            self._wake.set()
            raise SourceWeightsChanged(f"the engine of {wanted} gives other memory by now: it was started again")
        return known.rank, info

    def drain(self, timeout_s: float) -> bool:
        """Have no new readers sent here, and wait until the planner knows of none: False where it does."""
        with self._changing:
            self._draining = True
            leaving = dict(self._ranks)
            for each in leaving.values():
                each.report = each.report.model_copy(update={"state": "draining"})
        deadline = time.monotonic() + timeout_s
        try:
            for each in leaving.values():
                self._planner.report(each.report)
            while any(self._planner.can_exit(name).readers for name in leaving):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._stopping.wait(min(DRAIN_POLL_INTERVAL_S, left_s))
        except NetworkError as error:
            log.warning("not drained", reason=str(error))
            return False
        return True

    def stop(self) -> None:
        """End the looks, and have the planner forget the ranks."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(FINAL_POLL_TIMEOUT_S)  # one that waits for an engine that hangs publishes nothing more
        self._unpublish()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.poll()
            except Exception:  # the thread's outermost edge: one look that fails must not be the last
                log.exception("look failed")
            self._wake.wait(self._poll_interval_s)
            self._wake.clear()

    def _publish(self) -> None:
        """Publish what may have changed. Only then is all asked for: the engine answers on its own loop."""
        version = self._engine.version()
        if self._published and self._last == version and not self._version_in_doubt:
            return
        self._version_in_doubt = False
        description = self._engine.describe()
        _check(description)
        infos = tuple(self._engine.info(rank) for rank in range(description.tp_size))
        self._first = self._first or version
        if self._last not in (None, version):
            self._generation += 1
            log.warning("weights were updated: readers are told to stop", generation=self._generation)
        model = self._model or description.served_name
        self._last, self._published = version, True
        weights = weights_id(model, self._first, version)
        name = version_of(self._settings.version, weights, self._first, version)
        self._send_report(
            [
                seed_report(
                    self._settings, model=model, version=name, rank=rank, description=description,
                    info=info, weights=weights, generation=self._generation, address=self._address(),
                )
                for rank, info in enumerate(infos)
            ]
        )  # fmt: skip

    def _send_report(self, reports: list[InstanceReport]) -> None:
        """Make the planner's books say this."""
        names = {report.instance_id for report in reports}
        with self._changing:
            if self._stopping.is_set():
                return
            removed = [self._ranks.pop(name) for name in list(self._ranks) if name not in names]
            for report in reports:
                if self._draining:
                    report = report.model_copy(update={"state": "draining"})
                each = self._ranks.get(report.instance_id)
                if each is None:
                    each = self._ranks[report.instance_id] = _Rank(self._planner, report.rank.tp, report)
                    each.heartbeat.start()
                else:
                    each.report = report
                    each.heartbeat.send_now()
        for each in removed:
            each.heartbeat.stop(remove=True)
        log.info(
            "stock seed published", model=reports[0].model, instances=sorted(names), engine=self._engine.url,
            image_bytes=sum(report.image_bytes for report in reports), generation=self._generation,
        )  # fmt: skip

    def _unpublish(self) -> None:
        self._published = False
        with self._changing:
            leaving = dict(self._ranks)
            self._ranks.clear()
        for each in leaving.values():
            each.heartbeat.stop(remove=True)
        if leaving:
            log.warning("stock seed unpublished", instances=sorted(leaving), engine=self._engine.url)


def _check(description: EngineDescription) -> None:
    """SettingsError for an engine whose info does not say whose weights it is."""
    if description.pp_size > 1:
        raise SettingsError(
            f"the engine has {description.pp_size} pipeline stages: SGLang keys its info by tp_rank alone",
            hint="use rfork's own plug-in, which tells stages apart",
        )
    if description.speculative:
        raise SettingsError(
            f"the engine has a draft model ({description.speculative}): its info overwrites the target's",
            hint="use rfork's own plug-in, which tells target and draft apart",
        )
