"""Scale-ups that were announced: whom to wait for, so that all that start together share one plan.

What is announced, and that an instance asked for its first fork, are records in the store, so that all
replicas of the planner count alike; `planner.request_batcher` does the waiting, each for the forks that come to it.
What comes to two of them is planned in two parts at once, the later on top of the earlier.
`planner.scaleup_tracking` counts who comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from planner.http_errors import ProblemError
from planner.scaleup_forecast import ScaleUpForecast
from planner.scaleup_tracking import ExpectedReplicas, ScaleUpTracker
from planner.state import PlannerState
from planner.store.base import PlannerStore, StoreChange
from planner.store.records import GroupKey, InstanceRecord, ScaleUpRecord
from rfork.logs import logger
from rfork.schema import ScaleUp, ScaleUpInfo

MAX_SCALEUPS: Final = 10_000
"""Scale-ups kept; one more makes that forgotten which would expire first."""

ScaleUpListener = Callable[[str], None]
"""Told the model of which somebody came, or is no longer expected."""


class ScaleUpRegistry:
    """Announces scale-ups, withdraws them, and says who of them is missing. Of the event loop's thread."""

    def __init__(self, store: PlannerStore) -> None:
        self._store = store
        self._models: dict[str, ScaleUpTracker] = {}
        self._listeners: list[ScaleUpListener] = []
        self._log = logger("planner.scaleups")
        store.state.add_state_listener(self)

    # -- what callers say --------------------------------------------------------------------------

    async def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        """Expect replicas from now on, or other ones than before; none: withdraw it.

        Said again, `replicas` are those that have not come by now. Raises StoreUnavailable.
        """
        now, old = self._store.now(), self._get_or_not_found(scaleup.scaleup_id)
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
            self._log.warning("too many scale-ups: one is forgotten", scaleup_id=replaced_ids[0], kept=MAX_SCALEUPS)
        await self._store.commit(StoreChange(scaleups=(record,), withdrawn=replaced_ids))
        if known is None or known.scaleup != scaleup:
            self._log.info(
                "scale-up announced", scaleup_id=scaleup.scaleup_id, model=scaleup.model,
                version=scaleup.version, replicas=scaleup.replicas, by=scaleup.announced_by,
                expires_in_s=scaleup.expires_in_s,
            )  # fmt: skip
        tracked = self._get_or_not_found(scaleup.scaleup_id)
        forecast = ScaleUpForecast.of(self._store.state, scaleup.model, scaleup.version)
        # It may be over by now.
        return _view(
            tracked.record if tracked else record,
            tracked.arrived_since if tracked else 0,
            self._store.now(),
            forecast,
        )

    async def withdraw(self, scaleup_id: str) -> None:
        """Wait for nobody of it any more; one that is not known is no error. Raises StoreUnavailable."""
        if self._store.state.scaleup(scaleup_id) is not None:
            await self._store.commit(StoreChange(withdrawn=(scaleup_id,)))
            self._log.info("scale-up withdrawn", scaleup_id=scaleup_id)

    def view(self, scaleup_id: str) -> ScaleUpInfo:
        """One scale-up; ProblemError `unknown-scaleup` (404) where there is none."""
        tracked = self._get_or_not_found(scaleup_id)
        if tracked is None:
            raise ProblemError(404, "unknown-scaleup", f"no scale-up {scaleup_id} is known")
        scaleup = tracked.record.scaleup
        forecast = ScaleUpForecast.of(self._store.state, scaleup.model, scaleup.version)
        return _view(tracked.record, tracked.arrived_since, self._store.now(), forecast)

    def views(self) -> list[ScaleUpInfo]:
        """All that are under way, in the order of their ids."""
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

    # -- what the planner asks -----------------------------------------------------------------------

    def expected(self, group: GroupKey) -> int:
        """Replicas that were announced and of which no instance in this group has asked yet."""
        model = self._models.get(group.model)
        return 0 if model is None else model.missing(group.version, group.rank_key, self._store.now())

    def ttl_seconds(self, model: str) -> float:
        """Seconds until the next of the model's scale-ups expires; infinite where there is none."""
        now, known = self._store.now(), self._models.get(model)
        ends = (tracked.record.expires_at - now for tracked in (known.scaleups if known else ()))
        return min((remaining for remaining in ends if remaining > 0), default=math.inf)

    def is_expected(self, record: InstanceRecord) -> bool:
        """Whether the instance, about to ask for the first time, is one of those expected."""
        model = self._models.get(record.report.model)
        return model is not None and model.is_expected(record, self._store.now())

    def expired(self) -> tuple[str, ...]:
        """Ids of those that are to be forgotten by now."""
        now = self._store.now()
        found = [each for each in self._store.state.scaleups() if now >= each.expires_at]
        return tuple(each.scaleup.scaleup_id for each in found)

    def subscribe(self, listener: ScaleUpListener) -> None:
        """Tell `listener` of each change of what is expected."""
        self._listeners.append(listener)

    def count(self) -> tuple[int, int]:
        """Scale-ups under way, and the replicas that they still expect."""
        now = self._store.now()
        live = [tracked for model in self._models.values() for tracked in model.live(now)]
        return len(live), sum(tracked.record.expected - tracked.max_position_count for tracked in live)

    # -- as planner.state.StateListener ------------------------------------------------------------------------

    def on_instance(self, record: InstanceRecord) -> None:
        """An instance is new, or asks for its first fork."""
        model = self._models.get(record.report.model)
        if model is not None:
            model.add(record)
            if record.asked_for_plan:
                self._notify(record.report.model)

    def on_scaleups(self, models: Iterable[str]) -> None:
        """The scale-ups of these models were changed: count anew, and tell whoever waits."""
        wanted = set(models)
        records: dict[str, list[ScaleUpRecord]] = {}
        for record in self._store.state.scaleups():
            if record.scaleup.model in wanted:
                records.setdefault(record.scaleup.model, []).append(record)
        for model in wanted:
            self._models.pop(model, None)
            if model in records:
                self._models[model] = ScaleUpTracker(records[model], _members(self._store.state, model))
            self._notify(model)

    def on_reload(self) -> None:
        """Everything may be otherwise."""
        self.on_scaleups({each.scaleup.model for each in self._store.state.scaleups()} | set(self._models))

    # -- its own ---------------------------------------------------------------------------------------

    def _get_or_not_found(self, scaleup_id: str) -> ExpectedReplicas | None:
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
        reason=forecast.reason if record.scaleup.replicas else "nobody is expected any more",
    )


def _members(state: PlannerState, model: str) -> Iterator[InstanceRecord]:
    for group in state.groups_of(model):
        for instance_id in group.sources:
            record = state.instance(instance_id)
            if record is not None:
                yield record
