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

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import PodSeen
from planner.hooks.kubernetes.controller.scene import Scene, all_ranks, ended, is_seed
from rfork.wire import InstanceView

IDLE: Final = "87001"
"""A seed that nobody reads from."""
READ: Final = "87002"
"""A seed that somebody reads from."""
LAST: Final = "87003"
"""A seed that holds weights of a rank that no other does."""
OURS: Final = frozenset({IDLE, READ, LAST})
PAUSE_S: Final = 10.0
"""Least time between two changes of one Pod's cost."""

Weights = tuple[str, str | None, str, str, str | None]
"""Model, version, rank, layout and weights: what seeds hold alike."""


@dataclass(frozen=True)
class Cost:
    """What a Pod is to cost from now on; None: as little as any other."""

    pod: PodSeen
    value: str | None


def decide(scene: Scene, changed: Mapping[str, float]) -> tuple[Cost, ...]:
    """The annotations to change. `changed`: when each Pod's was changed last, by UID."""
    if scene.away_since is not None:
        return ()  # what nobody tells about any more has not changed
    seeds: dict[Weights, int] = {}
    for view in scene.look.instances:
        if is_seed(view):
            held = _weights(view)
            seeds[held] = seeds.get(held, 0) + 1
    read = {share.source_id for fork in scene.look.forks if fork.finish is None for share in fork.plan}
    found: list[Cost] = []
    for pod in scene.pods.values():
        if pod.owner is None or pod.owner.kind != "ReplicaSet" or pod.deleting or ended(pod):
            continue
        now = pod.annotations.get(names.DELETION_COST)
        if now is not None and now not in OURS:
            continue
        if pod.uid not in scene.instances:
            continue  # a planner that was started anew hears of it soon: what it is worth has not changed
        wanted = _cost(scene, pod, seeds, read)
        if wanted != now and scene.now - changed.get(pod.uid, float("-inf")) >= PAUSE_S:
            found.append(Cost(pod, wanted))
    return tuple(found)


def _cost(scene: Scene, pod: PodSeen, seeds: Mapping[Weights, int], read: set[str]) -> str | None:
    views = scene.instances[pod.uid]
    if not all(map(is_seed, views)) or not all_ranks(pod, (view.report.rank for view in views)):
        return None
    own: dict[Weights, int] = {}
    for view in views:
        held = _weights(view)
        own[held] = own.get(held, 0) + 1
    if any(seeds[held] == count for held, count in own.items()):
        return LAST
    if any(view.report.readers or view.report.instance_id in read for view in views):
        return READ
    return IDLE


def _weights(view: InstanceView) -> Weights:
    report = view.report
    return report.model, view.version, report.rank.key, report.layout_id, report.weights_id
