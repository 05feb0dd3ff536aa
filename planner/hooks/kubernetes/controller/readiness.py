"""When a Pod's readiness gate opens: once its weights are whole, and never later than it must.

A gate that is open stays open: weights do not go away, and what the engine itself says of its health is the
kubelet's to ask. Whatever the planner does, a Pod whose containers are ready is not held back for ever.

Without a probe a container is ready as soon as its process runs: of such a Pod that is no sign of anything.
If the planner does not know it, or is away, its gate opens only after the time that loading may take at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import PodSeen
from planner.hooks.kubernetes.controller.scene import Scene, all_ranks, answers, complete, ended, size
from rfork.image.ranges import count
from rfork.wire import ForkView, InstanceView

NOT_ASKED: Final = "Waiting"
PAUSE_S: Final = 5.0
"""Least time between two messages about one Pod."""
MESSAGES_PER_S: Final = 20.0
"""Most messages about all Pods that wait: the more there are, the rarer are each one's."""
SEEN_S: Final = 10.0
"""Time that a written condition may take to come back by the watch before it is written again."""


@dataclass(frozen=True)
class Verdict:
    """The condition that a Pod is to have."""

    status: bool
    reason: str
    """A word in CamelCase, one of few."""
    message: str


_WAITING: Final = Verdict(False, NOT_ASKED, "no rank has asked for its weights yet")
_NO_PROBE: Final = Verdict(
    False,
    NOT_ASKED,
    f"{_WAITING.message}, and there is no readinessProbe that tells whether the engine serves",
)
_UNKNOWN: Final = Verdict(True, "UnknownToPlanner", "the planner does not know the Pod: it loaded by itself")


@dataclass(frozen=True)
class Said:
    """The last condition that was written."""

    verdict: Verdict
    at: float


@dataclass(frozen=True)
class Condition:
    """A condition to write."""

    pod: PodSeen
    verdict: Verdict


def decide(scene: Scene, said: Mapping[str, Said], grace_s: float, longest_s: float) -> tuple[Condition, ...]:
    """The conditions to write. `said`: what was written last, by the Pod's UID.

    `grace_s`: how long the containers of a Pod must have been ready that the planner does not tell of;
    `longest_s`: the same for one that it takes to be loading still, and for one without a probe.
    """
    waiting = [pod for pod in scene.pods.values() if waits(pod)]
    pause_s = max(PAUSE_S, len(waiting) / MESSAGES_PER_S)
    found: list[Condition] = []
    for pod in waiting:
        verdict = judge(scene, pod, grace_s, longest_s)
        before = said.get(pod.uid)
        if before is not None:
            if verdict == _UNKNOWN and not before.verdict.status:
                asked = before.verdict.reason != NOT_ASKED
                if asked or scene.now - before.at < grace_s:
                    verdict = _WAITING  # a planner that was started anew hears of it soon
            if before.verdict.status and scene.now - before.at < SEEN_S:
                continue
            same = verdict == before.verdict
            if not verdict.status and (same or scene.now - before.at < pause_s):
                continue
        found.append(Condition(pod, verdict))
    return tuple(found)


def judge(scene: Scene, pod: PodSeen, grace_s: float, longest_s: float) -> Verdict:
    """Whether the Pod may serve, and why (not)."""
    ready_s = scene.ready_s(pod)
    late = ready_s is not None and ready_s >= longest_s
    serves = answers(pod) or late
    graced = late or (serves and ready_s is not None and ready_s >= grace_s)
    views, forks = scene.instances.get(pod.uid, ()), latest(scene.forks.get(pod.uid, ()))
    if views:
        ids = {view.report.instance_id for view in views}
        forks = tuple(fork for fork in forks if fork.instance_id in ids)
    live = {fork.instance_id: fork for fork in forks if fork.finish is None}
    if views and all(_whole(view, live) for view in views):
        if all_ranks(pod, (view.report.rank for view in views)):
            return _served(forks, len(views), sum(view.report.image_bytes for view in views))
        if graced:
            return Verdict(True, "UnknownToPlanner", "the planner does not know all of the Pod's ranks")
    if not views and forks and not live and serves:
        # It loaded by itself and gives nothing.
        return _served(forks, len(forks), sum(fork.image_bytes for fork in forks))
    if graced and scene.away_for(grace_s):
        return Verdict(True, "UnknownToPlanner", "the planner does not answer, and the containers are ready")
    if graced and not views and not live:
        return _UNKNOWN
    if late:
        told = f"the containers have been ready for {ready_s:.0f} s, though ranks are said to be loading"
        return Verdict(True, "TookTooLong", told)
    verdict = _waited_for(views, forks, live)
    no_probe = not pod.probed and ready_s is not None and ready_s >= grace_s
    return _NO_PROBE if no_probe and verdict == _WAITING else verdict


