"""Scale-ups that were announced: whom to wait for, so that all that start together share one plan.

What is announced, and that an instance asked for its first fork, are records in the store, so that all
replicas of the planner count alike; `planner.batches` does the waiting, each for the forks that come to it.
What comes to two of them is planned in two parts at once, the later on top of the earlier.

The planner is not told which instance belongs to which replica of a model, nor how many ranks one has. It
counts apart for each group and data-parallel index: there, each replica has one instance, whether its ranks
run in one Pod or in several. An instance that starts again in the same place counts once. That place is what
its id says before its rank (``REPLICA-RANK-…``, with RFORK_REPLICA set, as in Pods); else its Pod; else it is
its own. Where a model's replicas differ in their data-parallel size, those with fewer wait the whole time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from planner.problems import ProblemError
from planner.state import State
from planner.store.base import Change, Store
from planner.store.records import GroupKey, InstanceRecord, ScaleUpRecord
from rfork.logs import logger
from rfork.wire import InstanceReport, ScaleUp, ScaleUpView

MOST: Final = 10_000
"""Scale-ups kept; one more makes that forgotten which would expire first."""

Slot = tuple[str, int]
"""Rank key and data-parallel index: one instance of each replica."""
Listener = Callable[[str], None]
"""Told the model of which somebody came, or is no longer expected."""


def place_of(report: InstanceReport) -> str:
    """What an instance that starts again has in common with the one that it was."""
    replica, found, _ = report.instance_id.rpartition(f"-{report.rank.key}-")
    if found and replica:
        return replica
    return report.placement.pod or report.instance_id


class ScaleUps:
    """Announces scale-ups, withdraws them, and says who of them is missing. Of the event loop's thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._models: dict[str, _Model] = {}
        self._listeners: list[Listener] = []
        self._log = logger("planner.scaleups")
        store.state.watch(self)

    # -- what callers say --------------------------------------------------------------------------

    async def announce(self, scaleup: ScaleUp) -> ScaleUpView:
        """Expect replicas from now on, or other ones than before; none: withdraw it.

        Said again, `replicas` are those that have not come by now. Raises StoreUnavailable.
        """
        now, old = self._store.now(), self._known(scaleup.scaleup_id)
        if old is not None and old.record.scaleup.model != scaleup.model:
            old = None
        record = ScaleUpRecord(
            scaleup,
            first_at=old.record.first_at if old else now,
            expires_at=now + scaleup.expires_in_s,
            before=old.came_most if old else 0,
        )
        if not scaleup.replicas:
            await self.withdraw(scaleup.scaleup_id)
            return _view(record, 0, now, _Held.of(self._store.state, scaleup.model))
        known, over = self._store.state.scaleup(scaleup.scaleup_id), tuple[str, ...]()
        if known is None and len(self._store.state.scaleups()) >= MOST:
            soonest = min(self._store.state.scaleups(), key=lambda each: each.expires_at)
            over = (soonest.scaleup.scaleup_id,)
            self._log.warning("too many scale-ups: one is forgotten", scaleup_id=over[0], kept=MOST)
        await self._store.commit(Change(scaleups=(record,), withdrawn=over))
        if known is None or known.scaleup != scaleup:
            self._log.info(
                "scale-up announced", scaleup_id=scaleup.scaleup_id, model=scaleup.model,
                replicas=scaleup.replicas, expires_in_s=scaleup.expires_in_s, by=scaleup.by,
            )  # fmt: skip
        one, held = self._known(scaleup.scaleup_id), _Held.of(self._store.state, scaleup.model)
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
        held = _Held.of(self._store.state, one.record.scaleup.model)
        return _view(one.record, one.came_since, self._store.now(), held)

    def views(self) -> list[ScaleUpView]:
        """All that are under way, in the order of their ids."""
        now, found = self._store.now(), dict[str, ScaleUpView]()
        for model, known in self._models.items():
            held = _Held.of(self._store.state, model)
            for one in known.live(now):
                found[one.record.scaleup.scaleup_id] = _view(one.record, one.came_since, now, held)
        return [found[name] for name in sorted(found)]

    # -- what the planner asks -----------------------------------------------------------------------

    def expected(self, group: GroupKey) -> int:
        """Replicas that were announced and of which no instance in this group has asked yet."""
        model = self._models.get(group[0])
        return 0 if model is None else model.missing(group[1], self._store.now())

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
                self._models[model] = _Model(records[model], _members(self._store.state, model))
            self._tell(model)

    def loaded(self) -> None:
        """Everything may be otherwise."""
        self.announced({each.scaleup.model for each in self._store.state.scaleups()} | set(self._models))

    # -- its own ---------------------------------------------------------------------------------------

    def _known(self, scaleup_id: str) -> _One | None:
        record = self._store.state.scaleup(scaleup_id)
        if record is None or self._store.now() >= record.expires_at:
            return None
        ones = self._models[record.scaleup.model].scaleups
        return next(one for one in ones if one.record.scaleup.scaleup_id == scaleup_id)

    def _tell(self, model: str) -> None:
        for listener in self._listeners:
            listener(model)


class _One:
    """A scale-up, and the places of those that came of it."""

    def __init__(self, record: ScaleUpRecord) -> None:
        self.record = record
        self.places: set[str] = set()
        self._came: dict[Slot, set[str]] = {}

    def left(self, slot: Slot) -> int:
        return max(0, self.record.expected - len(self._came.get(slot, ())))

    def add(self, slot: Slot, place: str) -> None:
        self.places.add(place)
        self._came.setdefault(slot, set()).add(place)

    @property
    def came_most(self) -> int:
        """Replicas of which any rank came: of several Pods that make one, no two are in one slot."""
        most = max((len(places) for places in self._came.values()), default=0)
        return min(most, self.record.expected)

    @property
    def came_since(self) -> int:
        """Those of them that came after it was last announced."""
        return max(0, self.came_most - self.record.before)


