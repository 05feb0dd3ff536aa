"""Where the time of a fork went: the seconds that each cause cost it. Pure functions over an account."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rfork.cli.explain.account import Account

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
class Loss:
    """Seconds that a cause cost, beyond what the bytes need at the link's speed."""

    cause: Cause
    seconds: float


def losses(account: Account) -> list[Loss]:
    """What cost time, most first; a cause that cost none is left out. No phases told: nothing is known."""
    phases = account.phases
    found = [
        Loss("planning", phases.get("plan", 0.0)),
        Loss("opening", phases.get("offer", 0.0)),
        Loss("target", sum(phases.get(name, 0.0) for name in OWN_WORK)),
        *_in_transfer(account),
    ]
    if phases and account.fork.finish is not None:
        found.append(Loss("unknown", account.seconds - sum(phases.values()) + phases.get("resume", 0.0)))
    return sorted((loss for loss in found if loss.seconds > 0), key=lambda loss: -loss.seconds)


def main_cause(account: Account) -> Loss:
    """The cause that cost most, or `link` where none cost much beside what the link itself took."""
    bound_s = account.bound_s
    found = losses(account)
    if not account.phases:
        return Loss("unknown", account.seconds)
    floor_s = max(BRIEF_S, (NEAR - 1) * (bound_s if bound_s is not None else account.transfer_s))
    if not found or found[0].seconds <= floor_s:
        return Loss("link", bound_s if bound_s is not None else account.transfer_s)
    return found[0]


def _in_transfer(account: Account) -> list[Loss]:
    transfer_s, bound_s = account.transfer_s, account.bound_s
    if transfer_s <= 0:
        return []
    if account.storage_share >= 0.5:
        # Storage is not the link that the other forks are measured by.
        return [Loss("storage", transfer_s * account.storage_share)]
    held = account.slowest_held
    if held is not None and held.held_s >= EXPLAINS * transfer_s:
        # What it holds its readers to is then what the fork took for its link: there is no excess to split.
        return [Loss("governor", min(held.held_s, transfer_s))]
    if bound_s is None:
        return []
    excess_s = transfer_s - bound_s
    received = account.fetched + account.bytes_repeated
    repeated_s = max(0.0, min(excess_s, transfer_s * account.bytes_repeated / received if received else 0.0))
    rest: Cause = "sources" if account.replans or account.reasons else "unsteady"
    return [Loss("repeated", repeated_s), Loss(rest, excess_s - repeated_s)]
