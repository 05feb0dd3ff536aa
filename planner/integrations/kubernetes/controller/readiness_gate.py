"""Decides when a Pod's readiness gate opens: once its weights are complete, or after a maximum time.

An open gate stays open: weights do not disappear, and the engine's health is the kubelet's responsibility.
Whatever happens to the planner, a Pod with ready containers is not blocked forever.

Without a probe, a container is ready as soon as its process runs, which proves nothing. If the planner does
not know such a Pod, or is unreachable, the gate opens only after the maximum load time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import ObservedPod
from planner.integrations.kubernetes.controller.observed_state import (
    ObservedState,
    all_ranks,
    complete,
    format_size,
    is_ready,
    is_terminated,
)
from rfork.image.ranges import count
from rfork.schema import ForkInfo, InstanceInfo

WAITING_REASON: Final = "Waiting"
MESSAGE_INTERVAL_S: Final = 5.0
"""Minimum time between two messages about one Pod."""
MESSAGES_PER_S: Final = 20.0
"""Maximum messages per second about all waiting Pods; with many Pods, each one's are rarer."""
CONDITION_SYNC_TIMEOUT_S: Final = 10.0
"""Time within which a written condition should appear in the watch, before it is written again."""


@dataclass(frozen=True)
class GateDecision:
    """The condition that a Pod should have."""

    status: bool
    reason: str
    """A CamelCase word from a small fixed set."""
    message: str


_WAITING: Final = GateDecision(False, WAITING_REASON, "no rank has requested its weights yet")
_NO_PROBE: Final = GateDecision(
    False,
    WAITING_REASON,
    f"{_WAITING.message}, and no readinessProbe shows whether the engine serves",
)
_UNKNOWN: Final = GateDecision(True, "UnknownToPlanner", "the planner does not know the Pod; it loaded without rfork")


@dataclass(frozen=True)
class WrittenCondition:
    """The last written condition."""

    decision: GateDecision
    at: float


@dataclass(frozen=True)
class ConditionUpdate:
    """A condition to write."""

    pod: ObservedPod
    decision: GateDecision


def decide(
    observed: ObservedState, written: Mapping[str, WrittenCondition], grace_s: float, max_wait_s: float
) -> tuple[ConditionUpdate, ...]:
    """Return the conditions to write. `written`: the last written ones, by the Pod's UID.

    `grace_s`: how long the containers of a Pod unknown to the planner must have been ready. `max_wait_s`: the
    same for a Pod that is still loading according to the planner, and for one without a probe.
    """
    waiting = [pod for pod in observed.pods.values() if is_gate_closed(pod)]
    pause_s = max(MESSAGE_INTERVAL_S, len(waiting) / MESSAGES_PER_S)
    found: list[ConditionUpdate] = []
    for pod in waiting:
        decision = decide_gate(observed, pod, grace_s, max_wait_s)
        before = written.get(pod.uid)
        if before is not None:
            if decision == _UNKNOWN and not before.decision.status:
                has_requested = before.decision.reason != WAITING_REASON
                if has_requested or observed.now - before.at < grace_s:
                    decision = _WAITING  # a restarted planner will know it soon
            if before.decision.status and observed.now - before.at < CONDITION_SYNC_TIMEOUT_S:
                continue
            same = decision == before.decision
            if not decision.status and (same or observed.now - before.at < pause_s):
                continue
        found.append(ConditionUpdate(pod, decision))
    return tuple(found)


def decide_gate(observed: ObservedState, pod: ObservedPod, grace_s: float, max_wait_s: float) -> GateDecision:
    """Decide whether the Pod may serve, and the reason."""
    ready_s = observed.ready_s(pod)
    is_overdue = ready_s is not None and ready_s >= max_wait_s
    is_serving = is_ready(pod) or is_overdue
    in_grace_period = is_overdue or (is_serving and ready_s is not None and ready_s >= grace_s)
    views, forks = observed.instances.get(pod.uid, ()), latest_forks(observed.forks.get(pod.uid, ()))
    if views:
        ids = {view.report.instance_id for view in views}
        forks = tuple(fork for fork in forks if fork.instance_id in ids)
    live = {fork.instance_id: fork for fork in forks if fork.finish is None}
    if views and all(_has_weights(view, live) for view in views):
        if all_ranks(pod, (view.report.rank for view in views)):
            return _served_message(forks, len(views), sum(view.report.image_bytes for view in views))
        if in_grace_period:
            return GateDecision(True, "UnknownToPlanner", "the planner does not know all of the Pod's ranks")
    if not views and forks and not live and is_serving:
        # It loaded from storage and serves no readers.
        return _served_message(forks, len(forks), sum(fork.image_bytes for fork in forks))
    if in_grace_period and observed.planner_down_for(grace_s):
        return GateDecision(True, "UnknownToPlanner", "the planner does not respond, and the containers are ready")
    if in_grace_period and not views and not live:
        return _UNKNOWN
    if is_overdue:
        warning = f"the containers have been ready for {ready_s:.0f} s, although the planner reports ranks as loading"
        return GateDecision(True, "LoadTimeout", warning)
    decision = _pending_message(views, forks, live)
    no_probe = not pod.has_readiness_probe and ready_s is not None and ready_s >= grace_s
    return _NO_PROBE if no_probe and decision == _WAITING else decision


