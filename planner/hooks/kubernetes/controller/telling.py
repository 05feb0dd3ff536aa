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

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.cluster import EventType, ObjectRef, PodSeen
from planner.hooks.kubernetes.controller.coming import Coming
from planner.hooks.kubernetes.controller.mixing import Mix
from planner.hooks.kubernetes.controller.owners import Owners
from planner.hooks.kubernetes.controller.readiness import latest, waits
from planner.hooks.kubernetes.controller.scene import (
    Look,
    Scene,
    all_ranks,
    answers,
    duration,
    ended,
    is_seed,
    joins,
    pod_uid,
    size,
)
from planner.policy.reasons import served
from rfork.weights_version import is_first, is_unnamed, short
from rfork.wire import ForkFinish, ForkView, ScaleUpView, source_kind

YOUNG_S: Final = 300.0
"""Only Pods younger than that are told that the webhook did not see them."""
RANKS_S: Final = 60.0
"""How long the end of a rank's fork waits for those of ranks that the planner has not heard of."""
MOST_TOLD: Final = 1000
"""Bytes of a message that the API server takes for sure."""
AWAY: Final = "PlannerAway"
BACK: Final = "PlannerBack"
_ERROR: Final = re.compile(r"^[A-Z]\w*: ")


@dataclass(frozen=True)
class Telling:
    """An Event to write."""

    about: ObjectRef
    kind: EventType
    reason: str
    message: str
    keys: frozenset[str]
    """What has been told then."""


def decide(scene: Scene, told: AbstractSet[str]) -> tuple[Telling, ...]:
    """Events about Pods: how their forks ended and what the webhook did, of which nothing is in `told`."""
    found: list[Telling] = []
    for pod in scene.pods.values():
        found += _of_webhook(scene, pod, told)
        forks = scene.forks.get(pod.uid)
        if forks is not None:
            found += _of_forks(scene, pod, forks, told)
    return tuple(found)


def ended_before(look: Look) -> frozenset[str]:
    """What a replica that comes to lead need not tell: the forks that had ended at its first look."""
    return frozenset(_key(fork) for fork in look.forks if fork.finish is not None)


def made_before(pods: Iterable[PodSeen]) -> frozenset[str]:
    """The same of what the webhook did to the Pods that are there when it begins to lead."""
    return frozenset(_webhook_key(pod.uid) for pod in pods)


def expected(one: Coming, view: ScaleUpView) -> Telling:
    """A scale-up was announced; `view` is the planner's answer."""
    number = one.scaleup.replicas
    of_version = f" of version {short(one.scaleup.version)}" if one.scaleup.version is not None else ""
    replicas = f"1 replica{of_version} is" if number == 1 else f"{number} replicas{of_version} are"
    return Telling(one.about, "Normal", "ScaleUp", _cut(f"{replicas} expected: {view.reason}"), frozenset())


def affected(scene: Scene, coming: Iterable[str]) -> dict[str, ObjectRef]:
    """Workloads whose Pods start now, by UID: those `coming`, and those with a gate to be opened."""
    found = {uid: scene.workloads[uid].ref for uid in coming if uid in scene.workloads}
    owners = Owners(scene.workloads.values())
    for pod in filter(waits, scene.pods.values()):
        workload = owners.of(pod)
        if workload is not None:
            found[workload.uid] = workload.ref
    return found


def planner_away(about: ObjectRef) -> Telling:
    """The planner does not answer while this workload's replicas come."""
    told = "the planner does not answer: replicas that start now load by themselves"
    return Telling(about, "Warning", AWAY, told, frozenset())


def planner_back(about: ObjectRef) -> Telling:
    """It answers again."""
    return Telling(about, "Normal", BACK, "the planner answers again", frozenset())


def mixed_versions(mix: Mix, since: float, limit_s: float) -> Telling:
    """Pods of one workload have several versions of a model for longer than a rollout takes."""
    counts = sorted(mix.pods.items(), key=lambda each: (-each[1], each[0]))
    listed = ", ".join(
        f"{number} Pod{' has' if number == 1 else 's have'} {short(version)}" for version, number in counts
    )
    message = (
        f"{len(counts)} versions of {mix.model} for more than {duration(limit_s)}: {listed}: "
        "finish the rollout, or roll back"
    )
    key = f"{mix.about.uid}/versions/{since}"
    return Telling(mix.about, "Warning", "MixedVersions", _cut(message), frozenset({key}))


def _of_webhook(scene: Scene, pod: PodSeen, told: AbstractSet[str]) -> Iterable[Telling]:
    key = _webhook_key(pod.uid)
    if key in told or ended(pod):
        return
    refused, notes = pod.annotations.get(names.REFUSED), pod.annotations.get(names.NOTES)
    if refused is not None:
        message = f"this Pod is left as it was: {refused}"
        yield Telling(pod.ref, "Warning", "NotInjected", _cut(message), frozenset({key}))
    elif notes is not None:
        yield Telling(pod.ref, "Warning", "PartlyInjected", _cut(notes), frozenset({key}))
    elif (
        not joins(pod)
        and pod.annotations.get(names.INJECT) != "false"
        and scene.now - pod.created_at < YOUNG_S
    ):
        message = "the webhook did not see this Pod: it loads by itself"
        yield Telling(pod.ref, "Warning", "NotSeen", message, frozenset({key}))


