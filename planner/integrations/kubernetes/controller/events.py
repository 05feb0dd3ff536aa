"""What people are told by Events: how each Pod's fork ended, what the webhook could not do, what is expected.

A Pod that loads by itself as the first of its version is normal: each rollout to new weights has one.

Each thing is told once: a replica that comes to lead tells what happens from then on. What happened before,
the one that led before has told; what happened while none led stands in the planner's lists and log alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import EventType, ObjectRef, ObservedPod
from planner.integrations.kubernetes.controller.observed_state import (
    ObservedState,
    PlannerSnapshot,
    all_ranks,
    format_duration,
    format_size,
    is_injected,
    is_ready,
    is_seed,
    is_terminated,
    pod_uid,
)
from planner.integrations.kubernetes.controller.owner_refs import OwnerIndex
from planner.integrations.kubernetes.controller.pending_replicas import PendingScaleUp
from planner.integrations.kubernetes.controller.readiness_gate import is_gate_closed, latest_forks
from planner.integrations.kubernetes.controller.version_mix import VersionMix
from planner.policy.reasons import served_versions_phrase
from rfork.schema import ForkInfo, ForkResult, ScaleUpInfo, source_kind
from rfork.weights_version import is_first, is_unnamed, short

MAX_POD_AGE_S: Final = 300.0
"""Only Pods younger than that are told that the webhook did not see them."""
RANK_WAIT_S: Final = 60.0
"""How long the end of a rank's fork waits for those of ranks that the planner has not heard of."""
MAX_EVENTS: Final = 1000
"""Bytes of a message that the API server takes for sure."""
PLANNER_DOWN: Final = "PlannerAway"
PLANNER_UP: Final = "PlannerBack"
_ERROR: Final = re.compile(r"^[A-Z]\w*: ")


@dataclass(frozen=True)
class EventToEmit:
    """An Event to write."""

    subject: ObjectRef
    event_type: EventType
    reason: str
    message: str
    keys: frozenset[str]
    """What has been told then."""


def decide(observed: ObservedState, emitted: AbstractSet[str]) -> tuple[EventToEmit, ...]:
    """Events about Pods: how their forks ended and what the webhook did, of which nothing is in `emitted`."""
    found: list[EventToEmit] = []
    for pod in observed.pods.values():
        found += _webhook_events(observed, pod, emitted)
        forks = observed.forks.get(pod.uid)
        if forks is not None:
            found += _fork_events(observed, pod, forks, emitted)
    return tuple(found)


def keys_of_finished_forks(snapshot: PlannerSnapshot) -> frozenset[str]:
    """What a replica that comes to lead need not tell: the forks that had ended at its first look."""
    return frozenset(_key(fork) for fork in snapshot.forks if fork.finish is not None)


def keys_of_existing_pods(pods: Iterable[ObservedPod]) -> frozenset[str]:
    """The same of what the webhook did to the Pods that are there when it begins to lead."""
    return frozenset(_webhook_key(pod.uid) for pod in pods)


def scaleup_event(one: PendingScaleUp, view: ScaleUpInfo) -> EventToEmit:
    """A scale-up was announced; `view` is the planner's answer."""
    number = one.scaleup.replicas
    of_version = f" of version {short(one.scaleup.version)}" if one.scaleup.version is not None else ""
    replicas = f"1 replica{of_version} is" if number == 1 else f"{number} replicas{of_version} are"
    return EventToEmit(
        one.workload_ref, "Normal", "ScaleUp", _truncate(f"{replicas} expected: {view.reason}"), frozenset()
    )


def affected_workloads(observed: ObservedState, pending: Iterable[str]) -> dict[str, ObjectRef]:
    """Workloads whose Pods start now, by UID: those `pending`, and those with a gate to be opened."""
    found = {uid: observed.workloads[uid].ref for uid in pending if uid in observed.workloads}
    owners = OwnerIndex(observed.workloads.values())
    for pod in filter(is_gate_closed, observed.pods.values()):
        workload = owners.of(pod)
        if workload is not None:
            found[workload.uid] = workload.ref
    return found


