"""Diagnosis of a fork: the main cause of its duration or failure, in one or two sentences, with advice.

Pure functions over `ForkStats`: no clock, no planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rfork.cli import fleet_queries, formatters
from rfork.cli.explain.advice import DEFAULT_ADVICE, advice_on
from rfork.cli.explain.fork_stats import ForkStats
from rfork.cli.explain.time_breakdown import LOCAL_PHASES, Cause, TimeLoss, main_cause
from rfork.weights_version import UNSTATED, is_first, short

DiagnosisType = (
    Literal["running", "fallback", "failed", "interrupted", "relay", "first_of_version", "several_versions"] | Cause
)
"""The state of a fork that did not succeed, or the largest cause of lost time.

`relay`: its source was still receiving; `first_of_version`: only other versions are served;
`several_versions`: the target states no version and more than one is served.
"""
MAX_RELAY_SPEEDUP: Final = 1.5
"""A fork that is faster than its relay by more than this factor was not slowed down by it."""

NEW_VERSION_ADVICE: Final = (
    "None needed during a rollout of new weights: later instances of this version fork from this one. If both "
    "versions are the same weights, set one RFORK_VERSION for both."
)
UNSTATED_VERSION_ADVICE: Final = (
    "State the version that the target should get, one of those served: RFORK_VERSION, --rfork-version or version=."
)

Finding = tuple[str, str]
"""Cause of a fork's result, with advice."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cause, description and advice; `advice` is empty if nothing needs to be done."""

    cause: DiagnosisType
    text: str
    advice: str = ""


def diagnose(stats: ForkStats) -> Diagnosis:
    """Return the diagnosis of a fork, running or finished."""
    finish, after = stats.fork.finish, formatters.duration(stats.seconds)
    if (finding := _by_version(stats)) is not None:
        return finding
    if finish is None:
        return _running_diagnosis(stats)
    if finish.outcome == "fallback":
        return _fell_back(stats, finish.fallback or "the engine's loader")
    last = f": {stats.reasons[-1].rstrip('.')}." if stats.reasons else ", without a reported reason."
    if finish.outcome == "interrupted":
        return Diagnosis("interrupted", f"The fork was stopped after {after}{last}")
    if finish.outcome == "failed":
        return _deadline_diagnosis(
            stats, Diagnosis("failed", f"The fork failed after {after}{last}", advice_on(_error_kinds(stats)))
        )
    loss = main_cause(stats)
    if loss.cause in ("link", "unsteady") and stats.upstream is not None:
        return _upstream_diagnosis(stats, stats.upstream)
    return _forked(stats, loss)


def comparison(stats: ForkStats) -> str:
    """Compare the duration with other forks and loads of the model; empty if there are none."""
    parts = []
    if stats.median_s:
        ratio = stats.seconds / stats.median_s
        parts.append(f"{ratio:.1f}x the median fork ({_seconds_text(stats.median_s)})")
    if stats.storage_s:
        ratio = stats.seconds / stats.storage_s
        parts.append(f"{ratio:.1f}x the median load from storage ({_seconds_text(stats.storage_s)})")
    return ", ".join(parts)


def _by_version(stats: ForkStats) -> Diagnosis | None:
    """Return the diagnosis of a fork that has no sources because of its version; None for other forks."""
    fork, finish = stats.fork, stats.fork.finish
    if finish is not None and finish.outcome not in ("fallback", "failed"):
        return None
    if finish is None and fork.plan:
        return None
    reason = fork.reason if finish is None else stats.reasons[-1] if stats.reasons else ""
    detail = reason.removeprefix("NoSource: ").rstrip(".")
    if UNSTATED in reason:
        return Diagnosis("several_versions", f"No source: {detail}.", UNSTATED_VERSION_ADVICE)
    if not is_first(reason):
        return None
    action = "No source, so the target loads without peers"
    if finish is not None:
        loaded = finish.fallback or "the engine's loader"
        action = f"The target loaded from {loaded}" if finish.outcome == "fallback" else "Loading without peers failed"
    return Diagnosis("first_of_version", f"{action}: {detail}.", NEW_VERSION_ADVICE)


