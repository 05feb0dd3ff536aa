"""Kubernetes Events: results of forks, problems of the webhook, expected replicas, mixed versions.

A Pod that loads from storage as the first of its version is normal: each rollout of new weights has one. Several
versions in one workload are normal during a rollout, and reported if that lasts.

Each fact is reported once. A new leader reports only what happens after it took over. The previous leader
reported what happened before; what happened without a leader is only in the planner's lists and log.
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
    OwnerIndex,
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
from planner.integrations.kubernetes.controller.readiness_gate import is_gate_closed, latest_forks
from planner.integrations.kubernetes.controller.scaleups import PendingScaleUp
from planner.policy.reasons import served_versions_phrase
from rfork.schema import ForkInfo, ForkResult, ScaleUpInfo, source_type
from rfork.weights_version import is_comparable, is_first, is_unnamed, short

MAX_POD_AGE_S: Final = 300.0
"""Maximum age at which a Pod is reported as missed by the webhook."""
RANK_WAIT_S: Final = 60.0
"""Time for which the result of one rank waits for ranks that the planner does not know yet."""
MAX_MESSAGE_BYTES: Final = 1000
"""Maximum bytes of an Event message that every API server accepts."""
PLANNER_DOWN: Final = "PlannerUnavailable"
PLANNER_UP: Final = "PlannerRecovered"
_ERROR: Final = re.compile(r"^[A-Z]\w*: ")


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


@dataclass(frozen=True)
class EventToEmit:
    """An Event to write."""

    subject: ObjectRef
    event_type: EventType
    reason: str
    message: str
    keys: frozenset[str]
    """Keys of the reported facts."""


def decide(observed: ObservedState, emitted: AbstractSet[str]) -> tuple[EventToEmit, ...]:
    """Return the Events for Pods (fork results and webhook problems) whose keys are not in `emitted`."""
    found: list[EventToEmit] = []
    for pod in observed.pods.values():
        found += _webhook_events(observed, pod, emitted)
        forks = observed.forks.get(pod.uid)
        if forks is not None:
            found += _fork_events(observed, pod, forks, emitted)
    return tuple(found)


def keys_of_finished_forks(snapshot: PlannerSnapshot) -> frozenset[str]:
    """Return the keys of forks that had finished when this replica became the leader."""
    return frozenset(_key(fork) for fork in snapshot.forks if fork.finish is not None)


def keys_of_existing_pods(pods: Iterable[ObservedPod]) -> frozenset[str]:
    """Return the webhook keys of Pods that existed when this replica became the leader."""
    return frozenset(_webhook_key(pod.uid) for pod in pods)


def scaleup_event(one: PendingScaleUp, view: ScaleUpInfo) -> EventToEmit:
    """Event of an announced scale-up. `view` is the planner's response."""
    number = one.scaleup.replicas
    of_version = f" of version {short(one.scaleup.version)}" if one.scaleup.version is not None else ""
    replicas = f"1 replica{of_version} is" if number == 1 else f"{number} replicas{of_version} are"
    return EventToEmit(
        one.workload_ref, "Normal", "ScaleUp", _truncate(f"{replicas} expected: {view.reason}"), frozenset()
    )


def affected_workloads(observed: ObservedState, pending: Iterable[str]) -> dict[str, ObjectRef]:
    """Return the workloads with starting Pods by UID: those in `pending`, and those with closed gates."""
    found = {uid: observed.workloads[uid].ref for uid in pending if uid in observed.workloads}
    owners = OwnerIndex(observed.workloads.values())
    for pod in filter(is_gate_closed, observed.pods.values()):
        workload = owners.of(pod)
        if workload is not None:
            found[workload.uid] = workload.ref
    return found


def planner_down_event(subject: ObjectRef) -> EventToEmit:
    """Event: the planner does not respond while replicas of this workload start."""
    message = "the planner does not respond; replicas that start now load from storage"
    return EventToEmit(subject, "Warning", PLANNER_DOWN, message, frozenset())


def planner_up_event(subject: ObjectRef) -> EventToEmit:
    """Event: the planner responds again."""
    return EventToEmit(subject, "Normal", PLANNER_UP, "the planner responds again", frozenset())


def mixed_versions_event(mix: VersionMix, since: float, limit_s: float) -> EventToEmit:
    """Event: Pods of one workload have had several versions of a model for longer than a rollout takes."""
    counts = sorted(mix.pods.items(), key=lambda each: (-each[1], each[0]))
    listed = ", ".join(
        f"{number} Pod{' has' if number == 1 else 's have'} {short(version)}" for version, number in counts
    )
    message = (
        f"{len(counts)} versions of {mix.model} for more than {format_duration(limit_s)}: {listed}: "
        "finish the rollout or roll back"
    )
    key = f"{mix.workload_ref.uid}/versions/{since}"
    return EventToEmit(mix.workload_ref, "Warning", "MixedVersions", _truncate(message), frozenset({key}))


