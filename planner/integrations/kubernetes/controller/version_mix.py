"""Finds workloads whose Pods have several versions of one model's weights.

That is normal during a rollout, and reported if it lasts. A new leader restarts the measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from planner.integrations.kubernetes.cluster import ObjectRef
from planner.integrations.kubernetes.controller.observed_state import ObservedState, is_terminated
from planner.integrations.kubernetes.controller.owner_refs import OwnerIndex
from rfork.weights_version import is_comparable


@dataclass(frozen=True)
class VersionMix:
    """Versions of one model among the Pods of one workload."""

    workload_ref: ObjectRef
    model: str
    pods: Mapping[str, int]
    """Number of Pods by version; at least two versions."""


def find_mixes(observed: ObservedState) -> dict[str, VersionMix]:
    """Return the workloads whose Pods have several versions of a model, by UID; the first such model.

    Versions that are unique to one replica, and so never equal to another's, do not count.
    """
    owners = OwnerIndex(observed.workloads.values())
    refs: dict[str, ObjectRef] = {}
    found: dict[str, dict[tuple[str, str], dict[str, set[str]]]] = {}
    for uid, views in observed.instances.items():
        pod = observed.pods.get(uid)
        workload = owners.of(pod) if pod is not None and not (pod.deleting or is_terminated(pod)) else None
        if workload is None:
            continue
        refs[workload.uid] = workload.ref
        for view in views:
            if view.version is not None and is_comparable(view.version):
                models = found.setdefault(workload.uid, {})
                versions = models.setdefault((view.report.model, view.report.rank.role), {})
                versions.setdefault(view.version, set()).add(uid)
    mixes: dict[str, VersionMix] = {}
    for uid, models in found.items():
        for (model, _), versions in sorted(models.items()):
            if len(versions) > 1 and uid not in mixes:
                counts = {version: len(pods) for version, pods in versions.items()}
                mixes[uid] = VersionMix(refs[uid], model, counts)
    return mixes


def mix_start_times(mixes: AbstractSet[str], before: Mapping[str, float], now: float) -> dict[str, float]:
    """Return since when each of these workloads has several versions. `before`: the previous result."""
    return {uid: before.get(uid, now) for uid in mixes}
