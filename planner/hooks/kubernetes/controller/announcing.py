"""Replicas that are about to come are announced to the planner, so that one plan covers all of them.

A scale-up is named by the UID of its workload and the version that its Pods state: another replica of the
controller, or a new start of this one, goes on with it. Only names that this controller could have given are
ever withdrawn, for others (a second cluster, an autoscaler) may announce to the same planner.

The planner counts by itself who comes. It is told again only where it and this controller differ in how many
are left: at once where a workload is to have more replicas, for those have no Pods yet; else after two looks,
for its lists are fetched one beside the other and are older than what the watches say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from planner.hooks.kubernetes.controller.coming import Coming, Waited, workload_uid
from planner.hooks.kubernetes.controller.scene import Scene
from rfork.wire import ScaleUpView

PAUSE_S: Final = 10.0
"""Least time between two announcements of one workload whose own number of replicas does not rise: Pods that
replace others come one by one, and each is minutes in coming."""


@dataclass(frozen=True)
class Differs:
    """The planner expects another number than is waited for."""

    up: bool
    """It expects too few."""
    look_at: float
    """The look at which it was first so."""


def spoken_of(
    before: Mapping[str, int] | None, waited: Waited, told: Mapping[str, ScaleUpView]
) -> dict[str, int]:
    """Of each size how much is no news: a scale-up is one where the size is greater than that.

    `before`: the same of last time; None: at the first time of a replica that comes to lead. What the planner
    knows then somebody has told of.
    """
    expected: dict[str, int] = {}
    known: dict[str, int] = {}
    for name, one in waited.coming.items():
        uid, replicas = workload_uid(name), one.scaleup.replicas
        expected[uid] = expected.get(uid, 0) + replicas
        known[uid] = known.get(uid, 0) + min(replicas, _left(one, told.get(name)) or 0)
    found: dict[str, int] = {}
    for uid, size in waited.sizes.items():
        unknown = expected.get(uid, 0) - known.get(uid, 0)
        if not unknown:
            found[uid] = size
        elif before is None:
            found[uid] = size - unknown
        else:
            found[uid] = min(size, before.get(uid, 0))
    return found


def differing(
    wanted: Mapping[str, Coming],
    told: Mapping[str, ScaleUpView],
    own: Iterable[str],
    before: Mapping[str, Differs],
    look_at: float,
) -> dict[str, Differs]:
    """Where the planner, of the scale-ups that it knows, expects others than are waited for.

    `own`: UIDs of whatever this controller may have announced replicas of. `before`: the same of last time;
    `look_at`: when the announced scale-ups (`told`) were fetched.
    """
    found: dict[str, Differs] = {}
    own = set(own)
    for uid in told:
        if uid not in wanted and workload_uid(uid) not in own:
            continue
        one = wanted.get(uid)
        left = _left(one, told[uid]) or 0
        if one is not None and one.scaleup.replicas == left:
            continue
        up = one is not None and one.scaleup.replicas > left
        last = before.get(uid)
        found[uid] = last if last is not None and last.up == up else Differs(up, look_at)
    return found


def to_announce(
    wanted: Mapping[str, Coming],
    told: Mapping[str, ScaleUpView],
    differs: Mapping[str, Differs],
    urgent: AbstractSet[str],
    announced_s: Mapping[str, float],
    look_at: float,
) -> tuple[Coming, ...]:
    """Those that the planner does not know, or of which it expects another number.

    `urgent`: what waits for no second look; `announced_s`: how long ago each was announced last, if it was.
    """
    found: list[Coming] = []
    for uid, one in wanted.items():
        left = _left(one, told.get(uid))
        if left == one.scaleup.replicas:
            continue
        up = left is None or one.scaleup.replicas > left
        seen_twice = left is None or (uid in differs and differs[uid].look_at < look_at)
        rested = not up or announced_s.get(uid, PAUSE_S) >= PAUSE_S
        if (up and uid in urgent) or (seen_twice and rested):
            found.append(one)
    return tuple(found)


def to_withdraw(
    wanted: Mapping[str, Coming],
    told: Mapping[str, ScaleUpView],
    differs: Mapping[str, Differs],
    look_at: float,
) -> tuple[str, ...]:
    """Of the planner's scale-ups, those of this controller in which nobody is waited for any more."""
    gone = (uid for uid in differs if uid in told and uid not in wanted)
    return tuple(uid for uid in gone if differs[uid].look_at < look_at)


def own_names(scene: Scene) -> set[str]:
    """UIDs of all that this controller may announce replicas of, and of Pods that are gone."""
    found = set(scene.workloads)
    for pods in (scene.pods, scene.gone):
        found.update(pod.owner.uid if pod.owner else uid for uid, pod in pods.items())
    return found


def _left(one: Coming | None, view: ScaleUpView | None) -> int | None:
    """How many the planner still expects; None: it does not know the scale-up, or as another model's."""
    if view is None or (one is not None and one.scaleup.model != view.scaleup.model):
        return None
    return max(0, view.scaleup.replicas - view.arrived)
