"""Instances whose Pods are gone: the planner need not wait for their silence.

Taken for gone are Pods that this controller saw about to be deleted and then did not see any more, and Pods
that have ended. A Pod that vanished otherwise may live: to a watch by label one whose label was taken away is
gone as well. Its instances go only once they are silent; so do those of Pods that were over when this replica
came to lead, for the one that led before has removed them, and what is there all the same may be alive.

Of others nothing is known: another cluster may share the planner, which forgets by itself who is silent.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from planner.integrations.kubernetes.controller.observed_state import ObservedState, is_terminated

SILENT_S: Final = 7.0
"""Silence of an instance that is dead for all that is known: longer than between two of its heartbeats, which
are 5 s apart unless the planner is told otherwise, and far shorter than the 20 s after which it forgets."""


def decide(
    observed: ObservedState, removed: AbstractSet[str], finished_before_lead: AbstractSet[str] = frozenset()
) -> tuple[str, ...]:
    """Ids of the instances to remove.

    `removed`: those that were; one that came back lives after all, and is left alone. `finished_before_lead`: UIDs of
    Pods that were over before this replica led.
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
