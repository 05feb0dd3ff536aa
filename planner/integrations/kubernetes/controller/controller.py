"""The leader's work: poll the planner, decide, act.

Only completed actions are remembered between reconciles, so that they are not repeated. A new leader starts
without this memory and reads everything else from the cluster and the planner's lists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import Cluster
from planner.integrations.kubernetes.controller import (
    events,
    instance_gc,
    pending_replicas,
    pod_deletion_cost,
    readiness_gate,
    scaleup_sync,
    tracing,
    version_mix,
)
from planner.integrations.kubernetes.controller.actions import Action, ActionExecutor
from planner.integrations.kubernetes.controller.caches import ResourceCaches
from planner.integrations.kubernetes.controller.leader_state import LeaderState, trim
from planner.integrations.kubernetes.controller.metrics import ControllerMetrics
from planner.integrations.kubernetes.controller.observed_state import (
    ObservedState,
    PlannerSnapshot,
    is_terminated,
    observe,
)
from planner.integrations.planner_api import PlannerApi, PlannerUnavailable
from rfork.logs import logger
from rfork.schema import ScaleUpInfo
from rfork.settings import KubernetesSettings
from rfork.tracing import NOOP_TRACER, Tracer

MIXED_VERSIONS_AFTER_S: Final = 3600.0
"""Time after which several versions of a model in one workload are reported; less is a rollout."""
DOWN_EVENT_DELAY_S: Final = 10.0
"""Time without a response from the planner after which workloads get an Event."""

DecisionT = TypeVar("DecisionT")
Clock = Callable[[], float]
"""Seconds since the epoch, like the cluster's timestamps."""


