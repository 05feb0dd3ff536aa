"""Publishes a stock engine's ranks to the planner as instances while the engine is healthy.

A thread polls the engine; each rank has its own heartbeat. Other sidecars receive the weight info of a rank
if they present a lease that the planner signed for it. The lease protects only this info: the memory itself
is open to any client that reaches the engine's TransferEngine.
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
from rfork.planner_client.lease import KEYS_TIMEOUT_S, decode_key, verify
from rfork.planner_client.planner_clock import PlannerClock
from rfork.schema import InstanceAck, InstanceReport
from rfork.settings import InstanceSettings

ENGINE_POLL_INTERVAL_S: Final = 5.0
"""Interval at which the engine's health is polled."""
CLOCK_SKEW_S: Final = 5.0
"""Tolerated difference in seconds between the planner's clock and the local one."""
DRAIN_POLL_INTERVAL_S: Final = 0.5
FINAL_POLL_TIMEOUT_S: Final = 2.0
"""Seconds that `stop` waits for a running poll."""

log = logger("rfork.sidecar.seed")


class _PublishedRank:
    """One published rank, with the keys that verify leases on it."""

    def __init__(self, planner: PlannerClient, rank: int, report: InstanceReport) -> None:
        self.rank = rank
        self.report = report
        self.keys: tuple[bytes, ...] = ()
        self.clock = PlannerClock()
        self.heartbeat = Heartbeat(planner, lambda: self.report, self._on_ack, clock=self.clock)

    def _on_ack(self, ack: InstanceAck) -> None:
        self.keys = tuple(decode_key(key) for key in ack.lease_keys)


