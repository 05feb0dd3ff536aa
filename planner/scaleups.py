"""Announced scale-ups: the replicas to wait for, so that all that start together share one plan.

Announcements and first fork requests are records in the store, so that all replicas of the planner count the
same; `planner.request_batcher` does the waiting, each for its own requests. Requests that arrive at two
planner replicas are planned in two batches, the later on top of the earlier. `planner.scaleup_tracker`
counts arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from planner.http_errors import ProblemError
from planner.scaleup_forecast import ScaleUpForecast
from planner.scaleup_tracker import ExpectedReplicas, ScaleUpTracker
from planner.state import PlannerState
from planner.store.base import PlannerStore, StoreChange
from planner.store.records import GroupKey, InstanceRecord, ScaleUpRecord
from rfork.logs import logger
from rfork.schema import ScaleUp, ScaleUpInfo

MAX_SCALEUPS: Final = 10_000
"""Maximum number of scale-ups; beyond it, the one that expires first is dropped."""

ScaleUpListener = Callable[[str], None]
"""Called with a model when one of its replicas arrived or is no longer expected."""


class ScaleUpRegistry:
    """Announces and withdraws scale-ups, and reports their missing replicas. Event loop thread only."""

    def __init__(self, store: PlannerStore) -> None:
        self._store = store
        self._models: dict[str, ScaleUpTracker] = {}
        self._listeners: list[ScaleUpListener] = []
        self._log = logger("planner.scaleups")
        store.state.add_state_listener(self)

    # -- API ---------------------------------------------------------------------------------------

    async def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        """Expect replicas from now on, or a new number of them; 0 withdraws the scale-up.

        On a repeated announcement, `replicas` counts those that have not arrived yet. Raises
        StoreUnavailable.
        """
        now, old = self._store.now(), self._find(scaleup.scaleup_id)
        if old is not None and (old.record.scaleup.model, old.record.scaleup.version) != (
            scaleup.model,
            scaleup.version,
        ):
            old = None
        record = ScaleUpRecord(
            scaleup,
            first_at=old.record.first_at if old else now,
            expires_at=now + scaleup.expires_in_s,
            before=old.max_position_count if old else 0,
        )
        if not scaleup.replicas:
            await self.withdraw(scaleup.scaleup_id)
            return _view(record, 0, now, ScaleUpForecast.of(self._store.state, scaleup.model, scaleup.version))
        known, replaced_ids = self._store.state.scaleup(scaleup.scaleup_id), tuple[str, ...]()
        if known is None and len(self._store.state.scaleups()) >= MAX_SCALEUPS:
            first_to_expire = min(self._store.state.scaleups(), key=lambda each: each.expires_at)
            replaced_ids = (first_to_expire.scaleup.scaleup_id,)
            self._log.warning(
                "too many scale-ups, forgetting the one that expires first",
                scaleup_id=replaced_ids[0],
                max_scaleups=MAX_SCALEUPS,
            )
        await self._store.commit(StoreChange(scaleups=(record,), withdrawn=replaced_ids))
        if known is None or known.scaleup != scaleup:
            self._log.info(
                "scale-up announced", scaleup_id=scaleup.scaleup_id, model=scaleup.model,
                version=scaleup.version, replicas=scaleup.replicas, by=scaleup.announced_by,
                expires_in_s=scaleup.expires_in_s,
            )  # fmt: skip
        tracked = self._find(scaleup.scaleup_id)
        forecast = ScaleUpForecast.of(self._store.state, scaleup.model, scaleup.version)
        # It may already have expired.
        return _view(
            tracked.record if tracked else record,
            tracked.arrived_since if tracked else 0,
            self._store.now(),
            forecast,
        )

    async def withdraw(self, scaleup_id: str) -> None:
        """Stop waiting for its replicas; an unknown scale-up is not an error. Raises StoreUnavailable."""
        if self._store.state.scaleup(scaleup_id) is not None:
            await self._store.commit(StoreChange(withdrawn=(scaleup_id,)))
            self._log.info("scale-up withdrawn", scaleup_id=scaleup_id)

    def view(self, scaleup_id: str) -> ScaleUpInfo:
        """Return one scale-up; ProblemError `unknown-scaleup` (404) if there is none."""
        tracked = self._find(scaleup_id)
        if tracked is None:
            raise ProblemError(404, "unknown-scaleup", f"unknown scale-up {scaleup_id}")
        scaleup = tracked.record.scaleup
        forecast = ScaleUpForecast.of(self._store.state, scaleup.model, scaleup.version)
        return _view(tracked.record, tracked.arrived_since, self._store.now(), forecast)

    def views(self) -> list[ScaleUpInfo]:
        """Return all scale-ups in progress, ordered by id."""
        now, found = self._store.now(), dict[str, ScaleUpInfo]()
        for model, known in self._models.items():
            forecasts: dict[str | None, ScaleUpForecast] = {}
            for tracked in known.live(now):
                version = tracked.record.scaleup.version
                if version not in forecasts:
                    forecasts[version] = ScaleUpForecast.of(self._store.state, model, version)
                forecast = forecasts[version]
                found[tracked.record.scaleup.scaleup_id] = _view(tracked.record, tracked.arrived_since, now, forecast)
        return [found[name] for name in sorted(found)]

    # -- queries of the planner ----------------------------------------------------------------------

    def expected(self, group: GroupKey) -> int:
        """Return the number of announced replicas without a fork request in this group."""
        model = self._models.get(group.model)
        return 0 if model is None else model.missing(group.version, group.rank_key, self._store.now())

    def ttl_seconds(self, model: str) -> float:
        """Return the seconds until the next of the model's scale-ups expires; infinite if there is none."""
        now, known = self._store.now(), self._models.get(model)
        ends = (tracked.record.expires_at - now for tracked in (known.scaleups if known else ()))
        return min((remaining for remaining in ends if remaining > 0), default=math.inf)

    def is_expected(self, record: InstanceRecord) -> bool:
        """Return True if the instance, before its first fork request, is expected by a scale-up."""
        model = self._models.get(record.report.model)
        return model is not None and model.is_expected(record, self._store.now())

    def expired(self) -> tuple[str, ...]:
        """Return the ids of expired scale-ups."""
        now = self._store.now()
        found = [each for each in self._store.state.scaleups() if now >= each.expires_at]
        return tuple(each.scaleup.scaleup_id for each in found)

    def subscribe(self, listener: ScaleUpListener) -> None:
        """Call `listener` whenever the expected replicas change."""
        self._listeners.append(listener)

    def count(self) -> tuple[int, int]:
        """Return the number of scale-ups in progress and of the replicas that they still expect."""
        now = self._store.now()
        live = [tracked for model in self._models.values() for tracked in model.live(now)]
        return len(live), sum(tracked.record.expected - tracked.max_position_count for tracked in live)

    # -- planner.state.StateListener -----------------------------------------------------------------

    def on_instance(self, record: InstanceRecord) -> None:
        """Record an instance that is new, or that requests its first fork."""
        model = self._models.get(record.report.model)
        if model is not None:
            model.add(record)
            if record.plan_requested:
                self._notify(record.report.model)

    def on_scaleups(self, models: Iterable[str]) -> None:
        """Recount the scale-ups of these models, and notify listeners."""
        recounted_models = set(models)
        records: dict[str, list[ScaleUpRecord]] = {}
        for record in self._store.state.scaleups():
            if record.scaleup.model in recounted_models:
                records.setdefault(record.scaleup.model, []).append(record)
        for model in recounted_models:
            self._models.pop(model, None)
            if model in records:
                self._models[model] = ScaleUpTracker(records[model], _members(self._store.state, model))
            self._notify(model)

    def on_reload(self) -> None:
        """Recount everything."""
        self.on_scaleups({each.scaleup.model for each in self._store.state.scaleups()} | set(self._models))

    # -- internals ---------------------------------------------------------------------------------

    def _find(self, scaleup_id: str) -> ExpectedReplicas | None:
        record = self._store.state.scaleup(scaleup_id)
        if record is None or self._store.now() >= record.expires_at:
            return None
        tracker = self._models[record.scaleup.model].scaleups
        return next(tracked for tracked in tracker if tracked.record.scaleup.scaleup_id == scaleup_id)

    def _notify(self, model: str) -> None:
        for listener in self._listeners:
            listener(model)


def _view(record: ScaleUpRecord, arrived: int, now: float, forecast: ScaleUpForecast) -> ScaleUpInfo:
    return ScaleUpInfo(
        scaleup=record.scaleup,
        arrived_count=arrived,
        expires_in_s=max(0.0, record.expires_at - now),
        seeds=forecast.seeds,
        image_bytes=forecast.image_bytes,
        reason=forecast.reason if record.scaleup.replicas else "no replicas are expected any more",
    )


def _members(state: PlannerState, model: str) -> Iterator[InstanceRecord]:
    for group in state.groups_of(model):
        for instance_id in group.sources:
            record = state.instance(instance_id)
            if record is not None:
                yield record