class Controller:
    """Decides and acts as the leader. `caches` is updated by watches on the same event loop."""

    def __init__(
        self,
        settings: KubernetesSettings,
        cluster: Cluster,
        planner_api: PlannerApi,
        metrics: ControllerMetrics,
        clock: Clock,
        tracer: Tracer = NOOP_TRACER,
    ) -> None:
        self.caches = ResourceCaches()
        self._settings = settings
        self._cluster = cluster
        self._planner_api = planner_api
        self._metrics = metrics
        self._clock = clock
        self._tracer = tracer
        self._executor = ActionExecutor(clock, metrics, tracer)
        self._leader_state = LeaderState()
        self._snapshot: PlannerSnapshot | None = None
        self._planner_down_since: float | None = None
        self._failed_steps: dict[str, str] = {}
        self._log = logger("planner.integrations.kubernetes.controller")

    def begin(self) -> None:
        """Start as the new leader."""
        self._executor = ActionExecutor(self._clock, self._metrics, self._tracer)
        pods = self.caches.pods
        self._leader_state = LeaderState()
        self._leader_state.emitted_events |= dict.fromkeys(events.keys_of_existing_pods(pods.items.values()))
        finished = (uid for uid, pod in pods.items.items() if is_terminated(pod))
        self._leader_state.finished_before_lead = frozenset((*finished, *pods.deleted))
        self._snapshot, self._planner_down_since = None, None

    async def refresh(self) -> None:
        """Fetch the planner's lists. If it does not respond, the last ones are kept."""
        try:
            instances, forks, scaleups = await asyncio.gather(
                self._planner_api.instances(), self._planner_api.forks(), self._planner_api.scaleups()
            )
        except PlannerUnavailable as error:
            if self._planner_down_since is None:
                self._planner_down_since = self._clock()
                self._metrics.planner_down.set(1)
                self._log.warning("planner unreachable, retrying", reason=str(error))
            return
        by_id = {view.scaleup.scaleup_id: view for view in scaleups}
        first = self._snapshot is None
        self._snapshot = PlannerSnapshot(self._clock(), instances, forks, by_id)
        if first:
            self._leader_state.emitted_events |= dict.fromkeys(events.keys_of_finished_forks(self._snapshot))
        if self._planner_down_since is not None:
            self._log.info("planner reachable again", unreachable_s=round(self._clock() - self._planner_down_since, 1))
        self._planner_down_since = None
        self._metrics.planner_down.set(0)

    async def reconcile(self, allowed: Callable[[], bool] = lambda: True) -> None:
        """Decide and act once, based on the last snapshot. `allowed`: this replica is still the leader."""
        if not self.caches.listed or not allowed():
            return
        with self._metrics.reconcile_seconds.time():
            with self._metrics.decide_seconds.time():
                observed = self._observe()
                pending = self._run_step("pending replicas", lambda: self._update_pending(observed))
                to_planner = [*self._announce_actions(observed, pending), *self._remove_actions(observed)]
                conditions = self._condition_updates(observed)
                to_cluster = [
                    *(self._condition_action(one) for one in conditions if one.decision.status),
                    *self._event_actions(self._pod_and_workload_events(observed, pending)),
                    *self._cost_actions(observed),
                    *(self._condition_action(one) for one in conditions if not one.decision.status),
                ]
            await self._execute(to_planner, to_cluster, allowed)

    async def _execute(
        self, to_planner: Iterable[Action], to_cluster: Iterable[Action], allowed: Callable[[], bool]
    ) -> None:
        """Run the actions in one span, if there are any: most reconciles have none."""
        to_planner, to_cluster = self._executor.due(to_planner), self._executor.due(to_cluster)
        if not (to_planner or to_cluster or self._executor.due(self._scaleup_event_actions())):
            return
        with self._tracer.span("reconcile", actions=len(to_planner) + len(to_cluster)):
            await asyncio.gather(self._executor.run(to_planner, allowed), self._executor.run(to_cluster, allowed))
            await self._executor.run(self._scaleup_event_actions(), allowed)

    # -- observed state ----------------------------------------------------------------------------

    def _observe(self) -> ObservedState:
        caches, leader_state = self.caches, self._leader_state
        pods = caches.pods.items
        self._metrics.pods.set(len(pods))
        observed = observe(
            self._clock(),
            pods,
            caches.workloads.items,
            self._snapshot,
            deleted={uid: pod for uid, (pod, _) in caches.pods.deleted.items()},
            planner_down_since=self._planner_down_since,
            known_before=leader_state.known_pods,
            ready=caches.pods.ready,
        )
        leader_state.known_pods = (
            leader_state.known_pods | observed.instances.keys() | observed.forks.keys()
        ) & pods.keys()
        leader_state.cost_changed_at = {uid: at for uid, at in leader_state.cost_changed_at.items() if uid in pods}
        leader_state.written_conditions = {
            uid: condition for uid, condition in leader_state.written_conditions.items() if uid in pods
        }
        if leader_state.scaleup_events or leader_state.notified_workloads:
            # Drop Events of deleted workloads: their namespace may be deleted too and accepts no Events.
            known = scaleup_sync.known_ids(observed)
            leader_state.scaleup_events = {
                uid: one for uid, one in leader_state.scaleup_events.items() if one.subject.uid in known
            }
            leader_state.notified_workloads = {
                uid: subject for uid, subject in leader_state.notified_workloads.items() if uid in known
            }
        return observed

    # -- decisions ---------------------------------------------------------------------------------

    def _update_pending(self, observed: ObservedState) -> pending_replicas.PendingState | None:
        if self._snapshot is None:
            return None  # unknown which replicas have arrived
        leader_state, reported, snapshot_at = (
            self._leader_state,
            observed.snapshot.scaleups,
            observed.snapshot.at,
        )
        pending = pending_replicas.pending_replicas(
            observed, leader_state.missing_replicas, self._settings.scaleup_ttl_s
        )
        announced_uids = map(pending_replicas.workload_uid, leader_state.announced_at)
        own_ids = {*announced_uids, *self.caches.workloads.deleted, *scaleup_sync.known_ids(observed)}
        leader_state.missing_replicas = pending.missing_replicas
        leader_state.announced_sizes = scaleup_sync.announced_sizes(leader_state.announced_sizes, pending, reported)
        leader_state.mismatches = scaleup_sync.find_mismatches(
            pending.pending_replicas, reported, own_ids, leader_state.mismatches, snapshot_at
        )
        finished = leader_state.announced_at.keys() - pending.pending_replicas.keys() - reported.keys()
        for uid in finished:
            if observed.now - leader_state.announced_at[uid] >= scaleup_sync.REANNOUNCE_INTERVAL_S:
                del leader_state.announced_at[uid]
        self._metrics.pending_replicas.set(sum(one.scaleup.replicas for one in pending.pending_replicas.values()))
        return pending

    def _announce_actions(
        self, observed: ObservedState, pending: pending_replicas.PendingState | None
    ) -> Iterator[Action]:
        if pending is None or observed.planner_down_since is not None:
            return
        leader_state, snapshot = self._leader_state, observed.snapshot
        announced_sizes = leader_state.announced_sizes or {}
        sizes = {name: pending.sizes[pending_replicas.workload_uid(name)] for name in pending.pending_replicas}
        grown = {
            name for name, size in sizes.items() if size > announced_sizes.get(pending_replicas.workload_uid(name), 0)
        }
        urgent = {name for name in grown if pending_replicas.workload_uid(name) in observed.workloads}
        announced_s = {uid: observed.now - at for uid, at in leader_state.announced_at.items()}
        for one in scaleup_sync.to_announce(
            pending.pending_replicas,
            snapshot.scaleups,
            leader_state.mismatches,
            urgent,
            announced_s,
            snapshot.at,
        ):
            uid = one.scaleup.scaleup_id
            announced_size = sizes[uid] if uid in grown else None
            yield Action("announce", uid, partial(self._announce, one, announced_size), tracing.scaleup_attributes(one))
        for uid in scaleup_sync.to_withdraw(
            pending.pending_replicas, snapshot.scaleups, leader_state.mismatches, snapshot.at
        ):
            yield Action("withdraw", uid, partial(self._withdraw, uid), {"scaleup": uid})

    async def _announce(self, one: pending_replicas.PendingScaleUp, announced_size: int | None) -> None:
        """Announce a scale-up. `announced_size`: size to report in an Event; None: it was reported before."""
        uid, leader_state = one.scaleup.scaleup_id, self._leader_state
        view = await self._planner_api.announce(one.scaleup)
        leader_state.announced_at[uid] = self._clock()
        self._with_scaleups({**(self._snapshot or PlannerSnapshot()).scaleups, uid: view})
        if announced_size is not None:
            leader_state.scaleup_events[uid] = events.scaleup_event(one, view)
            leader_state.announced_sizes = {
                **(leader_state.announced_sizes or {}),
                one.workload_ref.uid: announced_size,
            }

    async def _withdraw(self, uid: str) -> None:
        await self._planner_api.withdraw(uid)
        if self._snapshot is not None:
            self._with_scaleups({key: view for key, view in self._snapshot.scaleups.items() if key != uid})

    def _with_scaleups(self, scaleups: dict[str, ScaleUpInfo]) -> None:
        if self._snapshot is not None:
            self._snapshot = replace(self._snapshot, scaleups=scaleups)

    def _remove_actions(self, observed: ObservedState) -> Iterator[Action]:
        removed, finished_before_lead = (
            self._leader_state.removed.keys(),
            self._leader_state.finished_before_lead,
        )
        for instance_id in (
            self._run_step("instance removal", lambda: instance_gc.decide(observed, removed, finished_before_lead))
            or ()
        ):
            attributes = {"instance": instance_id}
            yield Action("remove", instance_id, partial(self._remove, instance_id), attributes)

    async def _remove(self, instance_id: str) -> None:
        await self._planner_api.remove(instance_id)
        trim(self._leader_state.removed, (instance_id,))

    def _condition_updates(self, observed: ObservedState) -> tuple[readiness_gate.ConditionUpdate, ...]:
        if self._snapshot is None and self._planner_down_since is None:
            return ()
        grace_s, max_wait_s = self._settings.readiness_grace_s, self._settings.scaleup_ttl_s
        written = self._leader_state.written_conditions
        found = self._run_step("readiness gates", lambda: readiness_gate.decide(observed, written, grace_s, max_wait_s))
        return found or ()

    def _condition_action(self, one: readiness_gate.ConditionUpdate) -> Action:
        attributes = {
            **tracing.pod_attributes(one.pod),
            "ready": one.decision.status,
            "reason": one.decision.reason,
        }
        return Action("condition", one.pod.uid, partial(self._write_condition, one), attributes)

    async def _write_condition(self, one: readiness_gate.ConditionUpdate) -> None:
        decision = one.decision
        status, reason, message = decision.status, decision.reason, decision.message
        await self._cluster.set_condition(one.pod, names.WEIGHTS_READY, status=status, reason=reason, message=message)
        self._leader_state.written_conditions[one.pod.uid] = readiness_gate.WrittenCondition(decision, self._clock())

    def _cost_actions(self, observed: ObservedState) -> Iterator[Action]:
        if self._snapshot is None:
            return
        cost_changed_at = self._leader_state.cost_changed_at
        for cost in self._run_step("deletion costs", lambda: pod_deletion_cost.decide(observed, cost_changed_at)) or ():
            attributes = {**tracing.pod_attributes(cost.pod), "cost": cost.value or ""}
            yield Action("annotate", cost.pod.uid, partial(self._set_cost, cost), attributes)

    async def _set_cost(self, cost: pod_deletion_cost.DeletionCost) -> None:
        self._leader_state.cost_changed_at[cost.pod.uid] = self._clock()
        await self._cluster.annotate(cost.pod, {names.DELETION_COST: cost.value})

    def _pod_and_workload_events(
        self, observed: ObservedState, pending: pending_replicas.PendingState | None
    ) -> list[events.EventToEmit]:
        leader_state = self._leader_state
        found = list(
            self._run_step("events", lambda: events.decide(observed, leader_state.emitted_events.keys())) or ()
        )
        found += self._run_step("version mixes", lambda: self._update_mixes(observed)) or ()
        if observed.planner_down_since is None:
            leader_state.affected_workloads = {}
            return found + [events.planner_up_event(subject) for subject in leader_state.notified_workloads.values()]
        leader_state.affected_workloads |= events.affected_workloads(
            observed, pending.pending_replicas if pending else ()
        )
        if observed.planner_down_for(DOWN_EVENT_DELAY_S):
            new = leader_state.affected_workloads.keys() - leader_state.notified_workloads.keys()
            found += [events.planner_down_event(leader_state.affected_workloads[uid]) for uid in sorted(new)]
        return found

    def _update_mixes(self, observed: ObservedState) -> list[events.EventToEmit]:
        """Update the version mixes, and return Events for those that lasted too long."""
        if self._snapshot is None or observed.planner_down_since is not None:
            return []  # keep the last mixes: nothing shows that they changed
        leader_state, limit_s = self._leader_state, MIXED_VERSIONS_AFTER_S
        mixes = version_mix.find_mixes(observed)
        leader_state.mixed_since = version_mix.mix_start_times(mixes.keys(), leader_state.mixed_since, observed.now)
        long = {uid: since for uid, since in leader_state.mixed_since.items() if observed.now - since >= limit_s}
        self._metrics.mixed_versions.set(len(long))
        found = (events.mixed_versions_event(mixes[uid], since, limit_s) for uid, since in sorted(long.items()))
        return [one for one in found if not one.keys <= leader_state.emitted_events.keys()]

    def _event_actions(self, events_to_emit: Iterable[events.EventToEmit]) -> Iterator[Action]:
        for one in events_to_emit:
            attributes = {**tracing.object_attributes(one.subject), "reason": one.reason}
            yield Action("event", f"{one.subject.uid}/{one.reason}", partial(self._emit_event, one), attributes)

    def _scaleup_event_actions(self) -> Iterator[Action]:
        """Actions for Events of announced scale-ups that are not written yet."""
        return self._event_actions(tuple(self._leader_state.scaleup_events.values()))

    async def _emit_event(self, one: events.EventToEmit) -> None:
        await self._cluster.emit_event(one.subject, one.event_type, one.reason, one.message)
        leader_state = self._leader_state
        trim(leader_state.emitted_events, one.keys)
        leader_state.scaleup_events = {
            uid: kept for uid, kept in leader_state.scaleup_events.items() if kept is not one
        }
        if one.reason == events.PLANNER_DOWN:
            leader_state.notified_workloads[one.subject.uid] = one.subject
        elif one.reason == events.PLANNER_UP:
            leader_state.notified_workloads.pop(one.subject.uid, None)

    def _run_step(self, name: str, decide: Callable[[], DecisionT]) -> DecisionT | None:
        """Return one step's decisions, or None if it raised, so that the other steps still run."""
        try:
            decided = decide()
        except Exception as error:  # a bug in one step must not block all Pods of the cluster
            error_text = f"{type(error).__name__}: {error}"
            if self._failed_steps.get(name) != error_text:
                self._log.exception("controller step failed", step=name)
            self._failed_steps[name] = error_text
            return None
        self._failed_steps.pop(name, None)
        return decided