def planner_down_event(subject: ObjectRef) -> EventToEmit:
    """The planner does not answer while this workload's replicas come."""
    message = "the planner does not answer: replicas that start now load by themselves"
    return EventToEmit(subject, "Warning", PLANNER_DOWN, message, frozenset())


def planner_up_event(subject: ObjectRef) -> EventToEmit:
    """It answers again."""
    return EventToEmit(subject, "Normal", PLANNER_UP, "the planner answers again", frozenset())


def mixed_versions(mix: VersionMix, since: float, limit_s: float) -> EventToEmit:
    """Pods of one workload have several versions of a model for longer than a rollout takes."""
    counts = sorted(mix.pods.items(), key=lambda each: (-each[1], each[0]))
    listed = ", ".join(
        f"{number} Pod{' has' if number == 1 else 's have'} {short(version)}" for version, number in counts
    )
    message = (
        f"{len(counts)} versions of {mix.model} for more than {format_duration(limit_s)}: {listed}: "
        "finish the rollout, or roll back"
    )
    key = f"{mix.workload_ref.uid}/versions/{since}"
    return EventToEmit(mix.workload_ref, "Warning", "MixedVersions", _truncate(message), frozenset({key}))


def _webhook_events(observed: ObservedState, pod: ObservedPod, emitted: AbstractSet[str]) -> Iterable[EventToEmit]:
    key = _webhook_key(pod.uid)
    if key in emitted or is_terminated(pod):
        return
    refused, notes = pod.annotations.get(names.REJECTED), pod.annotations.get(names.NOTES)
    if refused is not None:
        message = f"this Pod is left as it was: {refused}"
        yield EventToEmit(pod.ref, "Warning", "NotInjected", _truncate(message), frozenset({key}))
    elif notes is not None:
        yield EventToEmit(pod.ref, "Warning", "PartlyInjected", _truncate(notes), frozenset({key}))
    elif (
        not is_injected(pod)
        and pod.annotations.get(names.INJECT) != "false"
        and observed.now - pod.created_at < MAX_POD_AGE_S
    ):
        message = "the webhook did not see this Pod: it loads by itself"
        yield EventToEmit(pod.ref, "Warning", "NotSeen", message, frozenset({key}))


def _fork_events(
    observed: ObservedState, pod: ObservedPod, forks: Sequence[ForkInfo], emitted: AbstractSet[str]
) -> Iterable[EventToEmit]:
    if any(fork.finish is None for fork in forks):
        return
    last = latest_forks(forks)
    new = [fork for fork in last if _key(fork) not in emitted]
    ends = [fork.finish for fork in new if fork.finish is not None and fork.finish.outcome != "interrupted"]
    if not ends:
        return
    others = not all_ranks(pod, (fork.rank for fork in last)) and not is_ready(pod)
    if others and observed.now - max(_ended_at(observed, fork) for fork in new) < RANK_WAIT_S:
        return
    keys = frozenset(map(_key, new))
    event_type, reason, message = _first_of_version(observed, pod, new) or _outcome_event(observed, pod, ends)
    version = next((fork.version for fork in new if fork.version and not is_unnamed(fork.version)), None)
    if reason == "Forked" and version is not None:
        message = f"{message}, version {short(version)}"
    yield EventToEmit(pod.ref, event_type, reason, _truncate(message), keys)


def _first_of_version(
    observed: ObservedState, pod: ObservedPod, forks: Sequence[ForkInfo]
) -> tuple[EventType, str, str] | None:
    """Return the Event of a Pod that loaded by itself while only other versions were served; else None."""
    if not all(fork.finish is not None and _loaded_from_storage(fork.finish) for fork in forks):
        return None
    for fork in forks:
        others = Counter(
            view.version
            for view in observed.snapshot.instances
            if view.version is not None
            and view.version != fork.version
            and is_seed(view)
            and (view.report.model, view.report.rank.key) == (fork.model, fork.rank.key)
        )
        if fork.version is not None and others:
            message = f"loads by itself: first of version {short(fork.version)}; {served_versions_phrase(others)}"
            return "Normal", "FirstOfVersion", message
    return None


