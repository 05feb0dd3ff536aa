"""Why a fork took as long as it did, or fell back: in one or two sentences, with what to do about it.

Pure functions over an account: no clock, no planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rfork.cli import fleet_queries, format
from rfork.cli.explain.advice import advice_on
from rfork.cli.explain.fork_stats import ForkStats
from rfork.cli.explain.time_breakdown import OWN_WORK, Cause, TimeLoss, main_cause
from rfork.weights_version import UNSTATED, is_first, short

DiagnosisType = (
    Literal["under_way", "fell_back", "failed", "interrupted", "relay", "first_of_version", "several_versions"] | Cause
)
"""How it ended, where it did not simply fork; else the cause that cost most. `relay`: what it read from was
itself still receiving; `first_of_version`: other versions are served, and not this one; `several_versions`:
the target states no version, and more than one is served."""
FASTER: Final = 1.5
"""A fork so many times as fast as the relay that it read from was not held up by it."""


NEW_VERSION: Final = (
    "Nothing, in a rollout of new weights: later instances of this version fork from it. If the weights are "
    "those of the other version, state one version for both (RFORK_VERSION)."
)
STATE_ONE: Final = (
    "State the version that the target is to get, one of those that are served: RFORK_VERSION, "
    "--rfork-version or version=."
)

Finding = tuple[str, str]
"""What happened, and what to do."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The word for what it was, what happened, and what to do; nothing to do is empty."""

    cause: DiagnosisType
    text: str
    advice: str = ""


def diagnose(stats: ForkStats) -> Diagnosis:
    """The verdict on any fork, under way or ended."""
    finish, after = stats.fork.finish, format.duration(stats.seconds)
    if (finding := _by_version(stats)) is not None:
        return finding
    if finish is None:
        return _running_diagnosis(stats)
    if finish.outcome == "fallback":
        return _fell_back(stats, finish.fallback or "its own loader")
    last = f": {stats.reasons[-1].rstrip('.')}." if stats.reasons else ", and told no reason."
    if finish.outcome == "interrupted":
        return Diagnosis("interrupted", f"It was stopped after {after}{last}")
    if finish.outcome == "failed":
        return _deadline_diagnosis(
            stats, Diagnosis("failed", f"It failed after {after}{last}", advice_on(_error_kinds(stats)))
        )
    loss = main_cause(stats)
    if loss.cause in ("link", "unsteady") and stats.upstream is not None:
        return _upstream_diagnosis(stats, stats.upstream)
    return _forked(stats, loss)


def comparison(stats: ForkStats) -> str:
    """How long it took beside the other forks of its model; empty where none is known."""
    parts = []
    if stats.median_s:
        times = stats.seconds / stats.median_s
        parts.append(f"{times:.1f} times the median fork ({_seconds_text(stats.median_s)})")
    if stats.storage_s:
        times = stats.seconds / stats.storage_s
        parts.append(f"{times:.1f} times a load from storage ({_seconds_text(stats.storage_s)})")
    return ", ".join(parts)


def _by_version(stats: ForkStats) -> Diagnosis | None:
    """Return the verdict on a fork without sources because of its version; None for every other fork."""
    fork, finish = stats.fork, stats.fork.finish
    if finish is not None and finish.outcome not in ("fallback", "failed"):
        return None
    if finish is None and fork.plan:
        return None
    reason = fork.reason if finish is None else stats.reasons[-1] if stats.reasons else ""
    why = reason.removeprefix("NoSource: ").rstrip(".")
    if UNSTATED in reason:
        return Diagnosis("several_versions", f"It got no source: {why}.", STATE_ONE)
    if not is_first(reason):
        return None
    how = "It has no source and loads by itself"
    if finish is not None:
        loaded = finish.fallback or "its own loader"
        how = f"It loaded from {loaded}" if finish.outcome == "fallback" else "It failed to load by itself"
    return Diagnosis("first_of_version", f"{how}: {why}.", NEW_VERSION)


def _no_source_reason(stats: ForkStats) -> str:
    """Return why a fork had to read storage."""
    version = stats.fork.version
    return f"no instance served version {short(version)}" if version else "nobody held the weights"