def _no_source_reason(stats: ForkStats) -> str:
    """Return why a fork had to read from storage."""
    version = stats.fork.version
    return f"no instance served version {short(version)}" if version else "no instance had the weights"


def _running_diagnosis(stats: ForkStats) -> Diagnosis:
    fork = stats.fork
    share, speed, left_s = (
        fleet_queries.verified_share(fork),
        fleet_queries.rate_of(fork),
        fleet_queries.eta_s(fork),
    )
    if not fork.plan:
        reason = fork.reason or "the planner has no source"
        advice = (
            "If no source appears within RFORK_NO_SOURCE_TIMEOUT_S, or RFORK_DEADLINE_S passes, the target falls back "
            "automatically."
        )
        return Diagnosis("running", f"Waiting for a source: {reason}.", advice)
    if left_s is None:
        text = f"No data is arriving: {share:.0%} verified after {_seconds_text(stats.seconds)}."
        return Diagnosis("running", text, "If the source has stalled, the target requests another one automatically.")
    text = f"Running: {share:.0%} verified, {formatters.rate(speed)}, about {_seconds_text(left_s)} left."
    throttled = stats.slowest_throttled
    if throttled is not None and throttled.rate_limit is not None and speed >= 0.5 * throttled.rate_limit:
        return Diagnosis(
            "running",
            f"{text} {_throttled_text(throttled.source, throttled.rate_limit)}.",
            _raise_limit_hint(throttled.source),
        )
    return Diagnosis("running", text)


def _fell_back(stats: ForkStats, fallback_name: str) -> Diagnosis:
    error_kinds = _error_kinds(stats)
    if not stats.reasons:
        return Diagnosis(
            "fallback", f"The target loaded from {fallback_name} without reporting a reason.", advice_on(error_kinds)
        )
    text = f"The target loaded from {fallback_name} because of {stats.reasons[-1].rstrip('.')}."
    if error_kinds[:-1]:
        text += f" Earlier errors: {_counted(error_kinds[:-1])}."
    return _deadline_diagnosis(stats, Diagnosis("fallback", text, advice_on(error_kinds)))


def _deadline_diagnosis(stats: ForkStats, diagnosis: Diagnosis) -> Diagnosis:
    """Add the source's rate limit to the diagnosis if the fork ran out of time because of it."""
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
    """Return the diagnosis of a fork that read from a relay, which limits its speed."""
    name = formatters.short(relay.fork.instance_id)
    if stats.mean_rate > MAX_RELAY_SPEEDUP * relay.mean_rate:
        return _forked(stats, main_cause(stats))
    text = f"It read from {name}, which was still receiving, at {formatters.rate(relay.mean_rate)}."
    first = relay
    while first.upstream is not None:
        first = first.upstream
    first_diagnosis = diagnose(first)
    first_name = formatters.short(first.fork.instance_id)
    text += f" First relay in the chain ({first_name}): {first_diagnosis.text}"
    return Diagnosis("relay", text, first_diagnosis.advice)


def _rate_limit(stats: ForkStats, lost: str) -> Finding:
    throttled = stats.slowest_throttled
    if throttled is None or throttled.rate_limit is None:
        raise ValueError("no source has a rate limit")
    sent = f"sending {formatters.size(throttled.nbytes)} took {lost}"
    return f"{_throttled_text(throttled.source, throttled.rate_limit)}: {sent}.", _raise_limit_hint(throttled.source)


def _storage(stats: ForkStats, lost: str) -> Finding:
    return (
        f"It read {stats.storage_share:.0%} from storage, because {_no_source_reason(stats)}: {lost}.",
        "Keep a seed running, or move the snapshot to faster storage.",
    )


def _sources(stats: ForkStats, lost: str) -> Finding:
    error_kinds = _error_kinds(stats)
    details = [_counted(error_kinds)] if error_kinds else []
    if stats.replans:
        details.append(formatters.plural(stats.replans, "replan"))
    return f"Its sources failed or were too slow ({'; '.join(details)}): about {lost} lost.", advice_on(error_kinds)


