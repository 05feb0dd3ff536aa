"""Scale-ups that were announced: whom to wait for, so that all that start together share one plan.

What is announced, and that an instance asked for its first fork, are records in the store, so that all
replicas of the planner count alike; `planner.batches` does the waiting, each for the forks that come to it.
What comes to two of them is planned in two parts at once, the later on top of the earlier.
`planner.arrivals` counts who comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from planner.arrivals import Arrivals, Expected
from planner.problems import ProblemError
from planner.prospects import Prospects
from planner.state import State
from planner.store.base import Change, Store
from planner.store.records import GroupKey, InstanceRecord, ScaleUpRecord
from rfork.logs import logger
from rfork.wire import ScaleUp, ScaleUpView

MOST: Final = 10_000
"""Scale-ups kept; one more makes that forgotten which would expire first."""

Listener = Callable[[str], None]
"""Told the model of which somebody came, or is no longer expected."""


class ScaleUps:
    """Announces scale-ups, withdraws them, and says who of them is missing. Of the event loop's thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._models: dict[str, Arrivals] = {}
        self._listeners: list[Listener] = []
        self._log = logger("planner.scaleups")
        store.state.watch(self)

    # -- what callers say --------------------------------------------------------------------------

    async def announce(self, scaleup: ScaleUp) -> ScaleUpView:
        """Expect replicas from now on, or other ones than before; none: withdraw it.

        Said again, `replicas` are those that have not come by now. Raises StoreUnavailable.
        """
        now, old = self._store.now(), self._known(scaleup.scaleup_id)
        if old is not None and (old.record.scaleup.model, old.record.scaleup.version) != (
            scaleup.model,
            scaleup.version,
        ):
            old = None
        record = ScaleUpRecord(
            scaleup,
            first_at=old.record.first_at if old else now,
            expires_at=now + scaleup.expires_in_s,
            before=old.came_most if old else 0,
        )
        if not scaleup.replicas:
            await self.withdraw(scaleup.scaleup_id)
            return _view(record, 0, now, Prospects.of(self._store.state, scaleup.model, scaleup.version))
        known, over = self._store.state.scaleup(scaleup.scaleup_id), tuple[str, ...]()
        if known is None and len(self._store.state.scaleups()) >= MOST:
            soonest = min(self._store.state.scaleups(), key=lambda each: each.expires_at)
            over = (soonest.scaleup.scaleup_id,)
            self._log.warning("too many scale-ups: one is forgotten", scaleup_id=over[0], kept=MOST)
        await self._store.commit(Change(scaleups=(record,), withdrawn=over))
        if known is None or known.scaleup != scaleup:
            self._log.info(
                "scale-up announced", scaleup_id=scaleup.scaleup_id, model=scaleup.model,
                version=scaleup.version, replicas=scaleup.replicas, by=scaleup.by,
                expires_in_s=scaleup.expires_in_s,
            )  # fmt: skip
        one = self._known(scaleup.scaleup_id)
        held = Prospects.of(self._store.state, scaleup.model, scaleup.version)
        # It may be over by now.
        return _view(one.record if one else record, one.came_since if one else 0, self._store.now(), held)

    async def withdraw(self, scaleup_id: str) -> None:
        """Wait for nobody of it any more; one that is not known is no error. Raises StoreUnavailable."""
        if self._store.state.scaleup(scaleup_id) is not None:
            await self._store.commit(Change(withdrawn=(scaleup_id,)))
            self._log.info("scale-up withdrawn", scaleup_id=scaleup_id)

    def view(self, scaleup_id: str) -> ScaleUpView:
        """One scale-up; ProblemError `unknown-scaleup` (404) where there is none."""
        one = self._known(scaleup_id)
        if one is None:
            raise ProblemError(404, "unknown-scaleup", f"no scale-up {scaleup_id} is known")
        scaleup = one.record.scaleup
        held = Prospects.of(self._store.state, scaleup.model, scaleup.version)
        return _view(one.record, one.came_since, self._store.now(), held)

    def views(self) -> list[ScaleUpView]:
        """All that are under way, in the order of their ids."""
        now, found = self._store.now(), dict[str, ScaleUpView]()
        for model, known in self._models.items():
            prospects: dict[str | None, Prospects] = {}
            for one in known.live(now):
                version = one.record.scaleup.version
                if version not in prospects:
                    prospects[version] = Prospects.of(self._store.state, model, version)
                held = prospects[version]
                found[one.record.scaleup.scaleup_id] = _view(one.record, one.came_since, now, held)
        return [found[name] for name in sorted(found)]

    # -- what the planner asks -----------------------------------------------------------------------

    def expected(self, group: GroupKey) -> int:
        """Replicas that were announced and of which no instance in this group has asked yet."""
        model = self._models.get(group.model)
        return 0 if model is None else model.missing(group.version, group.rank_key, self._store.now())

    def lasts_s(self, model: str) -> float:
        """Seconds until the next of the model's scale-ups expires; infinite where there is none."""
        now, known = self._store.now(), self._models.get(model)
        ends = (one.record.expires_at - now for one in (known.scaleups if known else ()))
        return min((left for left in ends if left > 0), default=math.inf)

    def awaits(self, record: InstanceRecord) -> bool:
        """Whether the instance, about to ask for the first time, is one of those expected."""
        model = self._models.get(record.report.model)
        return model is not None and model.awaits(record, self._store.now())

    def expired(self) -> tuple[str, ...]:
        """Ids of those that are to be forgotten by now."""
        now = self._store.now()
        found = [each for each in self._store.state.scaleups() if now >= each.expires_at]
        return tuple(each.scaleup.scaleup_id for each in found)

    def subscribe(self, listener: Listener) -> None:
        """Tell `listener` of each change of what is expected."""
        self._listeners.append(listener)

    def count(self) -> tuple[int, int]:
        """Scale-ups under way, and the replicas that they still expect."""
        now = self._store.now()
        live = [one for model in self._models.values() for one in model.live(now)]
        return len(live), sum(one.record.expected - one.came_most for one in live)

    # -- as planner.state.Watcher ------------------------------------------------------------------------

    def came(self, record: InstanceRecord) -> None:
        """An instance is new, or asks for its first fork."""
        model = self._models.get(record.report.model)
        if model is not None:
            model.add(record)
            if record.asked:
                self._tell(record.report.model)

    def announced(self, models: Iterable[str]) -> None:
        """The scale-ups of these models were changed: count anew, and tell whoever waits."""
        wanted = set(models)
        records: dict[str, list[ScaleUpRecord]] = {}
        for record in self._store.state.scaleups():
            if record.scaleup.model in wanted:
                records.setdefault(record.scaleup.model, []).append(record)
        for model in wanted:
            self._models.pop(model, None)
            if model in records:
                self._models[model] = Arrivals(records[model], _members(self._store.state, model))
            self._tell(model)

    def loaded(self) -> None:
        """Everything may be otherwise."""
        self.announced({each.scaleup.model for each in self._store.state.scaleups()} | set(self._models))

    # -- its own ---------------------------------------------------------------------------------------

    def _known(self, scaleup_id: str) -> Expected | None:
        record = self._store.state.scaleup(scaleup_id)
        if record is None or self._store.now() >= record.expires_at:
            return None
        ones = self._models[record.scaleup.model].scaleups
        return next(one for one in ones if one.record.scaleup.scaleup_id == scaleup_id)

    def _tell(self, model: str) -> None:
        for listener in self._listeners:
            listener(model)


def _view(record: ScaleUpRecord, arrived: int, now: float, held: Prospects) -> ScaleUpView:
    return ScaleUpView(
        scaleup=record.scaleup,
        arrived=arrived,
        expires_in_s=max(0.0, record.expires_at - now),
        seeds=held.seeds,
        image_bytes=held.image_bytes,
        reason=held.reason if record.scaleup.replicas else "nobody is expected any more",
    )


def _members(state: State, model: str) -> Iterator[InstanceRecord]:
    for group in state.groups_of(model):
        for instance_id in group.sources:
            record = state.instance(instance_id)
            if record is not None:
                yield record
