"""Why a fork took as long as it did, or fell back: in one or two sentences, with what to do about it.

Pure functions over an account: no clock, no planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rfork.cli import fleet, units
from rfork.cli.explain.account import Account
from rfork.cli.explain.advice import advice_on
from rfork.cli.explain.causes import OWN_WORK, Cause, Loss, main_cause
from rfork.weights_version import UNSTATED, is_first, short

Kind = (
    Literal[
        "under_way", "fell_back", "failed", "interrupted", "relay", "first_of_version", "several_versions"
    ]
    | Cause
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

Told = tuple[str, str]
"""What happened, and what to do."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The word for what it was, what happened, and what to do; nothing to do is empty."""

    cause: Kind
    text: str
    advice: str = ""


def verdict(account: Account) -> Verdict:
    """The verdict on any fork, under way or ended."""
    finish, after = account.fork.finish, units.duration(account.seconds)
    if (told := _by_version(account)) is not None:
        return told
    if finish is None:
        return _under_way(account)
    if finish.outcome == "fallback":
        return _fell_back(account, finish.fallback or "its own loader")
    last = f": {account.reasons[-1].rstrip('.')}." if account.reasons else ", and told no reason."
    if finish.outcome == "interrupted":
        return Verdict("interrupted", f"It was stopped after {after}{last}")
    if finish.outcome == "failed":
        return _late(account, Verdict("failed", f"It failed after {after}{last}", advice_on(_kinds(account))))
    loss = main_cause(account)
    if loss.cause in ("link", "unsteady") and account.upstream is not None:
        return _behind(account, account.upstream)
    return _forked(account, loss)


def comparison(account: Account) -> str:
    """How long it took beside the other forks of its model; empty where none is known."""
    parts = []
    if account.median_s:
        times = account.seconds / account.median_s
        parts.append(f"{times:.1f} times the median fork ({_s(account.median_s)})")
    if account.storage_s:
        times = account.seconds / account.storage_s
        parts.append(f"{times:.1f} times a load from storage ({_s(account.storage_s)})")
    return ", ".join(parts)


def _by_version(account: Account) -> Verdict | None:
    """Return the verdict on a fork without sources because of its version; None for every other fork."""
    fork, finish = account.fork, account.fork.finish
    if finish is not None and finish.outcome not in ("fallback", "failed"):
        return None
    if finish is None and fork.plan:
        return None
    reason = fork.reason if finish is None else account.reasons[-1] if account.reasons else ""
    why = reason.removeprefix("NoSource: ").rstrip(".")
    if UNSTATED in reason:
        return Verdict("several_versions", f"It got no source: {why}.", STATE_ONE)
    if not is_first(reason):
        return None
    how = "It has no source and loads by itself"
    if finish is not None:
        loaded = finish.fallback or "its own loader"
        how = f"It loaded from {loaded}" if finish.outcome == "fallback" else "It failed to load by itself"
    return Verdict("first_of_version", f"{how}: {why}.", NEW_VERSION)


def _held_by_none(account: Account) -> str:
    """Return why a fork had to read storage."""
    version = account.fork.version
    return f"no instance served version {short(version)}" if version else "nobody held the weights"


def _under_way(account: Account) -> Verdict:
    fork = account.fork
    share, speed, left_s = fleet.verified_share(fork), fleet.rate_of(fork), fleet.eta_s(fork)
    if not fork.plan:
        why = fork.reason or "the planner has no source for it"
        advice = "If nothing comes it falls back by itself (RFORK_PATIENCE_S, then RFORK_DEADLINE_S)."
        return Verdict("under_way", f"It waits for a source: {why}.", advice)
    if left_s is None:
        text = f"It reads nothing at the moment: {share:.0%} verified after {_s(account.seconds)}."
        return Verdict("under_way", text, "If its source has stalled, it asks for another by itself.")
    text = f"It is under way: {share:.0%} verified, {units.rate(speed)}, about {_s(left_s)} to go."
    held = account.slowest_held
    if held is not None and held.held is not None and speed >= 0.5 * held.held:
        return Verdict("under_way", f"{text} {_held(held.source, held.held)}.", _unhold(held.source))
    return Verdict("under_way", text)


def _fell_back(account: Account, way: str) -> Verdict:
    kinds = _kinds(account)
    if not account.reasons:
        return Verdict("fell_back", f"It loaded from {way}, and told no reason.", advice_on(kinds))
    text = f"It loaded from {way} because of {account.reasons[-1].rstrip('.')}."
    if kinds[:-1]:
        text += f" Before that: {_counted(kinds[:-1])}."
    return _late(account, Verdict("fell_back", text, advice_on(kinds)))


def _late(account: Account, told: Verdict) -> Verdict:
    """Where it ran out of time, and a source held its readers back, that is why."""
    held = account.slowest_held
    if held is None or held.held is None or _kinds(account)[-1:] != ["DeadlinePassed"]:
        return told
    return Verdict(told.cause, f"{told.text} {_held(held.source, held.held)}.", _unhold(held.source))


