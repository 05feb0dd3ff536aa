"""Where the time of a fork went: the seconds that each cause cost it. Pure functions over an account."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rfork.cli.explain.fork_stats import ForkStats

Cause = Literal[
    "link",
    "governor",
    "storage",
    "sources",
    "repeated",
    "unsteady",
    "planning",
    "opening",
    "target",
    "fallback",
    "unknown",
]
"""`link`: as fast as its link goes. The others cost time beyond that; `unknown`: too little was told."""

OWN_WORK: Final = ("capture", "digest", "resume")
NEAR: Final = 1.25
"""A transfer that takes at most so many times its bound is as fast as its link."""
BRIEF_S: Final = 0.2
"""What took no longer is nothing to look into."""
EXPLAINS: Final = 0.6
"""A held source explains a transfer when it needs this part of its time for what it gave."""


@dataclass(frozen=True, slots=True)
class TimeLoss:
    """Seconds that a cause cost, beyond what the bytes need at the link's speed."""

    cause: Cause
    seconds: float


def time_losses(stats: ForkStats) -> list[TimeLoss]:
    """What cost time, most first; a cause that cost none is left out. No phases told: nothing is known."""
    phases = stats.phases
    found = [
        TimeLoss("planning", phases.get("plan", 0.0)),
        TimeLoss("opening", phases.get("offer", 0.0)),
        TimeLoss("target", sum(phases.get(name, 0.0) for name in OWN_WORK)),
        *_in_transfer(stats),
    ]
    if phases and stats.fork.finish is not None:
        found.append(TimeLoss("unknown", stats.seconds - sum(phases.values()) + phases.get("resume", 0.0)))
    return sorted((loss for loss in found if loss.seconds > 0), key=lambda loss: -loss.seconds)


def main_cause(stats: ForkStats) -> TimeLoss:
    """The cause that cost most, or `link` where none cost much beside what the link itself took."""
    bound_s = stats.min_transfer_s
    found = time_losses(stats)
    if not stats.phases:
        return TimeLoss("unknown", stats.seconds)
    floor_s = max(BRIEF_S, (NEAR - 1) * (bound_s if bound_s is not None else stats.transfer_s))
    if not found or found[0].seconds <= floor_s:
        return TimeLoss("link", bound_s if bound_s is not None else stats.transfer_s)
    return found[0]


def _in_transfer(stats: ForkStats) -> list[TimeLoss]:
    transfer_s, bound_s = stats.transfer_s, stats.min_transfer_s
    if transfer_s <= 0:
        return []
    if stats.storage_share >= 0.5:
        # Storage is not the link that the other forks are measured by.
        return [TimeLoss("storage", transfer_s * stats.storage_share)]
    throttled = stats.slowest_throttled
    if throttled is not None and throttled.throttled_seconds >= EXPLAINS * transfer_s:
        # What it holds its readers to is then what the fork took for its link: there is no excess to split.
        return [TimeLoss("governor", min(throttled.throttled_seconds, transfer_s))]
    if bound_s is None:
        return []
    excess_s = transfer_s - bound_s
    received = stats.fetched + stats.bytes_repeated
    repeated_s = max(0.0, min(excess_s, transfer_s * stats.bytes_repeated / received if received else 0.0))
    rest: Cause = "sources" if stats.replans or stats.reasons else "unsteady"
    return [TimeLoss("repeated", repeated_s), TimeLoss(rest, excess_s - repeated_s)]
