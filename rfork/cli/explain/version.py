"""The version that a fork got, and why it got that one. Pure functions over what the planner lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rfork import weights_version
from rfork.cli import format
from rfork.schema import ForkInfo, ModelInfo

Origin = Literal["own", "served", "none"]
"""`own`: the target asked for it; `served`: the target had none and took it over; `none`: it had none, and
several versions were served, or none."""

MADE_OF: Final = {
    "commit": "the commit of its model",
    "files": "the fingerprint of its files",
    "weights": "the digest of its weights",
    "update": "its weights after an update in place",
    "revision": "the revision that it was started with",
}
"""By the kind of a version, where an instance has it from. Others are stated, or recorded in a snapshot."""


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """The version of a fork. `others` are the versions that are served now, with their complete instances."""

    version: str | None
    origin: Origin
    first: bool
    others: dict[str, int]

    def words(self) -> str:
        """Return version and origin on one line; empty where the planner settled none."""
        if self.version is None:
            return ""
        named = weights_version.short(self.version)
        parts = [f"{named}, {_origin_words(self)}"]
        if self.first:
            parts.append("the first instance of it")
        return "; ".join([*parts, *self._others()])

    def _others(self) -> list[str]:
        listed = sorted(self.others.items(), key=lambda item: (-item[1], item[0]))[:4]
        if not listed:
            return []
        counted = (f"{format.plural(count, 'instance')} of {weights_version.short(name)}" for name, count in listed)
        return [f"now served besides: {', '.join(counted)}"]


def version_summary(fork: ForkInfo, models: Sequence[ModelInfo]) -> VersionSummary:
    """Return the version that a fork got, beside those of its model that are served now."""
    served: Counter[str] = Counter()
    for row in models:
        alike = (row.model, row.rank_key) == (fork.model, fork.rank.key)
        if alike and row.version and row.version != fork.version and row.seeds:
            served[row.version] += row.seeds
    reasons = (fork.reason, *(fork.finish.reasons if fork.finish is not None else ()))
    first = any(weights_version.is_first(reason) for reason in reasons)
    return VersionSummary(fork.version, _origin(fork), first, dict(served))


def _origin(fork: ForkInfo) -> Origin:
    if fork.version is not None and weights_version.is_unnamed(fork.version):
        return "none"
    return "served" if weights_version.ADOPTS_VERSION in fork.reason else "own"


def _origin_words(account: VersionSummary) -> str:
    if account.origin == "none":
        return "a name for weights of which nothing else is known"
    if account.origin == "served":
        return "taken over: the target has none of its own, and this one was served"
    scheme = (account.version or "").partition(":")[0]
    return MADE_OF.get(scheme, "as stated (RFORK_VERSION), or as its snapshot records")
