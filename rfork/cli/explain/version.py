"""The version that a fork got, and where it comes from. Pure functions over the planner's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rfork import weights_version
from rfork.cli import formatters
from rfork.schema import ForkInfo, ModelInfo

Origin = Literal["own", "served", "none"]
"""`own`: requested by the target; `served`: adopted from the fleet; `none`: unknown."""

VERSION_ORIGINS: Final = {
    "commit": "commit of its model",
    "files": "fingerprint of its files",
    "weights": "digest of its weights",
    "update": "weights updated in place",
    "revision": "revision that it was started with",
}
"""Origin of a version by its scheme. Versions without a scheme are stated, or recorded in a snapshot."""


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """The version of a fork. `others` are other versions served now, with their number of complete instances."""

    version: str | None
    origin: Origin
    first: bool
    others: dict[str, int]

    def text(self) -> str:
        """Return version and origin on one line; empty if the version is not determined."""
        if self.version is None:
            return ""
        named = weights_version.short(self.version)
        parts = [f"{named}, {_origin_text(self)}"]
        if self.first:
            parts.append("first instance of this version")
        return "; ".join([*parts, *self._other_versions()])

    def _other_versions(self) -> list[str]:
        listed = sorted(self.others.items(), key=lambda item: (-item[1], item[0]))[:4]
        if not listed:
            return []
        counted = (f"{formatters.plural(count, 'instance')} of {weights_version.short(name)}" for name, count in listed)
        return [f"also served: {', '.join(counted)}"]


def version_summary(fork: ForkInfo, models: Sequence[ModelInfo]) -> VersionSummary:
    """Return the version that a fork got, and the other versions of its model that are served now."""
    served: Counter[str] = Counter()
    for row in models:
        same_rank = (row.model, row.rank_key) == (fork.model, fork.rank.key)
        if same_rank and row.version and row.version != fork.version and row.seeds:
            served[row.version] += row.seeds
    reasons = (fork.reason, *(fork.finish.reasons if fork.finish is not None else ()))
    first = any(weights_version.is_first(reason) for reason in reasons)
    return VersionSummary(fork.version, _origin(fork), first, dict(served))


def _origin(fork: ForkInfo) -> Origin:
    if fork.version is not None and weights_version.is_unnamed(fork.version):
        return "none"
    return "served" if weights_version.ADOPTS_VERSION in fork.reason else "own"


def _origin_text(summary: VersionSummary) -> str:
    if summary.origin == "none":
        return "placeholder for weights of unknown version"
    if summary.origin == "served":
        return "adopted from the fleet, because the target states no version"
    scheme = (summary.version or "").partition(":")[0]
    return VERSION_ORIGINS.get(scheme, "stated (RFORK_VERSION) or recorded in its snapshot")