def latest_forks(forks: Sequence[ForkInfo]) -> tuple[ForkInfo, ...]:
    """Return the last fork of each instance."""
    last: dict[str, ForkInfo] = {}
    for fork in forks:
        before = last.get(fork.instance_id)
        if before is None or fork.age_s < before.age_s:
            last[fork.instance_id] = fork
    return tuple(last.values())


def is_gate_closed(pod: ObservedPod) -> bool:
    """Return True if the Pod has a gate that is not open yet."""
    gated = names.WEIGHTS_READY in pod.gates and not pod.conditions.get(names.WEIGHTS_READY)
    return gated and not pod.deleting and not is_terminated(pod)


def _has_weights(view: InstanceInfo, live: Mapping[str, ForkInfo]) -> bool:
    """Return True if it serves: with forked weights, or with weights from a fallback after its fork ended."""
    report = view.report
    if report.state == "loading":
        return False
    return complete(report) or report.instance_id not in live


def _served_message(forks: Sequence[ForkInfo], ranks: int, nbytes: int) -> GateDecision:
    ends = {fork.finish.outcome for fork in forks if fork.finish is not None}
    if "fallback" in ends:
        return GateDecision(True, "FellBack", "the weights were loaded by a fallback")
    weights_text = f"{_ranks(ranks)} complete: {format_size(nbytes)}"
    return GateDecision(True, "Forked" if "forked" in ends else "Serving", weights_text)


def _pending_message(
    views: Sequence[InstanceInfo], forks: Sequence[ForkInfo], live: Mapping[str, ForkInfo]
) -> GateDecision:
    if live:
        received_bytes = sum(_received_fraction(fork) * fork.image_bytes for fork in forks)
        total_bytes = sum(fork.image_bytes for fork in forks)
        if received_bytes == 0 and all(fork.state == "planning" for fork in live.values()):
            reason = next((fork.reason for fork in live.values() if fork.reason), "")
            return GateDecision(False, "Planning", f"no plan yet: {reason}" if reason else "no plan yet")
        percent = min(99, int(100 * received_bytes / total_bytes)) if total_bytes else 0
        return GateDecision(False, "Receiving", f"receiving: {percent} % of {format_size(total_bytes)}")
    failed = [fork.finish for fork in forks if fork.finish is not None and fork.finish.outcome == "failed"]
    if failed:
        reason = failed[0].reasons[-1] if failed[0].reasons else "no reason reported by the planner"
        return GateDecision(False, "ForkFailed", f"fork failed: {reason}")
    if any(fork.finish is not None and fork.finish.outcome == "fallback" for fork in forks):
        return GateDecision(
            False, "FallingBack", "the weights were loaded by a fallback; the engine does not serve yet"
        )
    if views or forks:
        loading = sum(view.report.state == "loading" for view in views)
        if not loading:
            return GateDecision(
                False, "RanksMissing", f"{_ranks(len(views))} complete; the others have not requested their weights yet"
            )
        return GateDecision(False, "Starting", "the weights are complete or loading; the engine does not serve yet")
    return _WAITING


def _received_fraction(fork: ForkInfo) -> float:
    """Return the fraction of its image that a fork has received."""
    if fork.finish is not None:
        return 1.0
    if fork.progress is None or not fork.chunk_count:
        return 0.0
    return count(fork.progress.verified) / fork.chunk_count


def _ranks(number: int) -> str:
    return "1 rank is" if number == 1 else f"{number} ranks are"