def _running_diagnosis(stats: ForkStats) -> Diagnosis:
    fork = stats.fork
    share, speed, left_s = (
        fleet_queries.verified_share(fork),
        fleet_queries.rate_of(fork),
        fleet_queries.eta_s(fork),
    )
    if not fork.plan:
        why = fork.reason or "the planner has no source for it"
        advice = "If nothing comes it falls back by itself (RFORK_NO_SOURCE_TIMEOUT_S, then RFORK_DEADLINE_S)."
        return Diagnosis("under_way", f"It waits for a source: {why}.", advice)
    if left_s is None:
        text = f"It reads nothing at the moment: {share:.0%} verified after {_seconds_text(stats.seconds)}."
        return Diagnosis("under_way", text, "If its source has stalled, it asks for another by itself.")
    text = f"It is under way: {share:.0%} verified, {format.rate(speed)}, about {_seconds_text(left_s)} to go."
    throttled = stats.slowest_throttled
    if throttled is not None and throttled.rate_limit is not None and speed >= 0.5 * throttled.rate_limit:
        return Diagnosis(
            "under_way",
            f"{text} {_throttled_text(throttled.source, throttled.rate_limit)}.",
            _raise_limit_hint(throttled.source),
        )
    return Diagnosis("under_way", text)


def _fell_back(stats: ForkStats, fallback_name: str) -> Diagnosis:
    error_kinds = _error_kinds(stats)
    if not stats.reasons:
        return Diagnosis("fell_back", f"It loaded from {fallback_name}, and told no reason.", advice_on(error_kinds))
    text = f"It loaded from {fallback_name} because of {stats.reasons[-1].rstrip('.')}."
    if error_kinds[:-1]:
        text += f" Before that: {_counted(error_kinds[:-1])}."
    return _deadline_diagnosis(stats, Diagnosis("fell_back", text, advice_on(error_kinds)))


def _deadline_diagnosis(stats: ForkStats, diagnosis: Diagnosis) -> Diagnosis:
    """Where it ran out of time, and a source held its readers back, that is why."""
    throttled = stats.slowest_throttled
    if throttled is None or throttled.rate_limit is None or _error_kinds(stats)[-1:] != ["DeadlineExceeded"]:
        return diagnosis
    return Diagnosis(
        diagnosis.cause,
        f"{diagnosis.text} {_throttled_text(throttled.source, throttled.rate_limit)}.",
        _raise_limit_hint(throttled.source),
    )


def _forked(stats: ForkStats, loss: TimeLoss) -> Diagnosis:
    explain = EXPLANATIONS.get(loss.cause)
    if explain is None:
        return _at_link_speed(stats) if loss.cause == "link" else _unknown(stats)
    text, advice = explain(stats, f"{_seconds_text(loss.seconds)} of {_seconds_text(stats.seconds)}")
    return Diagnosis(loss.cause, text, advice)


def _upstream_diagnosis(stats: ForkStats, relay: ForkStats) -> Diagnosis:
    """It read from a relay, and can be no faster than what that reads itself."""
    name = format.short(relay.fork.instance_id)
    if stats.mean_rate > FASTER * relay.mean_rate:
        return _forked(stats, main_cause(stats))
    text = f"It read from {name}, which was itself still receiving, at {format.rate(relay.mean_rate)}."
    first = relay
    while first.upstream is not None:
        first = first.upstream
    above = diagnose(first)
    head = format.short(first.fork.instance_id)
    return Diagnosis("relay", f"{text} At the head of that chain, {head}: {above.text}", above.advice)


def _governor(stats: ForkStats, lost: str) -> Finding:
    throttled = stats.slowest_throttled
    if throttled is None or throttled.rate_limit is None:
        raise ValueError("no source was held")
    served_text = f"the {format.size(throttled.nbytes)} that it gave took {lost}"
    return f"{_throttled_text(throttled.source, throttled.rate_limit)}: {served_text}.", _raise_limit_hint(
        throttled.source
    )


def _storage(stats: ForkStats, lost: str) -> Finding:
    return (
        f"It read {stats.storage_share:.0%} from storage, since {_no_source_reason(stats)}: {lost}.",
        "Keep a seed running, or put the snapshot on faster storage.",
    )