def _repeated(stats: ForkStats, lost: str) -> Finding:
    reread = formatters.size(stats.bytes_repeated)
    return f"{reread} had to be read again: about {lost} lost.", advice_on(_error_kinds(stats))


def _unsteady(stats: ForkStats, lost: str) -> Finding:
    return (
        f"Its link peaked at {formatters.rate(stats.link or 0.0)} but did not sustain it: about {lost} lost.",
        "The link, the CPU or the sources were busy; check their load. Fewer readers per source "
        "(RFORK_MAX_READERS) or more seeds help.",
    )


def _planning(stats: ForkStats, lost: str) -> Finding:
    return (
        f"It waited for a plan: {lost}.",
        "Check the planner's load (/metrics) and, if a scale-up was announced, RFORK_PLANNER_SCALEUP_WAIT_S.",
    )


def _opening(stats: ForkStats, lost: str) -> Finding:
    return (
        f"It opened its own snapshot or checkpoint, because {_no_source_reason(stats)}: {lost}.",
        "Keep a seed running, or check the disk or object store that it opened.",
    )


def _target(stats: ForkStats, lost: str) -> Finding:
    named = ", ".join(f"{name} {_seconds_text(stats.phases[name])}" for name in LOCAL_PHASES if name in stats.phases)
    return (
        f"Local work on the target took most of the time ({named}): {lost}.",
        "Its CPU or GPU is busy or slow: `rfork doctor` on the target shows what computes its digests.",
    )


EXPLANATIONS: Final[dict[Cause, Callable[[ForkStats, str], Finding]]] = {
    "rate_limit": _rate_limit,
    "storage": _storage,
    "sources": _sources,
    "repeated": _repeated,
    "unsteady": _unsteady,
    "planning": _planning,
    "opening": _opening,
    "target": _target,
}
"""Functions by cause that describe the lost seconds."""


def _at_link_speed(stats: ForkStats) -> Diagnosis:
    if stats.link is None:
        text = f"No delay found; the transfer of {_seconds_text(stats.transfer_s)} was too short to measure the link."
        return Diagnosis("link", text)
    text = f"No delay found: it ran at {formatters.rate(stats.link)}, the measured speed of its link."
    transports = sorted({each.transport for each in stats.sources if each.transport is not None})
    used = f" than {', '.join(transports)}" if transports else ""
    advice = f"Only a faster transport{used} would help: `rfork doctor` on both hosts lists the transports."
    return Diagnosis("link", text, advice)


def _unknown(stats: ForkStats) -> Diagnosis:
    if not stats.phases:
        text = f"It took {_seconds_text(stats.seconds)}; its rfork version is too old to report phases."
        return Diagnosis("unknown", text, "Upgrade rfork on the target.")
    left_s = stats.seconds - sum(stats.phases.values())
    text = f"{_seconds_text(left_s)} of {_seconds_text(stats.seconds)} are in no reported phase."
    return Diagnosis("unknown", text, DEFAULT_ADVICE)


def _throttled_text(source: str, rate_limit: int) -> str:
    return f"{formatters.source(source)} limited its readers to {formatters.rate(rate_limit)}"


def _raise_limit_hint(source: str) -> str:
    return (
        f"Raise RFORK_MAX_EGRESS_BYTES_PER_S on {formatters.source(source)}, or start another seed. If that is not "
        "set there, reads were throttled because its own requests were slow (RFORK_MAX_LATENCY_RATIO)."
    )


def _counted(error_kinds: Sequence[str]) -> str:
    counts = Counter(error_kinds).most_common(3)
    return ", ".join(kind if count == 1 else f"{count}x {kind}" for kind, count in counts)


def _error_kinds(stats: ForkStats) -> list[str]:
    return [fleet_queries.error_kind_of(reason) for reason in stats.reasons]


def _seconds_text(seconds: float) -> str:
    return formatters.duration(seconds)