def _loaded_from_storage(finish: ForkResult) -> bool:
    """Return whether the target read no peer, and no source failed it."""
    if finish.outcome == "forked":
        return bool(finish.sources) and all(source_kind(source) != "peer" for source in finish.sources)
    return finish.outcome == "fallback" and any(map(is_first, finish.reasons[-1:]))


def _outcome_event(
    observed: ObservedState, pod: ObservedPod, finishes: Sequence[ForkResult]
) -> tuple[EventType, str, str]:
    failed = [finish for finish in finishes if finish.outcome == "failed"]
    if failed:
        return (
            "Warning",
            "ForkFailed",
            f"the fork failed: {_why(failed[0])}{_fraction_text(failed, finishes)}",
        )
    fell_back = [finish for finish in finishes if finish.outcome == "fallback"]
    if fell_back:
        to = fell_back[0].fallback or "its own loader"
        return (
            "Warning",
            "FellBack",
            f"fell back to {to}: {_why(fell_back[0])}{_fraction_text(fell_back, finishes)}",
        )
    return _forked_message(observed, pod, finishes)


def _forked_message(
    observed: ObservedState, pod: ObservedPod, finishes: Sequence[ForkResult]
) -> tuple[EventType, str, str]:
    bytes_by_source: dict[str, int] = {}
    peers = False
    pod_by_instance = {view.report.instance_id: view.report.placement.pod for view in observed.unknown_pods}
    for finish in finishes:
        for source, nbytes in finish.sources.items():
            peer = source_kind(source) == "peer"
            name = _name(observed, pod, source, pod_by_instance) if peer else source
            bytes_by_source[name] = bytes_by_source.get(name, 0) + nbytes
            peers = peers or peer
    seconds = max(finish.seconds for finish in finishes)
    total_text = format_size(sum(bytes_by_source.values()))
    if not bytes_by_source:
        return "Normal", "Forked", f"forked in {seconds:.1f} s"
    first = min(bytes_by_source, key=lambda name: (-bytes_by_source[name], name))
    sources = "1 source" if len(bytes_by_source) == 1 else f"{len(bytes_by_source)} sources"
    if not peers:
        return "Normal", "Loaded", f"read {total_text} from {first} in {seconds:.1f} s, for itself and others"
    return "Normal", "Forked", f"forked {total_text} from {first} in {seconds:.1f} s, {sources}"


def _name(
    observed: ObservedState, pod: ObservedPod, instance_id: str, pod_by_instance: Mapping[str, str | None]
) -> str:
    """A source's Pod as people call it: without the namespace where that is the reader's own."""
    uid = pod_uid(instance_id, observed.pods, observed.deleted)
    if uid is not None:
        key = (observed.pods.get(uid) or observed.deleted[uid]).key
    else:
        key = pod_by_instance.get(instance_id) or instance_id
    return key.removeprefix(f"{pod.namespace}/")


def _why(finish: ForkResult) -> str:
    return _ERROR.sub("", finish.reasons[-1]) if finish.reasons else "no reason was given"


def _fraction_text(some: Sequence[ForkResult], all_of_them: Sequence[ForkResult]) -> str:
    return f" ({len(some)} of {len(all_of_them)} ranks)" if len(all_of_them) > 1 else ""


def _ended_at(observed: ObservedState, fork: ForkInfo) -> float:
    return observed.snapshot.at - fork.age_s + (fork.finish.seconds if fork.finish is not None else 0.0)


def _key(fork: ForkInfo) -> str:
    # With the outcome: a fork that the planner gave up may go on, and end once more.
    return f"{fork.fork_id}/{fork.finish.outcome if fork.finish is not None else ''}"


def _webhook_key(uid: str) -> str:
    return f"{uid}/webhook"


def _truncate(message: str) -> str:
    """One line, of a length that the API server takes."""
    line = "; ".join(filter(None, map(str.strip, message.splitlines())))
    encoded = line.encode()
    return line if len(encoded) <= MAX_EVENTS else encoded[: MAX_EVENTS - 3].decode(errors="ignore") + "…"
