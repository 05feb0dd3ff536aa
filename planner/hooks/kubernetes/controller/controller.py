"""The leader's work: look at the planner, decide over all that is known, do it.

What is remembered between two reconciles is what was done, so that it is not done twice; a replica that comes
to lead begins without any of it, and finds the rest in the cluster and in the planner's lists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from planner.hooks.fleet import Fleet, PlannerAway
from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import Cluster
from planner.hooks.kubernetes.controller import (
    announcing,
    coming,
    keeping,
    leaving,
    mixing,
    readiness,
    telling,
    traced,
)
from planner.hooks.kubernetes.controller.acting import Acting, Action
from planner.hooks.kubernetes.controller.memory import Memory, remember
from planner.hooks.kubernetes.controller.metrics import Metrics
from planner.hooks.kubernetes.controller.scene import Look, Scene, ended, scene
from planner.hooks.kubernetes.controller.world import World
from rfork.logs import logger
from rfork.settings import HookSettings
from rfork.tracing import OFF, Tracer
from rfork.wire import ScaleUpView

AWAY_TOLD_S: Final = 10.0
"""Silence of the planner that workloads are told of."""

Decided = TypeVar("Decided")
Clock = Callable[[], float]
"""Seconds since the epoch: what the cluster's times are told in."""


class Controller:
    """See the module. `world` is kept up to date by others, on the same event loop."""

    def __init__(
        self,
        settings: HookSettings,
        cluster: Cluster,
        fleet: Fleet,
        metrics: Metrics,
        clock: Clock,
        tracer: Tracer = OFF,
    ) -> None:
        self.world = World()
        self._settings = settings
        self._cluster = cluster
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._tracer = tracer
        self._acting = Acting(clock, metrics, tracer)
        self._memory = Memory()
        self._look: Look | None = None
        self._away_since: float | None = None
        self._broken: dict[str, str] = {}
        self._log = logger("planner.hooks.kubernetes.controller")

    def begin(self) -> None:
        """This replica leads from now on."""
        self._acting = Acting(self._clock, self._metrics, self._tracer)
        pods = self.world.pods
        self._memory = Memory()
        self._memory.told |= dict.fromkeys(telling.made_before(pods.items.values()))
        over = (uid for uid, pod in pods.items.items() if ended(pod))
        self._memory.over_before = frozenset((*over, *pods.gone))
        self._look, self._away_since = None, None

    async def look(self) -> None:
        """Fetch the planner's lists; where it does not answer, the last ones are kept."""
        try:
            instances, forks, scaleups = await asyncio.gather(
                self._fleet.instances(), self._fleet.forks(), self._fleet.scaleups()
            )
        except PlannerAway as error:
            if self._away_since is None:
                self._away_since = self._clock()
                self._metrics.planner_away.set(1)
                self._log.warning("the planner does not answer", because=str(error))
            return
        by_id = {view.scaleup.scaleup_id: view for view in scaleups}
        first = self._look is None
        self._look = Look(self._clock(), instances, forks, by_id)
        if first:
            self._memory.told |= dict.fromkeys(telling.ended_before(self._look))
        if self._away_since is not None:
            self._log.info("the planner answers again", away_s=round(self._clock() - self._away_since, 1))
        self._away_since = None
        self._metrics.planner_away.set(0)

    async def reconcile(self, allowed: Callable[[], bool] = lambda: True) -> None:
        """Do what there is to be done, as of the last look; `allowed`: whether this replica still leads."""
        if not self.world.listed or not allowed():
            return
        with self._metrics.reconcile_seconds.time():
            with self._metrics.decide_seconds.time():
                seen = self._scene()
                waited = self._part("scaling", lambda: self._scaling(seen))
                to_planner = [*self._announcing(seen, waited), *self._leaving(seen)]
                conditions = self._conditions(seen)
                to_cluster = [
                    *(self._saying(one) for one in conditions if one.verdict.status),
                    *self._telling(self._events(seen, waited)),
                    *self._keeping(seen),
                    *(self._saying(one) for one in conditions if not one.verdict.status),
                ]
            await self._do(to_planner, to_cluster, allowed)

    async def _do(
        self, to_planner: Iterable[Action], to_cluster: Iterable[Action], allowed: Callable[[], bool]
    ) -> None:
        """Do what was decided, in one span if there is anything: most reconciles find nothing to be done."""
        to_planner, to_cluster = self._acting.due(to_planner), self._acting.due(to_cluster)
        if not (to_planner or to_cluster or self._acting.due(self._announced())):
            return
        with self._tracer.span("reconcile", actions=len(to_planner) + len(to_cluster)):
            await asyncio.gather(self._acting.do(to_planner, allowed), self._acting.do(to_cluster, allowed))
            await self._acting.do(self._announced(), allowed)

    # -- what is known -----------------------------------------------------------------------------

    def _scene(self) -> Scene:
        world, memory = self.world, self._memory
        pods = world.pods.items
        self._metrics.pods.set(len(pods))
        seen = scene(
            self._clock(),
            pods,
            world.workloads.items,
            self._look,
            gone={uid: pod for uid, (pod, _) in world.pods.gone.items()},
            away_since=self._away_since,
            came=memory.came,
            ready=world.pods.ready,
        )
        memory.came = (memory.came | seen.instances.keys() | seen.forks.keys()) & pods.keys()
        memory.changed = {uid: at for uid, at in memory.changed.items() if uid in pods}
        memory.said = {uid: said for uid, said in memory.said.items() if uid in pods}
        if memory.announced or memory.told_away:
            # Where all of a workload is gone, its namespace may be too, in which nobody can be told any more.
            known = announcing.own_names(seen)
            memory.announced = {uid: one for uid, one in memory.announced.items() if one.about.uid in known}
            memory.told_away = {uid: about for uid, about in memory.told_away.items() if uid in known}
        return seen

    # -- what is to be done ------------------------------------------------------------------------

    def _scaling(self, seen: Scene) -> coming.Waited | None:
        if self._look is None:
            return None  # nobody knows who has come
        memory, told, look_at = self._memory, seen.look.scaleups, seen.look.at
        waited = coming.coming(seen, memory.rises, self._settings.scaleup_s)
        announced = map(coming.workload_uid, memory.announced_at)
        own = {*announced, *self.world.workloads.gone, *announcing.own_names(seen)}
        memory.rises = waited.rises
        memory.spoken = announcing.spoken_of(memory.spoken, waited, told)
        memory.differs = announcing.differing(waited.coming, told, own, memory.differs, look_at)
        over = memory.announced_at.keys() - waited.coming.keys() - told.keys()
        for uid in over:
            if seen.now - memory.announced_at[uid] >= announcing.PAUSE_S:
                del memory.announced_at[uid]
        self._metrics.coming.set(sum(one.scaleup.replicas for one in waited.coming.values()))
        return waited

    def _announcing(self, seen: Scene, waited: coming.Waited | None) -> Iterator[Action]:
        if waited is None or seen.away_since is not None:
            return
        memory, look = self._memory, seen.look
        spoken = memory.spoken or {}
        sizes = {name: waited.sizes[coming.workload_uid(name)] for name in waited.coming}
        rose = {name for name, size in sizes.items() if size > spoken.get(coming.workload_uid(name), 0)}
        urgent = {name for name in rose if coming.workload_uid(name) in seen.workloads}
        announced_s = {uid: seen.now - at for uid, at in memory.announced_at.items()}
        for one in announcing.to_announce(
            waited.coming, look.scaleups, memory.differs, urgent, announced_s, look.at
        ):
            uid = one.scaleup.scaleup_id
            news = sizes[uid] if uid in rose else None
            yield Action("announce", uid, partial(self._announce, one, news), traced.of_scaleup(one))
        for uid in announcing.to_withdraw(waited.coming, look.scaleups, memory.differs, look.at):
            yield Action("withdraw", uid, partial(self._withdraw, uid), {"scaleup": uid})

    async def _announce(self, one: coming.Coming, news: int | None) -> None:
        """`news`: the size that people are told of; None: they know."""
        uid, memory = one.scaleup.scaleup_id, self._memory
        view = await self._fleet.announce(one.scaleup)
        memory.announced_at[uid] = self._clock()
        self._with_scaleups({**(self._look or Look()).scaleups, uid: view})
        if news is not None:
            memory.announced[uid] = telling.expected(one, view)
            memory.spoken = {**(memory.spoken or {}), one.about.uid: news}

    async def _withdraw(self, uid: str) -> None:
        await self._fleet.withdraw(uid)
        if self._look is not None:
            self._with_scaleups({key: view for key, view in self._look.scaleups.items() if key != uid})

    def _with_scaleups(self, scaleups: dict[str, ScaleUpView]) -> None:
        if self._look is not None:
            self._look = replace(self._look, scaleups=scaleups)

    def _leaving(self, seen: Scene) -> Iterator[Action]:
        removed, over_before = self._memory.removed.keys(), self._memory.over_before
        for instance_id in self._part("leaving", lambda: leaving.decide(seen, removed, over_before)) or ():
            told = {"instance": instance_id}
            yield Action("remove", instance_id, partial(self._remove, instance_id), told)

    async def _remove(self, instance_id: str) -> None:
        await self._fleet.remove(instance_id)
        remember(self._memory.removed, (instance_id,))

    def _conditions(self, seen: Scene) -> tuple[readiness.Condition, ...]:
        if self._look is None and self._away_since is None:
            return ()
        grace_s, longest_s = self._settings.grace_s, self._settings.scaleup_s
        said = self._memory.said
        found = self._part("readiness", lambda: readiness.decide(seen, said, grace_s, longest_s))
        return found or ()

    def _saying(self, one: readiness.Condition) -> Action:
        told = {**traced.of_pod(one.pod), "ready": one.verdict.status, "reason": one.verdict.reason}
        return Action("condition", one.pod.uid, partial(self._say, one), told)

    async def _say(self, one: readiness.Condition) -> None:
        verdict = one.verdict
        status, reason, message = verdict.status, verdict.reason, verdict.message
        await self._cluster.set_condition(
            one.pod, names.WEIGHTS_READY, status=status, reason=reason, message=message
        )
        self._memory.said[one.pod.uid] = readiness.Said(verdict, self._clock())

    def _keeping(self, seen: Scene) -> Iterator[Action]:
        if self._look is None:
            return
        changed = self._memory.changed
        for cost in self._part("keeping", lambda: keeping.decide(seen, changed)) or ():
            told = {**traced.of_pod(cost.pod), "cost": cost.value or ""}
            yield Action("annotate", cost.pod.uid, partial(self._set_cost, cost), told)

    async def _set_cost(self, cost: keeping.Cost) -> None:
        self._memory.changed[cost.pod.uid] = self._clock()
        await self._cluster.annotate(cost.pod, {names.DELETION_COST: cost.value})

    def _events(self, seen: Scene, waited: coming.Waited | None) -> list[telling.Telling]:
        memory = self._memory
        found = list(self._part("telling", lambda: telling.decide(seen, memory.told.keys())) or ())
        found += self._part("mixing", lambda: self._mixed(seen)) or ()
        if seen.away_since is None:
            memory.affected = {}
            return found + [telling.planner_back(about) for about in memory.told_away.values()]
        memory.affected |= telling.affected(seen, waited.coming if waited else ())
        if seen.away_for(AWAY_TOLD_S):
            new = memory.affected.keys() - memory.told_away.keys()
            found += [telling.planner_away(memory.affected[uid]) for uid in sorted(new)]
        return found

    def _mixed(self, seen: Scene) -> list[telling.Telling]:
        """Find the workloads that have several versions, and report those that have had them for long."""
        if self._look is None or seen.away_since is not None:
            return []  # those known last are kept: it is not known that they changed
        memory, limit_s = self._memory, self._settings.versions_s
        mixes = mixing.find_mixes(seen)
        memory.mixed = mixing.begins(mixes.keys(), memory.mixed, seen.now)
        long = {uid: since for uid, since in memory.mixed.items() if seen.now - since >= limit_s}
        self._metrics.mixed_versions.set(len(long))
        found = (telling.mixed_versions(mixes[uid], since, limit_s) for uid, since in sorted(long.items()))
        return [one for one in found if not one.keys <= memory.told.keys()]

    def _telling(self, tellings: Iterable[telling.Telling]) -> Iterator[Action]:
        for one in tellings:
            told = {**traced.of_object(one.about), "reason": one.reason}
            yield Action("event", f"{one.about.uid}/{one.reason}", partial(self._tell, one), told)

    def _announced(self) -> Iterator[Action]:
        """The Events of scale-ups that were announced, and are not told of yet."""
        return self._telling(tuple(self._memory.announced.values()))

    async def _tell(self, one: telling.Telling) -> None:
        await self._cluster.tell(one.about, one.kind, one.reason, one.message)
        memory = self._memory
        remember(memory.told, one.keys)
        memory.announced = {uid: kept for uid, kept in memory.announced.items() if kept is not one}
        if one.reason == telling.AWAY:
            memory.told_away[one.about.uid] = one.about
        elif one.reason == telling.BACK:
            memory.told_away.pop(one.about.uid, None)

    def _part(self, name: str, decide: Callable[[], Decided]) -> Decided | None:
        """One part's decisions; where that fails none, and the others' are made and done all the same."""
        try:
            decided = decide()
        except Exception as error:  # a defect: it must not hold back every Pod of the cluster
            why = f"{type(error).__name__}: {error}"
            if self._broken.get(name) != why:
                self._log.exception("this part of the controller does not work", part=name)
            self._broken[name] = why
            return None
        self._broken.pop(name, None)
        return decided