def _webhook_events(observed: ObservedState, pod: ObservedPod, emitted: AbstractSet[str]) -> Iterable[EventToEmit]:
    key = _webhook_key(pod.uid)
    if key in emitted or is_terminated(pod):
        return
    refused, notes = pod.annotations.get(names.REJECTED), pod.annotations.get(names.NOTES)
    if refused is not None:
        message = f"Pod left unchanged: {refused}"
        yield EventToEmit(pod.ref, "Warning", "NotInjected", _truncate(message), frozenset({key}))
    elif notes is not None:
        yield EventToEmit(pod.ref, "Warning", "PartiallyInjected", _truncate(notes), frozenset({key}))
    elif (
        not is_injected(pod)
        and pod.annotations.get(names.INJECT) != "false"
        and observed.now - pod.created_at < MAX_POD_AGE_S
    ):
        message = "the webhook was not called for this Pod; it loads without rfork"
        yield EventToEmit(pod.ref, "Warning", "WebhookBypassed", message, frozenset({key}))


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
    is_incomplete = not all_ranks(pod, (fork.rank for fork in last)) and not is_ready(pod)
    if is_incomplete and observed.now - max(_ended_at(observed, fork) for fork in new) < RANK_WAIT_S:
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
    """Return the Event of a Pod that loaded from storage because only other versions were served; else None."""
    if not all(fork.finish is not None and _loaded_from_storage(fork.finish) for fork in forks):
        return None
    for fork in forks:
        served_versions = Counter(
            view.version
            for view in observed.snapshot.instances
            if view.version is not None
            and view.version != fork.version
            and is_seed(view)
            and (view.report.model, view.report.rank.key) == (fork.model, fork.rank.key)
        )
        if fork.version is not None and served_versions:
            served = served_versions_phrase(served_versions)
            message = f"loaded from storage: first of version {short(fork.version)}; {served}"
            return "Normal", "FirstOfVersion", message
    return None


def _loaded_from_storage(finish: ForkResult) -> bool:
    """Return True if the target read from no peer, and not because a source failed."""
    if finish.outcome == "forked":
        return bool(finish.sources) and all(source_type(source) != "peer" for source in finish.sources)
    return finish.outcome == "fallback" and any(map(is_first, finish.reasons[-1:]))


def _outcome_event(
    observed: ObservedState, pod: ObservedPod, finishes: Sequence[ForkResult]
) -> tuple[EventType, str, str]:
    failed = [finish for finish in finishes if finish.outcome == "failed"]
    if failed:
        return (
            "Warning",
            "ForkFailed",
            f"fork failed: {_reason(failed[0])}{_fraction_text(failed, finishes)}",
        )
    fell_back = [finish for finish in finishes if finish.outcome == "fallback"]
    if fell_back:
        to = fell_back[0].fallback or "its own loader"
        return (
            "Warning",
            "FellBack",
            f"fell back to {to}: {_reason(fell_back[0])}{_fraction_text(fell_back, finishes)}",
        )
    return _forked_message(observed, pod, finishes)


def _forked_message(
    observed: ObservedState, pod: ObservedPod, finishes: Sequence[ForkResult]
) -> tuple[EventType, str, str]:
    bytes_by_source: dict[str, int] = {}
    peers = False
    pod_by_instance = {view.report.instance_id: view.report.placement.pod for view in observed.unmatched_instances}
    for finish in finishes:
        for source, nbytes in finish.sources.items():
            peer = source_type(source) == "peer"
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
        return "Normal", "Loaded", f"read {total_text} from {first} in {seconds:.1f} s, for itself and other instances"
    return "Normal", "Forked", f"forked {total_text} from {first} in {seconds:.1f} s, {sources}"


def _name(
    observed: ObservedState, pod: ObservedPod, instance_id: str, pod_by_instance: Mapping[str, str | None]
) -> str:
    """Return the name of a source's Pod, without the namespace if it is the target's."""
    uid = pod_uid(instance_id, observed.pods, observed.deleted)
    if uid is not None:
        key = (observed.pods.get(uid) or observed.deleted[uid]).key
    else:
        key = pod_by_instance.get(instance_id) or instance_id
    return key.removeprefix(f"{pod.namespace}/")


def _reason(finish: ForkResult) -> str:
    return _ERROR.sub("", finish.reasons[-1]) if finish.reasons else "no reason reported"


def _fraction_text(some: Sequence[ForkResult], all_of_them: Sequence[ForkResult]) -> str:
    return f" ({len(some)} of {len(all_of_them)} ranks)" if len(all_of_them) > 1 else ""


def _ended_at(observed: ObservedState, fork: ForkInfo) -> float:
    return observed.snapshot.at - fork.age_s + (fork.finish.seconds if fork.finish is not None else 0.0)


def _key(fork: ForkInfo) -> str:
    # Includes the outcome: an abandoned fork may continue and finish later.
    return f"{fork.fork_id}/{fork.finish.outcome if fork.finish is not None else ''}"


def _webhook_key(uid: str) -> str:
    return f"{uid}/webhook"


def _truncate(message: str) -> str:
    """Return one line of a length that the API server accepts."""
    line = "; ".join(filter(None, map(str.strip, message.splitlines())))
    encoded = line.encode()
    return line if len(encoded) <= MAX_MESSAGE_BYTES else encoded[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "…"
