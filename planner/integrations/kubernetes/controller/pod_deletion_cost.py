"""Which Pods go first when a Deployment is scaled down: those that nobody would miss.

Kubernetes asks a ReplicaSet's Pods for their cost only among those that are alike in what it looks at before
(bound, running, ready). A Pod without the annotation costs 0: so what is not whole yet needs no write at all.

An annotation that holds one of the three costs below is this controller's; any other is a user's own, and is
left alone. The numbers are such as nobody comes by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.kubernetes.controller.observed_state import (
    ObservedState,
    all_ranks,
    is_seed,
    is_terminated,
)
from rfork.schema import InstanceInfo

IDLE_COST: Final = "87001"
"""A seed that nobody reads from."""
BEING_READ_COST: Final = "87002"
"""A seed that somebody reads from."""
LAST_SEED_COST: Final = "87003"
"""A seed that holds weights of a rank that no other does."""
OWN_COSTS: Final = frozenset({IDLE_COST, BEING_READ_COST, LAST_SEED_COST})
UPDATE_INTERVAL_S: Final = 10.0
"""Least time between two changes of one Pod's cost."""

WeightsKey = tuple[str, str | None, str, str, str | None]
"""Model, version, rank, layout and weights: what seeds hold alike."""


@dataclass(frozen=True)
class DeletionCost:
    """What a Pod is to cost from now on; None: as little as any other."""

    pod: ObservedPod
    value: str | None


def decide(observed: ObservedState, changed: Mapping[str, float]) -> tuple[DeletionCost, ...]:
    """The annotations to change. `changed`: when each Pod's was changed last, by UID."""
    if observed.planner_down_since is not None:
        return ()  # what nobody tells about any more has not changed
    seed_counts: dict[WeightsKey, int] = {}
    for view in observed.snapshot.instances:
        if is_seed(view):
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
            continue  # a planner that was started anew hears of it soon: what it is worth has not changed
        target_cost = _cost(observed, pod, seed_counts, being_read)
        if target_cost != now and observed.now - changed.get(pod.uid, float("-inf")) >= UPDATE_INTERVAL_S:
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