def _sources(stats: ForkStats, lost: str) -> Finding:
    error_kinds = _error_kinds(stats)
    sentences = [_counted(error_kinds)] if error_kinds else []
    if stats.replans:
        sentences.append(f"planned again {format.plural(stats.replans, 'time')}")
    return f"Its sources failed or fell behind ({'; '.join(sentences)}): about {lost}.", advice_on(error_kinds)


def _repeated(stats: ForkStats, lost: str) -> Finding:
    again = format.size(stats.bytes_repeated)
    return f"{again} had to be read again, which took about {lost}.", advice_on(_error_kinds(stats))


def _unsteady(stats: ForkStats, lost: str) -> Finding:
    return (
        f"Its link did {format.rate(stats.link or 0.0)} in its best second, but not throughout: "
        f"that cost about {lost}.",
        "Its link, its CPU or its sources had other work then: look at their load. Fewer readers a source "
        "(RFORK_MAX_READERS) or more seeds help.",
    )


def _planning(stats: ForkStats, lost: str) -> Finding:
    return (
        f"It waited for the planner's answer: {lost}.",
        "Look at the planner's load (/metrics); where a scale-up was announced, at RFORK_PLANNER_SCALEUP_WAIT_S.",
    )


def _opening(stats: ForkStats, lost: str) -> Finding:
    return (
        f"It opened its own snapshot or checkpoint, since {_no_source_reason(stats)}: {lost}.",
        "Keep a seed running, or look at the disk or the object store that it opened.",
    )


def _target(stats: ForkStats, lost: str) -> Finding:
    named = ", ".join(f"{name} {_seconds_text(stats.phases[name])}" for name in OWN_WORK if name in stats.phases)
    return (
        f"The target's own work took most ({named}): {lost}.",
        "Its CPU or GPU is busy or slow: `rfork doctor` there says what digests its memory.",
    )


EXPLANATIONS: Final[dict[Cause, Callable[[ForkStats, str], Finding]]] = {
    "governor": _governor,
    "storage": _storage,
    "sources": _sources,
    "repeated": _repeated,
    "unsteady": _unsteady,
    "planning": _planning,
    "opening": _opening,
    "target": _target,
}
"""By cause, what to say of an account and of the seconds lost."""


def _at_link_speed(stats: ForkStats) -> Diagnosis:
    if stats.link is None:
        text = f"Nothing held it up; its transfer of {_seconds_text(stats.transfer_s)} was too short to measure a link."
        return Diagnosis("link", text)
    text = f"Nothing held it up: it ran at {format.rate(stats.link)}, the speed that its link showed."
    transports = sorted({each.transport for each in stats.sources if each.transport is not None})
    used = f" than {', '.join(transports)}" if transports else ""
    advice = f"Only a faster way{used} makes it faster: `rfork doctor` on both hosts lists them."
    return Diagnosis("link", text, advice)


def _unknown(stats: ForkStats) -> Diagnosis:
    if not stats.phases:
        text = f"It took {_seconds_text(stats.seconds)}, and its rfork is too old to tell in which phase."
        return Diagnosis("unknown", text, "Update rfork on the target to learn more.")
    left_s = stats.seconds - sum(stats.phases.values())
    text = f"{_seconds_text(left_s)} of {_seconds_text(stats.seconds)} are in no phase that it told of."
    return Diagnosis("unknown", text, "See the target's own log around that time.")


def _throttled_text(source: str, rate_limit: int) -> str:
    return f"{format.format_source(source)} held all its readers to {format.rate(rate_limit)}"


def _raise_limit_hint(source: str) -> str:
    return (
        f"Raise RFORK_MAX_EGRESS_BYTES_PER_S on {format.format_source(source)}, or start another seed. Where it has no such "
        "setting, its own work was slow (RFORK_MAX_LATENCY_RATIO)."
    )


def _counted(error_kinds: Sequence[str]) -> str:
    counts = Counter(error_kinds).most_common(3)
    return ", ".join(kind if count == 1 else f"{count} times {kind}" for kind, count in counts)


def _error_kinds(stats: ForkStats) -> list[str]:
    return [fleet_queries.error_kind_of(reason) for reason in stats.reasons]


def _seconds_text(seconds: float) -> str:
    return format.duration(seconds)