class _Model:
    """The scale-ups of one model, the one that was announced first first, and who came of them."""

    def __init__(self, records: Iterable[ScaleUpRecord], members: Iterable[InstanceRecord]) -> None:
        ordered = sorted(records, key=lambda each: (each.first_at, each.scaleup.scaleup_id))
        self.scaleups = [_One(record) for record in ordered]
        self._first: dict[str, float] = {}  # when anything of a place was first heard of
        self._indices: dict[str, set[int]] = {}  # data-parallel indices by rank key
        for record in sorted(members, key=lambda each: (each.since, each.report.instance_id)):
            self.add(record)

    def live(self, now: float) -> list[_One]:
        return [one for one in self.scaleups if now < one.record.expires_at]

    def missing(self, rank_key: str, now: float) -> int:
        live, indices = self.live(now), self._indices.get(rank_key, {0})
        return max(sum(one.left((rank_key, index)) for one in live) for index in indices)

    def awaits(self, record: InstanceRecord, now: float) -> bool:
        since = self._first.get(place_of(record.report), record.since)
        live = [one for one in self.live(now) if one.record.first_at <= min(since, record.since)]
        return any(one.left(_slot(record.report)) for one in live)

    def add(self, record: InstanceRecord) -> None:
        slot, place = _slot(record.report), place_of(record.report)
        self._indices.setdefault(slot[0], set()).add(slot[1])
        since = self._first[place] = min(record.since, self._first.get(place, math.inf))
        if not record.asked:
            return
        # Of one replica all ranks count for one scale-up.
        fitting = [one for one in self.scaleups if place in one.places] or [
            one for one in self.scaleups if one.record.first_at <= since and one.left(slot)
        ]
        if fitting:
            fitting[0].add(slot, place)


@dataclass
class _Shape:
    """The ranks of one role that one kind of replica has."""

    least: int
    """Ranks that there are at least: of expert parallelism more may be."""
    seeds: dict[str, int] = field(default_factory=dict)
    """By rank key, of those that are known."""
    image_bytes: int = 0
    members: int = 0

    @property
    def fewest(self) -> int:
        """Instances that hold the rank that fewest hold."""
        return min(self.seeds.values()) if len(self.seeds) >= self.least else 0

    @property
    def worth(self) -> tuple[int, int]:
        """The greater is forked from rather."""
        return self.fewest, self.members


@dataclass(frozen=True)
class _Held:
    """What awaits those that come."""

    seeds: int
    image_bytes: int
    reason: str

    @classmethod
    def of(cls, state: State, model: str) -> _Held:
        """Where replicas of different sizes hold it: of the kind that can be forked from best."""
        shapes: dict[str, dict[tuple[int, int, int], _Shape]] = {}
        for group in state.groups_of(model):
            member = state.instance(next(iter(group.sources)))
            if member is None:
                continue
            rank = member.report.rank
            sizes = rank.tp_size, rank.pp_size, rank.ep_size
            of_role = shapes.setdefault(rank.role, {})
            shape = of_role.setdefault(sizes, _Shape(rank.tp_size * rank.pp_size))
            shape.seeds[group.rank_key] = sum(
                source.complete and source.state != "draining" and not source.quarantine
                for source in group.sources.values()
            )
            shape.image_bytes += member.report.image_bytes
            shape.members += len(group.sources)
        best = [max(of_role.values(), key=lambda shape: shape.worth) for of_role in shapes.values()]
        image_bytes = sum(shape.image_bytes for shape in best)
        return cls(min((shape.fewest for shape in best), default=0), image_bytes, _reason(model, best))


def _reason(model: str, best: Iterable[_Shape]) -> str:
    alone = "they read storage once, or load by themselves"
    held = [count for shape in best for count in shape.seeds.values() if count]
    if not held:
        return f"no instance holds {model}: {alone}"
    lacking = sorted(key for shape in best for key, count in shape.seeds.items() if not count)
    unknown = sum(max(0, shape.least - len(shape.seeds)) for shape in best)
    seeds = f"{min(held)} seed{'s' if min(held) > 1 else ''}"
    if not (lacking or unknown):
        return f"they fork from {seeds}"
    more = f" (and {len(lacking) + unknown - 1} more)" if len(lacking) + unknown > 1 else ""
    which = f"rank {lacking[0]}{more}" if lacking else f"{unknown} of the ranks"
    return f"no instance holds {which}: {alone}; other ranks fork from {seeds}"


def _view(record: ScaleUpRecord, arrived: int, now: float, held: _Held) -> ScaleUpView:
    return ScaleUpView(
        scaleup=record.scaleup,
        arrived=arrived,
        expires_in_s=max(0.0, record.expires_at - now),
        seeds=held.seeds,
        image_bytes=held.image_bytes,
        reason=held.reason if record.scaleup.replicas else "nobody is expected any more",
    )


def _slot(report: InstanceReport) -> Slot:
    return report.rank.key, report.rank.dp


def _members(state: State, model: str) -> Iterator[InstanceRecord]:
    for group in state.groups_of(model):
        for instance_id in group.sources:
            record = state.instance(instance_id)
            if record is not None:
                yield record
