"""The controller: watches in every replica, reconciles in the leader.

A reconcile polls the planner, decides and acts. Only completed actions are remembered between reconciles, so
that they are not repeated. A new leader starts without this memory and reads everything else from the cluster
and the planner's lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import TaskGroup  # type: ignore[attr-defined]  # Python 3.11: see runner.py
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from planner.integrations.health import IntegrationStatus, raise_if_cancelled
from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import ClusterUnavailable, WatchEvent
from planner.integrations.kubernetes.cluster import Cluster, ObjectRef
from planner.integrations.kubernetes.controller import events, readiness_gate, scale_down, scaleups
from planner.integrations.kubernetes.controller.actions import (
    Action,
    ActionExecutor,
    ControllerMetrics,
    SpanAttributes,
    object_attributes,
    pod_attributes,
)
from planner.integrations.kubernetes.controller.events import EventToEmit
from planner.integrations.kubernetes.controller.observed_state import (
    ObservedState,
    ObservedT,
    PlannerSnapshot,
    ResourceCache,
    ResourceCaches,
    is_terminated,
    observe,
)
from planner.integrations.kubernetes.controller.readiness_gate import WrittenCondition
from planner.integrations.kubernetes.controller.scaleups import MissingReplicas, PendingScaleUp, ScaleUpMismatch
from planner.integrations.kubernetes.leader_election import LeaderElection
from planner.integrations.planner_api import PlannerApi, PlannerUnavailable
from rfork.asyncio_timeout import timeout
from rfork.logs import logger
from rfork.schema import ScaleUpInfo
from rfork.settings import KubernetesSettings
from rfork.tracing import NOOP_TRACER, Tracer

MAX_ENTRIES: Final = 20_000
"""Maximum number of remembered removals and Events."""
MIXED_VERSIONS_AFTER_S: Final = 3600.0
"""Time after which several versions of a model in one workload are reported; less is a rollout."""
DOWN_EVENT_DELAY_S: Final = 10.0
"""Time without a response from the planner after which workloads get an Event."""
DecisionT = TypeVar("DecisionT")
Clock = Callable[[], float]
"""Seconds since the epoch, like the cluster's timestamps."""
DEBOUNCE_S: Final = 0.1
"""Time for which changes are collected: scaling changes many objects at the same time."""
CPU_PAUSE_FACTOR: Final = 4.0
"""Under constant changes, each pause is this many times the CPU time used before it."""


def scaleup_attributes(pending: PendingScaleUp) -> SpanAttributes:
    """Attributes of expected replicas."""
    scaleup = pending.scaleup
    return {
        **object_attributes(pending.workload_ref),
        "scaleup": scaleup.scaleup_id,
        "model": scaleup.model,
        "replicas": scaleup.replicas,
    }


@dataclass
class LeaderState:
    """Actions of a leader since it became the leader."""

    missing_replicas: dict[str, MissingReplicas] = field(default_factory=dict)
    known_pods: frozenset[str] = frozenset()
    """UIDs of the Pods that the planner has known."""
    announced_sizes: dict[str, int] | None = None
    """Reported sizes of workloads, by UID; see `scaleups.announced_sizes`."""
    mismatches: dict[str, ScaleUpMismatch] = field(default_factory=dict)
    announced_at: dict[str, float] = field(default_factory=dict)
    """When each scale-up was last announced, by its id."""
    finished_before_lead: frozenset[str] = frozenset()
    """UIDs of the Pods that were deleted or finished when it became the leader."""
    removed: dict[str, None] = field(default_factory=dict)
    cost_changed_at: dict[str, float] = field(default_factory=dict)
    """When the deletion cost of each Pod was last changed, by UID."""
    mixed_since: dict[str, float] = field(default_factory=dict)
    """Since when the Pods of each workload have several versions of a model, by UID."""
    written_conditions: dict[str, WrittenCondition] = field(default_factory=dict)
    emitted_events: dict[str, None] = field(default_factory=dict)
    """Keys of written Events, oldest first. The planner's lists may contain their causes again."""
    affected_workloads: dict[str, ObjectRef] = field(default_factory=dict)
    """Workloads whose Pods started since the planner stopped responding, by UID."""
    notified_workloads: dict[str, ObjectRef] = field(default_factory=dict)
    """Those of them that got an Event about it."""
    scaleup_events: dict[str, EventToEmit] = field(default_factory=dict)
    """Events of announced scale-ups that are not written yet, by the scale-up's id."""