def latest(forks: Sequence[ForkView]) -> tuple[ForkView, ...]:
    """The last fork of each instance."""
    last: dict[str, ForkView] = {}
    for fork in forks:
        before = last.get(fork.instance_id)
        if before is None or fork.age_s < before.age_s:
            last[fork.instance_id] = fork
    return tuple(last.values())


def waits(pod: PodSeen) -> bool:
    """Whether its gate is to be opened yet."""
    gated = names.WEIGHTS_READY in pod.gates and not pod.conditions.get(names.WEIGHTS_READY)
    return gated and not pod.deleting and not ended(pod)


def _whole(view: InstanceView, live: Mapping[str, ForkView]) -> bool:
    """Whether it serves: with what it forked, or with what it loaded when its fork had ended otherwise."""
    report = view.report
    if report.state == "loading":
        return False
    return complete(report) or report.instance_id not in live


def _served(forks: Sequence[ForkView], ranks: int, nbytes: int) -> Verdict:
    ends = {fork.finish.outcome for fork in forks if fork.finish is not None}
    if "fallback" in ends:
        return Verdict(True, "FellBack", "the weights were loaded by a fallback")
    held = f"{_ranks(ranks)} whole: {size(nbytes)}"
    return Verdict(True, "Forked" if "forked" in ends else "Serving", held)


def _waited_for(
    views: Sequence[InstanceView], forks: Sequence[ForkView], live: Mapping[str, ForkView]
) -> Verdict:
    if live:
        got = sum(_share(fork) * fork.image_bytes for fork in forks)
        whole = sum(fork.image_bytes for fork in forks)
        if got == 0 and all(fork.state == "planning" for fork in live.values()):
            why = next((fork.reason for fork in live.values() if fork.reason), "")
            return Verdict(False, "Planning", f"no plan yet: {why}" if why else "no plan yet")
        percent = min(99, int(100 * got / whole)) if whole else 0
        return Verdict(False, "Receiving", f"receiving: {percent} % of {size(whole)}")
    failed = [fork.finish for fork in forks if fork.finish is not None and fork.finish.outcome == "failed"]
    if failed:
        why = failed[0].reasons[-1] if failed[0].reasons else "the planner does not say why"
        return Verdict(False, "ForkFailed", f"the fork failed: {why}")
    if any(fork.finish is not None and fork.finish.outcome == "fallback" for fork in forks):
        return Verdict(False, "FallingBack", "a fallback loaded the weights; the engine does not serve yet")
    if views or forks:
        loading = sum(view.report.state == "loading" for view in views)
        if not loading:
            return Verdict(False, "RanksMissing", f"{_ranks(len(views))} whole; others have not asked yet")
        return Verdict(False, "Starting", "the weights are whole or loading; the engine does not serve yet")
    return _WAITING


def _share(fork: ForkView) -> float:
    """Which part of its image a fork has."""
    if fork.finish is not None:
        return 1.0
    if fork.progress is None or not fork.chunk_count:
        return 0.0
    return count(fork.progress.verified) / fork.chunk_count


def _ranks(number: int) -> str:
    return "1 rank is" if number == 1 else f"{number} ranks are"
