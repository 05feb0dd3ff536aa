"""Time breakdown of a fork: the seconds lost to each cause. Pure functions over `ForkStats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rfork.cli.explain.fork_stats import ForkStats

Cause = Literal[
    "link",
    "rate_limit",
    "storage",
    "sources",
    "repeated",
    "unsteady",
    "planning",
    "opening",
    "target",
    "unknown",
]
"""`link`: the fork was as fast as its link. All others cost extra time; `unknown`: too little was reported."""

LOCAL_PHASES: Final = ("capture", "digest", "resume")
NEAR_MINIMUM: Final = 1.25
"""A transfer within this factor of its minimum time counts as limited by the link."""
MIN_LOSS_S: Final = 0.2
"""Shorter losses are ignored."""
MIN_LIMITED_SHARE: Final = 0.6
"""A rate limit explains a transfer if it accounts for at least this share of its time."""


@dataclass(frozen=True, slots=True)
class TimeLoss:
    """Seconds lost to a cause, beyond the minimum transfer time."""

    cause: Cause
    seconds: float


def time_losses(stats: ForkStats) -> list[TimeLoss]:
    """Return the causes that cost time, largest first. Nothing is known if no phases were reported."""
    phases = stats.phases
    found = [
        TimeLoss("planning", phases.get("plan", 0.0)),
        TimeLoss("opening", phases.get("offer", 0.0)),
        TimeLoss("target", sum(phases.get(name, 0.0) for name in LOCAL_PHASES)),
        *_in_transfer(stats),
    ]
    if phases and stats.fork.finish is not None:
        found.append(TimeLoss("unknown", stats.seconds - sum(phases.values()) + phases.get("resume", 0.0)))
    return sorted((loss for loss in found if loss.seconds > 0), key=lambda loss: -loss.seconds)


def main_cause(stats: ForkStats) -> TimeLoss:
    """Return the largest cause, or `link` if no cause is large compared with the transfer itself."""
    min_transfer_s = stats.min_transfer_s
    found = time_losses(stats)
    if not stats.phases:
        return TimeLoss("unknown", stats.seconds)
    floor_s = max(MIN_LOSS_S, (NEAR_MINIMUM - 1) * (min_transfer_s if min_transfer_s is not None else stats.transfer_s))
    if not found or found[0].seconds <= floor_s:
        return TimeLoss("link", min_transfer_s if min_transfer_s is not None else stats.transfer_s)
    return found[0]


def _in_transfer(stats: ForkStats) -> list[TimeLoss]:
    transfer_s, min_transfer_s = stats.transfer_s, stats.min_transfer_s
    if transfer_s <= 0:
        return []
    if stats.storage_share >= 0.5:
        # Reads from storage do not use the network link.
        return [TimeLoss("storage", transfer_s * stats.storage_share)]
    throttled = stats.slowest_throttled
    if throttled is not None and throttled.throttled_seconds >= MIN_LIMITED_SHARE * transfer_s:
        # The measured link speed is then the rate limit itself, so there is no excess to attribute.
        return [TimeLoss("rate_limit", min(throttled.throttled_seconds, transfer_s))]
    if min_transfer_s is None:
        return []
    excess_s = transfer_s - min_transfer_s
    received = stats.fetched + stats.bytes_repeated
    repeated_s = max(0.0, min(excess_s, transfer_s * stats.bytes_repeated / received if received else 0.0))
    remaining_cause: Cause = "sources" if stats.replans or stats.reasons else "unsteady"
    return [TimeLoss("repeated", repeated_s), TimeLoss(remaining_cause, excess_s - repeated_s)]