def trim(kept: dict[str, None], keys: Iterable[str]) -> None:
    """Add keys, then drop the oldest ones over `MAX_ENTRIES`."""
    kept |= dict.fromkeys(keys)
    while len(kept) > MAX_ENTRIES:
        del kept[next(iter(kept))]


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
            instances, forks, active = await asyncio.gather(
                self._planner_api.instances(), self._planner_api.forks(), self._planner_api.scaleups()
            )
        except PlannerUnavailable as error:
            if self._planner_down_since is None:
                self._planner_down_since = self._clock()
                self._metrics.planner_down.set(1)
                self._log.warning("planner unreachable, retrying", reason=str(error))
            return
        by_id = {view.scaleup.scaleup_id: view for view in active}
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
            {uid: one for cache in caches.workloads.values() for uid, one in cache.items.items()},
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
            known = scaleups.known_ids(observed)
            leader_state.scaleup_events = {
                uid: one for uid, one in leader_state.scaleup_events.items() if one.subject.uid in known
            }
            leader_state.notified_workloads = {
                uid: subject for uid, subject in leader_state.notified_workloads.items() if uid in known
            }
        return observed

    # -- decisions ---------------------------------------------------------------------------------

    def _update_pending(self, observed: ObservedState) -> scaleups.PendingState | None:
        if self._snapshot is None:
            return None  # unknown which replicas have arrived
        leader_state, reported, snapshot_at = (
            self._leader_state,
            observed.snapshot.scaleups,
            observed.snapshot.at,
        )
        pending = scaleups.pending_replicas(observed, leader_state.missing_replicas, self._settings.scaleup_ttl_s)
        announced_uids = map(scaleups.workload_uid, leader_state.announced_at)
        deleted_uids = (uid for cache in self.caches.workloads.values() for uid in cache.deleted)
        own_ids = {*announced_uids, *deleted_uids, *scaleups.known_ids(observed)}
        leader_state.missing_replicas = pending.missing_replicas
        leader_state.announced_sizes = scaleups.announced_sizes(leader_state.announced_sizes, pending, reported)
        leader_state.mismatches = scaleups.find_mismatches(
            pending.pending_replicas, reported, own_ids, leader_state.mismatches, snapshot_at
        )
        finished = leader_state.announced_at.keys() - pending.pending_replicas.keys() - reported.keys()
        for uid in finished:
            if observed.now - leader_state.announced_at[uid] >= scaleups.REANNOUNCE_INTERVAL_S:
                del leader_state.announced_at[uid]
        self._metrics.pending_replicas.set(sum(one.scaleup.replicas for one in pending.pending_replicas.values()))
        return pending

    def _announce_actions(self, observed: ObservedState, pending: scaleups.PendingState | None) -> Iterator[Action]:
        if pending is None or observed.planner_down_since is not None:
            return
        leader_state, snapshot = self._leader_state, observed.snapshot
        announced_sizes = leader_state.announced_sizes or {}
        sizes = {name: pending.sizes[scaleups.workload_uid(name)] for name in pending.pending_replicas}
        grown = {name for name, size in sizes.items() if size > announced_sizes.get(scaleups.workload_uid(name), 0)}
        urgent = {name for name in grown if scaleups.workload_uid(name) in observed.workloads}
        announced_s = {uid: observed.now - at for uid, at in leader_state.announced_at.items()}
        changed = scaleups.to_announce(
            pending.pending_replicas,
            snapshot.scaleups,
            leader_state.mismatches,
            urgent,
            announced_s,
            snapshot.at,
        )
        for one in changed:
            uid = one.scaleup.scaleup_id
            announced_size = sizes[uid] if uid in grown else None
            yield Action("announce", uid, partial(self._announce, one, announced_size), scaleup_attributes(one))
        changed_ids = {one.scaleup.scaleup_id for one in changed}
        for one in scaleups.hosts_to_announce(pending.pending_replicas, snapshot.scaleups):
            uid = one.scaleup.scaleup_id
            if uid not in changed_ids:
                yield Action("announce", uid, partial(self._announce_hosts, one), scaleup_attributes(one))
        for uid in scaleups.to_withdraw(
            pending.pending_replicas, snapshot.scaleups, leader_state.mismatches, snapshot.at
        ):
            yield Action("withdraw", uid, partial(self._withdraw, uid), {"scaleup": uid})

    async def _announce(self, one: scaleups.PendingScaleUp, announced_size: int | None) -> None:
        """Announce a scale-up. `announced_size`: size to report in an Event; None: it was reported before."""
        uid, leader_state = one.scaleup.scaleup_id, self._leader_state
        view = await self._send_scaleup(one)
        leader_state.announced_at[uid] = self._clock()
        if announced_size is not None:
            leader_state.scaleup_events[uid] = events.scaleup_event(one, view)
            leader_state.announced_sizes = {
                **(leader_state.announced_sizes or {}),
                one.workload_ref.uid: announced_size,
            }

    async def _announce_hosts(self, one: scaleups.PendingScaleUp) -> None:
        """Announce a scale-up whose number of replicas the planner knows."""
        await self._send_scaleup(one)

    async def _send_scaleup(self, one: scaleups.PendingScaleUp) -> ScaleUpInfo:
        view = await self._planner_api.announce(one.scaleup)
        self._with_scaleups({**(self._snapshot or PlannerSnapshot()).scaleups, one.scaleup.scaleup_id: view})
        return view

    async def _withdraw(self, uid: str) -> None:
        await self._planner_api.withdraw(uid)
        if self._snapshot is not None:
            self._with_scaleups({key: view for key, view in self._snapshot.scaleups.items() if key != uid})

    def _with_scaleups(self, active: dict[str, ScaleUpInfo]) -> None:
        if self._snapshot is not None:
            self._snapshot = replace(self._snapshot, scaleups=active)

    def _remove_actions(self, observed: ObservedState) -> Iterator[Action]:
        removed, finished_before_lead = (
            self._leader_state.removed.keys(),
            self._leader_state.finished_before_lead,
        )
        for instance_id in (
            self._run_step(
                "instance removal", lambda: scale_down.instances_to_remove(observed, removed, finished_before_lead)
            )
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
            **pod_attributes(one.pod),
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
        for cost in (
            self._run_step("deletion costs", lambda: scale_down.deletion_costs(observed, cost_changed_at)) or ()
        ):
            attributes = {**pod_attributes(cost.pod), "cost": cost.value or ""}
            yield Action("annotate", cost.pod.uid, partial(self._set_cost, cost), attributes)

    async def _set_cost(self, cost: scale_down.DeletionCost) -> None:
        self._leader_state.cost_changed_at[cost.pod.uid] = self._clock()
        await self._cluster.annotate(cost.pod, {names.DELETION_COST: cost.value})

    def _pod_and_workload_events(
        self, observed: ObservedState, pending: scaleups.PendingState | None
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
        mixes = events.find_mixes(observed)
        leader_state.mixed_since = events.mix_start_times(mixes.keys(), leader_state.mixed_since, observed.now)
        long = {uid: since for uid, since in leader_state.mixed_since.items() if observed.now - since >= limit_s}
        self._metrics.mixed_versions.set(len(long))
        found = (events.mixed_versions_event(mixes[uid], since, limit_s) for uid, since in sorted(long.items()))
        return [one for one in found if not one.keys <= leader_state.emitted_events.keys()]

    def _event_actions(self, events_to_emit: Iterable[events.EventToEmit]) -> Iterator[Action]:
        for one in events_to_emit:
            attributes = {**object_attributes(one.subject), "reason": one.reason}
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


async def run(
    settings: KubernetesSettings,
    cluster: Cluster,
    planner_api: PlannerApi,
    status: IntegrationStatus,
    *,
    clock: Clock = time.time,
    tracer: Tracer = NOOP_TRACER,
) -> None:
    """Watch the cluster, and act while this replica is the leader, until cancelled. Then release leadership.

    Registers its metrics in `status.registry`. Raises ClusterUnavailable if a watch ends, which should not
    happen.
    """
    loop = _ReconcileLoop(settings, cluster, planner_api, status, clock, tracer)
    caches = loop.controller.caches
    async with TaskGroup() as tasks:
        tasks.create_task(loop.follow("pods", cluster.pods(), caches.pods))
        for kind, cache in caches.workloads.items():
            tasks.create_task(loop.follow(f"{kind}s", cluster.workloads(kind), cache))
        tasks.create_task(loop.run_standby())
        tasks.create_task(loop.report_readiness())


class _ReconcileLoop:
    """Wakes the controller when something changed, with rate limits."""

    def __init__(
        self,
        settings: KubernetesSettings,
        cluster: Cluster,
        planner_api: PlannerApi,
        status: IntegrationStatus,
        clock: Clock,
        tracer: Tracer,
    ) -> None:
        self._metrics = ControllerMetrics(status.registry)
        self.controller = Controller(settings, cluster, planner_api, self._metrics, clock, tracer)
        self._poll_interval_s = settings.poll_interval_s
        self._status = status
        self._election = LeaderElection(
            cluster, settings.lease, settings.namespace, settings.identity, settings.lease_duration_s
        )
        self._clock = clock
        self._listed = asyncio.Event()
        self._changed = asyncio.Event()
        self._last_error = ""
        self._log = logger(__name__)
        status.leader(False)
        status.not_ready("the cluster's Pods are not listed yet")

    async def follow(
        self, name: str, watch: AsyncIterator[WatchEvent[ObservedT]], cache: ResourceCache[ObservedT]
    ) -> None:
        """Update a cache from one watch."""
        async for event in watch:
            cache.apply(event, self._clock())
            if self.controller.caches.listed:
                self._listed.set()
                self._changed.set()
        raise ClusterUnavailable(f"the watch of {name} ended")

    async def run_standby(self) -> None:
        """Take part in the leader election once the caches are complete."""
        await self._listed.wait()
        await self._election.run(self._lead)

    async def report_readiness(self) -> None:
        """Report ready once this replica leads or knows the leader: from then on no change is missed."""
        await self._listed.wait()
        self._status.not_ready("no leader elected yet")
        while self._election.holder is None:
            await asyncio.sleep(DEBOUNCE_S)
        self._status.ready()

    async def _lead(self) -> None:
        """Poll and reconcile forever."""
        self.controller.begin()
        self._set_leading(True)
        try:
            next_poll_at = time.monotonic()
            while True:
                began, used = time.monotonic(), time.thread_time()
                due = began >= next_poll_at
                self._changed.clear()
                await self._reconcile_once(poll_first=due)
                raise_if_cancelled()
                next_poll_at = began + self._poll_interval_s if due else next_poll_at
                await self._wait(next_poll_at, time.thread_time() - used)
        finally:
            self._set_leading(False)

    async def _reconcile_once(self, *, poll_first: bool) -> None:
        try:
            if poll_first:
                await self.controller.refresh()
            await self.controller.reconcile(lambda: self._election.is_leader)
        except Exception as error:  # a bug: the next attempt may succeed, and the watches must keep running
            error_text = f"{type(error).__name__}: {error}"
            if error_text != self._last_error:
                self._log.exception("controller failed to reconcile, retrying")
            self._last_error = error_text
        else:
            self._last_error = ""

    async def _wait(self, until: float, used_s: float) -> None:
        """Wait for the next poll, or for a batch of changes. `used_s`: CPU time of the last reconcile."""
        with contextlib.suppress(TimeoutError):
            async with timeout(max(0.0, until - time.monotonic())):
                await self._changed.wait()
        # Pause even if a poll takes longer than the poll interval.
        await asyncio.sleep(min(max(DEBOUNCE_S, CPU_PAUSE_FACTOR * used_s), self._poll_interval_s))

    def _set_leading(self, leads: bool) -> None:
        self._status.leader(leads)
        self._metrics.leader.set(leads)
        if not leads:  # reset the values that only a leader knows
            self._metrics.planner_down.set(0)
            self._metrics.pending_replicas.set(0)
            self._metrics.mixed_versions.set(0)