class Publisher:
    """Polls one engine every `poll_interval_s` seconds and keeps the planner's records of its ranks up to date.

    `address` returns the host:port at which other sidecars reach `serve_info`. Thread-safe. `stop` ends it.
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
        self._initial_version: Version | None = None
        self._last_version: Version | None = None
        self._published = False
        self._generation = 0
        self._ranks: dict[str, _PublishedRank] = {}
        self._is_healthy = self._was_healthy = self._draining = self._version_in_doubt = False
        self._logged_reason = ""
        self._lock = threading.Lock()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rfork-sidecar-poll", daemon=True)

    @property
    def engine_up(self) -> bool:
        """True if the engine was healthy at the last poll."""
        return self._is_healthy

    def start(self) -> None:
        """Poll the engine immediately and then periodically."""
        self._thread.start()

    def poll(self) -> None:
        """Publish new ranks of a healthy engine and unpublish those that no longer exist. Raises no RforkError."""
        self._is_healthy = self._engine.healthy()
        self._was_healthy = self._was_healthy or self._is_healthy
        reason = ""
        try:
            if not self._is_healthy:
                raise SourceUnavailable(f"engine {self._engine.url} is not healthy")
            self._publish()
        except RforkError as error:
            self._unpublish()
            reason = f"{error}; {error.hint}" if error.hint else str(error)
        if reason and reason != self._logged_reason:
            # An engine that is still starting does not deserve a warning.
            (log.warning if self._was_healthy else log.info)("engine not published", reason=reason)
        self._logged_reason = reason

    def serve_info(self, wanted: str, token: str) -> tuple[int, WeightInfo]:
        """Return the rank of an instance and the location of its weights, for the bearer of a lease on it.

        Raises LeaseRejected, or SourceUnavailable or SourceWeightsChanged if the engine no longer has that
        run of the rank.
        """
        published = self._ranks.get(wanted)
        if published is None:
            raise SourceUnavailable(f"this sidecar no longer publishes {wanted}")
        if not published.keys and not published.heartbeat.wait_connected(KEYS_TIMEOUT_S):
            raise LeaseRejected("the planner has not acknowledged this seed's heartbeat yet")
        claims = verify(token, published.keys, source_id=wanted, leeway_s=CLOCK_SKEW_S, now=published.clock.now())
        report = published.report
        if claims.layout_id != report.layout_id:
            raise LeaseRejected(f"the lease is for layout {claims.layout_id}, but this is {report.layout_id}")
        if (claims.generation, claims.weights_id) != (report.generation, report.weights_id):
            raise SourceWeightsChanged(f"the weights of {wanted} have changed since the lease was issued")
        info = self._engine.info(published.rank)
        if instance_id(self._settings, published.rank, info) != wanted:
            self._version_in_doubt = True
            self._wake.set()
            raise SourceWeightsChanged(f"the memory of {wanted} has changed: its engine was restarted")
        return published.rank, info

    def drain(self, timeout_s: float) -> bool:
        """Stop accepting readers and wait until the planner has none for these ranks. Returns False on timeout."""
        with self._lock:
            self._draining = True
            ranks = dict(self._ranks)
            for each in ranks.values():
                each.report = each.report.model_copy(update={"state": "draining"})
        deadline = time.monotonic() + timeout_s
        try:
            for each in ranks.values():
                self._planner.report(each.report)
            while any(self._planner.can_exit(name).readers for name in ranks):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._stopping.wait(min(DRAIN_POLL_INTERVAL_S, left_s))
        except NetworkError as error:
            log.warning("failed to drain the seeds", reason=str(error))
            return False
        return True

    def stop(self) -> None:
        """Stop polling and remove the ranks from the planner."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(FINAL_POLL_TIMEOUT_S)  # a poll that hangs on the engine publishes nothing after this
        self._unpublish()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.poll()
            except Exception:  # top level of the thread: one failed poll must not end it
                log.exception("failed to check the SGLang server, retrying")
            self._wake.wait(self._poll_interval_s)
            self._wake.clear()

    def _publish(self) -> None:
        """Publish the ranks if the engine's version has changed.

        Other endpoints are queried only then, because the engine handles them on its own event loop.
        """
        version = self._engine.version()
        if self._published and self._last_version == version and not self._version_in_doubt:
            return
        self._version_in_doubt = False
        description = self._engine.describe()
        _check(description)
        infos = tuple(self._engine.info(rank) for rank in range(description.tp_size))
        self._initial_version = self._initial_version or version
        if self._last_version not in (None, version):
            self._generation += 1
            log.warning("weights updated, stopping readers", generation=self._generation)
        model = self._model or description.served_name
        self._last_version, self._published = version, True
        weights = weights_id(model, self._initial_version, version)
        name = version_of(self._settings.version, weights, self._initial_version, version)
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
        """Replace the published ranks with `reports`."""
        names = {report.instance_id for report in reports}
        with self._lock:
            if self._stopping.is_set():
                return
            removed = [self._ranks.pop(name) for name in list(self._ranks) if name not in names]
            for report in reports:
                if self._draining:
                    report = report.model_copy(update={"state": "draining"})
                each = self._ranks.get(report.instance_id)
                if each is None:
                    each = self._ranks[report.instance_id] = _PublishedRank(self._planner, report.rank.tp, report)
                    each.heartbeat.start()
                else:
                    each.report = report
                    each.heartbeat.send_now()
        for each in removed:
            each.heartbeat.stop(remove=True)
        log.info(
            "SGLang seed published", model=reports[0].model, instances=sorted(names), engine=self._engine.url,
            image_bytes=sum(report.image_bytes for report in reports), generation=self._generation,
        )  # fmt: skip

    def _unpublish(self) -> None:
        self._published = False
        with self._lock:
            ranks = dict(self._ranks)
            self._ranks.clear()
        for each in ranks.values():
            each.heartbeat.stop(remove=True)
        if ranks:
            log.warning("SGLang seed no longer published", instances=sorted(ranks), engine=self._engine.url)


def _check(description: EngineDescription) -> None:
    """Raise SettingsError for an engine whose info is ambiguous."""
    if description.pp_size > 1:
        raise SettingsError(
            f"the engine has {description.pp_size} pipeline stages, but SGLang's R-Fork knows ranks by tp_rank only",
            hint="use rfork's SGLang plug-in, which distinguishes stages",
        )
    if description.speculative:
        raise SettingsError(
            f"the engine has a draft model ({description.speculative}), whose addresses replace the main model's in "
            "SGLang's R-Fork",
            hint="use rfork's SGLang plug-in, which distinguishes the main model from its draft",
        )
