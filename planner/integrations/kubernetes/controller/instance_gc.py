"""Removes instances of deleted Pods, so that the planner need not wait for their timeout.

A Pod counts as deleted if it was observed terminating and then disappeared, or if it has finished. A Pod that
disappeared otherwise may still run, because removing the label has the same effect on a watch by label. Its
instances are removed only once they are silent. The same holds for Pods that were finished when this replica
became the leader: the previous leader removed their instances, so any that are left may be alive.

Instances of unknown Pods are left alone: another cluster may share the planner, which removes silent
instances itself.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from planner.integrations.kubernetes.controller.observed_state import ObservedState, is_terminated

SILENT_S: Final = 7.0
"""Silence after which an instance counts as dead. Longer than the default heartbeat interval of 5 s, and much
shorter than the 20 s after which the planner removes it.
"""


def decide(
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