def _of_forks(
    scene: Scene, pod: PodSeen, forks: Sequence[ForkView], told: AbstractSet[str]
) -> Iterable[Telling]:
    if any(fork.finish is None for fork in forks):
        return
    last = latest(forks)
    new = [fork for fork in last if _key(fork) not in told]
    ends = [fork.finish for fork in new if fork.finish is not None and fork.finish.outcome != "interrupted"]
    if not ends:
        return
    others = not all_ranks(pod, (fork.rank for fork in last)) and not answers(pod)
    if others and scene.now - max(_ended_at(scene, fork) for fork in new) < RANKS_S:
        return
    keys = frozenset(map(_key, new))
    kind, reason, message = _first_of_version(scene, pod, new) or _outcome(scene, pod, ends)
    version = next((fork.version for fork in new if fork.version and not is_unnamed(fork.version)), None)
    if reason == "Forked" and version is not None:
        message = f"{message}, version {short(version)}"
    yield Telling(pod.ref, kind, reason, _cut(message), keys)


def _first_of_version(
    scene: Scene, pod: PodSeen, forks: Sequence[ForkView]
) -> tuple[EventType, str, str] | None:
    """Return the Event of a Pod that loaded by itself while only other versions were served; else None."""
    if not all(fork.finish is not None and _loaded_alone(fork.finish) for fork in forks):
        return None
    for fork in forks:
        others = Counter(
            view.version
            for view in scene.look.instances
            if view.version is not None
            and view.version != fork.version
            and is_seed(view)
            and (view.report.model, view.report.rank.key) == (fork.model, fork.rank.key)
        )
        if fork.version is not None and others:
            message = f"loads by itself: first of version {short(fork.version)}; {served(others)}"
            return "Normal", "FirstOfVersion", message
    return None


def _loaded_alone(finish: ForkFinish) -> bool:
    """Return whether the target read no peer, and no source failed it."""
    if finish.outcome == "forked":
        return bool(finish.sources) and all(source_kind(source) != "peer" for source in finish.sources)
    return finish.outcome == "fallback" and any(map(is_first, finish.reasons[-1:]))


def _outcome(scene: Scene, pod: PodSeen, finishes: Sequence[ForkFinish]) -> tuple[EventType, str, str]:
    failed = [finish for finish in finishes if finish.outcome == "failed"]
    if failed:
        return "Warning", "ForkFailed", f"the fork failed: {_why(failed[0])}{_of(failed, finishes)}"
    fell = [finish for finish in finishes if finish.outcome == "fallback"]
    if fell:
        to = fell[0].fallback or "its own loader"
        return "Warning", "FellBack", f"fell back to {to}: {_why(fell[0])}{_of(fell, finishes)}"
    return _forked(scene, pod, finishes)


def _forked(scene: Scene, pod: PodSeen, finishes: Sequence[ForkFinish]) -> tuple[EventType, str, str]:
    given: dict[str, int] = {}
    peers = False
    placed = {view.report.instance_id: view.report.placement.pod for view in scene.strangers}
    for finish in finishes:
        for source, nbytes in finish.sources.items():
            peer = source_kind(source) == "peer"
            name = _name(scene, pod, source, placed) if peer else source
            given[name] = given.get(name, 0) + nbytes
            peers = peers or peer
    seconds = max(finish.seconds for finish in finishes)
    whole = size(sum(given.values()))
    if not given:
        return "Normal", "Forked", f"forked in {seconds:.1f} s"
    first = min(given, key=lambda name: (-given[name], name))
    sources = "1 source" if len(given) == 1 else f"{len(given)} sources"
    if not peers:
        return "Normal", "Loaded", f"read {whole} from {first} in {seconds:.1f} s, for itself and others"
    return "Normal", "Forked", f"forked {whole} from {first} in {seconds:.1f} s, {sources}"


def _name(scene: Scene, pod: PodSeen, instance_id: str, placed: Mapping[str, str | None]) -> str:
    """A source's Pod as people call it: without the namespace where that is the reader's own."""
    uid = pod_uid(instance_id, scene.pods, scene.gone)
    if uid is not None:
        key = (scene.pods.get(uid) or scene.gone[uid]).key
    else:
        key = placed.get(instance_id) or instance_id
    return key.removeprefix(f"{pod.namespace}/")


def _why(finish: ForkFinish) -> str:
    return _ERROR.sub("", finish.reasons[-1]) if finish.reasons else "no reason was given"


def _of(some: Sequence[ForkFinish], all_of_them: Sequence[ForkFinish]) -> str:
    return f" ({len(some)} of {len(all_of_them)} ranks)" if len(all_of_them) > 1 else ""


def _ended_at(scene: Scene, fork: ForkView) -> float:
    return scene.look.at - fork.age_s + (fork.finish.seconds if fork.finish is not None else 0.0)


def _key(fork: ForkView) -> str:
    # With the outcome: a fork that the planner gave up may go on, and end once more.
    return f"{fork.fork_id}/{fork.finish.outcome if fork.finish is not None else ''}"


def _webhook_key(uid: str) -> str:
    return f"{uid}/webhook"


def _cut(message: str) -> str:
    """One line, of a length that the API server takes."""
    line = "; ".join(filter(None, map(str.strip, message.splitlines())))
    whole = line.encode()
    return line if len(whole) <= MOST_TOLD else whole[: MOST_TOLD - 3].decode(errors="ignore") + "…"
