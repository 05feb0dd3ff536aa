"""Instances whose Pods are gone: the planner need not wait for their silence.

Taken for gone are Pods that this controller saw and then did not see any more, and Pods that have ended. Of
others nothing is known: another cluster may share the planner. Theirs are left to the planner, which forgets
who is silent, but for those whose Pod may have died while no controller looked: they are removed once they
have been silent for far longer than any instance of a Pod that runs.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from typing import Final

from planner.hooks.kubernetes.controller.scene import Scene, ended
from rfork.wire import InstanceView

SILENT_S: Final = 10.0
"""Least silence of an instance of a Pod that nobody saw."""
TIMES: Final = 2.0
"""How much longer than any instance of a Pod that runs: heartbeats are the planner's to set."""
_UID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}-")


def decide(scene: Scene, removed: AbstractSet[str]) -> tuple[str, ...]:
    """Ids of the instances to remove. `removed`: those that were; one that came back lives after all
    (somebody took its Pod's label away), and is left alone."""
    if scene.away_since is not None:
        return ()
    over = {uid for uid, pod in scene.pods.items() if ended(pod)}
    over.update(uid for uid in scene.gone if uid not in scene.pods)
    found = [view.report.instance_id for uid in over for view in scene.instances.get(uid, ())]
    found += (view.report.instance_id for view in _silent(scene))
    return tuple(name for name in found if name not in removed)


def _silent(scene: Scene) -> tuple[InstanceView, ...]:
    living = [
        view.age_s
        for uid, pod in scene.pods.items()
        if pod.phase == "Running" and not pod.deleting
        for view in scene.instances.get(uid, ())
    ]
    if not living:
        return ()
    least_s = max(SILENT_S, TIMES * max(living))
    return tuple(
        view
        for view in scene.strangers
        if view.age_s > least_s and view.report.placement.pod and _UID.match(view.report.instance_id)
    )