def _forked(account: Account, loss: Loss) -> Verdict:
    explain = EXPLANATIONS.get(loss.cause)
    if explain is None:
        return _at_link_speed(account) if loss.cause == "link" else _unknown(account)
    text, advice = explain(account, f"{_s(loss.seconds)} of {_s(account.seconds)}")
    return Verdict(loss.cause, text, advice)


def _behind(account: Account, relay: Account) -> Verdict:
    """It read from a relay, and can be no faster than what that reads itself."""
    name = units.short(relay.fork.instance_id)
    if account.mean_rate > FASTER * relay.mean_rate:
        return _forked(account, main_cause(account))
    text = f"It read from {name}, which was itself still receiving, at {units.rate(relay.mean_rate)}."
    first = relay
    while first.upstream is not None:
        first = first.upstream
    above = verdict(first)
    head = units.short(first.fork.instance_id)
    return Verdict("relay", f"{text} At the head of that chain, {head}: {above.text}", above.advice)


def _governor(account: Account, lost: str) -> Told:
    held = account.slowest_held
    if held is None or held.held is None:
        raise ValueError("no source was held")
    gave = f"the {units.size(held.nbytes)} that it gave took {lost}"
    return f"{_held(held.source, held.held)}: {gave}.", _unhold(held.source)


def _storage(account: Account, lost: str) -> Told:
    return (
        f"It read {account.storage_share:.0%} from storage, since {_held_by_none(account)}: {lost}.",
        "Keep a seed running, or put the snapshot on faster storage.",
    )


def _sources(account: Account, lost: str) -> Told:
    kinds = _kinds(account)
    said = [_counted(kinds)] if kinds else []
    if account.replans:
        said.append(f"planned again {units.plural(account.replans, 'time')}")
    return f"Its sources failed or fell behind ({'; '.join(said)}): about {lost}.", advice_on(kinds)


def _repeated(account: Account, lost: str) -> Told:
    again = units.size(account.bytes_repeated)
    return f"{again} had to be read again, which took about {lost}.", advice_on(_kinds(account))


def _unsteady(account: Account, lost: str) -> Told:
    return (
        f"Its link did {units.rate(account.link or 0.0)} in its best second, but not throughout: "
        f"that cost about {lost}.",
        "Its link, its CPU or its sources had other work then: look at their load. Fewer readers a source "
        "(RFORK_MAX_READERS) or more seeds help.",
    )


def _planning(account: Account, lost: str) -> Told:
    return (
        f"It waited for the planner's answer: {lost}.",
        "Look at the planner's load (/metrics); where a scale-up was announced, at RFORK_PLANNER_GATHER_S.",
    )


def _opening(account: Account, lost: str) -> Told:
    return (
        f"It opened its own snapshot or checkpoint, since {_held_by_none(account)}: {lost}.",
        "Keep a seed running, or look at the disk or the object store that it opened.",
    )


def _target(account: Account, lost: str) -> Told:
    named = ", ".join(f"{name} {_s(account.phases[name])}" for name in OWN_WORK if name in account.phases)
    return (
        f"The target's own work took most ({named}): {lost}.",
        "Its CPU or GPU is busy or slow: `rfork doctor` there says what digests its memory.",
    )


EXPLANATIONS: Final[dict[Cause, Callable[[Account, str], Told]]] = {
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


def _at_link_speed(account: Account) -> Verdict:
    if account.link is None:
        text = (
            f"Nothing held it up; its transfer of {_s(account.transfer_s)} was too short to measure a link."
        )
        return Verdict("link", text)
    text = f"Nothing held it up: it ran at {units.rate(account.link)}, the speed that its link showed."
    over = sorted({each.transport for each in account.given if each.transport is not None})
    used = f" than {', '.join(over)}" if over else ""
    advice = f"Only a faster way{used} makes it faster: `rfork doctor` on both hosts lists them."
    return Verdict("link", text, advice)


def _unknown(account: Account) -> Verdict:
    if not account.phases:
        text = f"It took {_s(account.seconds)}, and its rfork is too old to tell in which phase."
        return Verdict("unknown", text, "Update rfork on the target to learn more.")
    left_s = account.seconds - sum(account.phases.values())
    text = f"{_s(left_s)} of {_s(account.seconds)} are in no phase that it told of."
    return Verdict("unknown", text, "See the target's own log around that time.")


def _held(source: str, held: int) -> str:
    return f"{units.source(source)} held all its readers to {units.rate(held)}"


def _unhold(source: str) -> str:
    return (
        f"Raise RFORK_EGRESS_RATE on {units.source(source)}, or start another seed. Where it has no such "
        "setting, its own work was slow (RFORK_LATENCY_SETPOINT)."
    )


def _counted(kinds: Sequence[str]) -> str:
    counts = Counter(kinds).most_common(3)
    return ", ".join(kind if count == 1 else f"{count} times {kind}" for kind, count in counts)


def _kinds(account: Account) -> list[str]:
    return [fleet.kind_of(reason) for reason in account.reasons]


def _s(seconds: float) -> str:
    return units.duration(seconds)
