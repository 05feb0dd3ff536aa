"""Scale-down: deletion costs that protect seeds, and removal of the instances of deleted Pods.

Kubernetes deletes Pods with lower costs first, but compares the costs of a ReplicaSet's Pods only if they are
equal otherwise (scheduled, running, ready). A Pod without the annotation costs 0, so incomplete instances
need no write. An annotation with one of the three costs below belongs to this controller. Any other value was
set by a user and is left alone; the numbers are unusual enough not to collide.

A Pod counts as deleted if it was observed terminating and then disappeared, or if it has finished. A Pod that
disappeared otherwise may still run, because removing the label has the same effect on a watch by label. Its
instances are removed only once they are silent. The same holds for Pods that were finished when this replica
became the leader: the previous leader removed their instances, so any that are left may be alive. Instances
of unknown Pods are left alone: another cluster may share the planner, which removes silent instances itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.kubernetes.controller.observed_state import ObservedState, all_ranks, is_seed, is_terminated
from rfork.schema import InstanceInfo

IDLE_COST: Final = "87001"
"""A seed without readers."""
BEING_READ_COST: Final = "87002"
"""A seed with readers."""
LAST_SEED_COST: Final = "87003"
"""The only seed of some rank's weights."""
OWN_COSTS: Final = frozenset({IDLE_COST, BEING_READ_COST, LAST_SEED_COST})
UPDATE_INTERVAL_S: Final = 10.0
"""Minimum time between two changes of one Pod's cost."""

WeightsKey = tuple[str, str | None, str, str, str | None]
"""Model, version, rank, layout and weights: equal for interchangeable seeds."""
SILENT_S: Final = 7.0
"""Silence after which an instance counts as dead. Longer than the default heartbeat interval of 5 s, and much
shorter than the 20 s after which the planner removes it.
"""


@dataclass(frozen=True)
class DeletionCost:
    """New deletion cost of a Pod. None removes the annotation."""

    pod: ObservedPod
    value: str | None


def deletion_costs(observed: ObservedState, changed_at: Mapping[str, float]) -> tuple[DeletionCost, ...]:
    """Return the annotations to change. `changed_at`: when each Pod's cost was last changed, by UID."""
    if observed.planner_down_since is not None:
        return ()  # without the planner nothing is known to have changed
    seed_counts: dict[WeightsKey, int] = {}
    for view in observed.snapshot.instances:
        if is_seed(view) and view.report.holder is None:  # a holder may evict the image
            weights = _weights(view)
            seed_counts[weights] = seed_counts.get(weights, 0) + 1
    being_read = {share.source_id for fork in observed.snapshot.forks if fork.finish is None for share in fork.plan}
    found: list[DeletionCost] = []
    for pod in observed.pods.values():
        if pod.owner is None or pod.owner.kind != "ReplicaSet" or pod.deleting or is_terminated(pod):
            continue
        now = pod.annotations.get(names.DELETION_COST)
        if now is not None and now not in OWN_COSTS:
            continue
        if pod.uid not in observed.instances:
            continue  # a restarted planner does not know it yet; its value has not changed
        target_cost = _cost(observed, pod, seed_counts, being_read)
        if target_cost != now and observed.now - changed_at.get(pod.uid, float("-inf")) >= UPDATE_INTERVAL_S:
            found.append(DeletionCost(pod, target_cost))
    return tuple(found)


def _cost(
    observed: ObservedState, pod: ObservedPod, seed_counts: Mapping[WeightsKey, int], being_read: set[str]
) -> str | None:
    views = observed.instances[pod.uid]
    if not all(map(is_seed, views)) or not all_ranks(pod, (view.report.rank for view in views)):
        return None
    own_weights: dict[WeightsKey, int] = {}
    for view in views:
        weights = _weights(view)
        own_weights[weights] = own_weights.get(weights, 0) + 1
    if any(seed_counts[weights] == count for weights, count in own_weights.items()):
        return LAST_SEED_COST
    if any(view.report.readers or view.report.instance_id in being_read for view in views):
        return BEING_READ_COST
    return IDLE_COST


def _weights(view: InstanceInfo) -> WeightsKey:
    report = view.report
    return report.model, view.version, report.rank.key, report.layout_id, report.weights_id


def instances_to_remove(
    observed: ObservedState, removed: AbstractSet[str], finished_before_lead: AbstractSet[str] = frozenset()
) -> tuple[str, ...]:
    """Return the ids of the instances to remove.

    `removed`: instances removed before; one that came back is alive and is left alone.
    `finished_before_lead`: UIDs of Pods that were finished before this replica became the leader.
    """
    if observed.planner_down_since is not None:
        return ()
    finished_pods = {uid: pod for uid, pod in observed.deleted.items() if uid not in observed.pods}
    finished_pods.update((uid, pod) for uid, pod in observed.pods.items() if is_terminated(pod))
    found: list[str] = []
    for uid, pod in finished_pods.items():
        immediately = (pod.deleting or is_terminated(pod)) and uid not in finished_before_lead
        for view in observed.instances.get(uid, ()):
            if immediately or view.age_s > SILENT_S:
                found.append(view.report.instance_id)
    return tuple(name for name in found if name not in removed)
