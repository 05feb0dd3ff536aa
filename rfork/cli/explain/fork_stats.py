"""What a fork told of itself, added up: seconds by phase, the bound, and what each source gave.

Old clients leave phases, link and transports empty: then they are not known, and stay so here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rfork.cli import fleet_queries
from rfork.schema import ForkInfo, ModelInfo, source_kind


@dataclass(frozen=True, slots=True)
class SourceStats:
    """What one source gave; `share` is its part of all that was given, from 0 to 1."""

    source: str
    nbytes: int
    share: float
    transport: str | None
    rate_limit: int | None
    """Bytes a second that it held all its readers to, where it did."""
    rate: float | None = None
    """Bytes a second that the fork told: now, or in its fastest second once it has ended; None: not told."""

    @property
    def from_storage(self) -> bool:
        """Whether it is a storage, and no instance."""
        return source_kind(self.source) != "peer"

    @property
    def throttled_seconds(self) -> float:
        """Least seconds in which it could give this, at the rate it held its readers to; 0: not held."""
        return self.nbytes / self.rate_limit if self.rate_limit else 0.0


@dataclass(frozen=True, slots=True)
class ForkStats:
    """One fork in numbers: sizes in bytes, times in seconds."""

    fork: ForkInfo
    seconds: float
    """The whole fork, or what has passed of it."""
    phases: Mapping[str, float]
    link: float | None
    """Bytes a second in its fastest second; None: not known."""
    sources: tuple[SourceStats, ...]
    reasons: tuple[str, ...]
    bytes_repeated: int
    replans: int
    median_s: float | None
    """Of the forks of its model that read all from one another."""
    storage_s: float | None
    """Of those that read all from storage."""
    upstream: ForkStats | None = None
    """Of the fork by which its main source was still getting the weights itself, if it was."""

    @classmethod
    def of(cls, fork: ForkInfo, model: ModelInfo | None = None, upstream: ForkStats | None = None) -> Self:
        """The account of a fork, and of its model's forks where `model` is known."""
        finish, last = fork.finish, fork.finish or fork.progress
        sources = fleet_queries.sources_of(fork)
        total = sum(sources.values())
        transports, rates = fleet_queries.transports_of(fork), fleet_queries.rates_of(fork)
        return cls(
            fork=fork,
            seconds=finish.seconds if finish is not None else fork.age_s,
            phases=last.phases if last is not None else {},
            link=(last.link_bytes_per_s or None) if last is not None else None,
            sources=tuple(
                SourceStats(
                    name,
                    count,
                    count / total if total else 0.0,
                    transports.get(name),
                    fork.source_rate_limits.get(name),
                    rates.get(name),
                )
                for name, count in sources.items()
            ),
            reasons=finish.reasons if finish is not None else (),
            bytes_repeated=finish.bytes_repeated if finish is not None else 0,
            replans=finish.replans if finish is not None else 0,
            median_s=model.fork_s if model is not None else None,
            storage_s=model.storage_s if model is not None else None,
            upstream=upstream,
        )

    @property
    def transfer_s(self) -> float:
        """Seconds of the transfer; 0 where they are not known."""
        return self.phases.get("transfer", 0.0)

    @property
    def fetched(self) -> int:
        """Bytes that had to come: the image, without what a process that died had left here."""
        served_bytes = sum(each.nbytes for each in self.sources)
        return served_bytes if "resume" in self.phases and served_bytes else self.fork.image_bytes

    @property
    def min_transfer_s(self) -> float | None:
        """(S/B): those bytes over the link's measured speed; None where that is not known."""
        return self.fetched / self.link if self.link else None

    @property
    def storage_share(self) -> float:
        """Part of the bytes that came from this fork's own storage."""
        return sum(each.share for each in self.sources if each.from_storage)

    @property
    def mean_rate(self) -> float:
        """Bytes a second over the whole fork; 0 where it has read nothing."""
        served_bytes = sum(each.nbytes for each in self.sources)
        return served_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def slowest_throttled(self) -> SourceStats | None:
        """Of the sources that held their readers back the one that needed longest for what it gave."""
        throttled = [each for each in self.sources if each.throttled_seconds > 0]
        return max(throttled, key=lambda each: each.throttled_seconds) if throttled else None

    def to_dict(self) -> dict[str, object]:
        """The numbers, ready for JSON; what is not known is null."""
        return {
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "link_bytes_per_s": self.link,
            "bound_s": self.min_transfer_s,
            "transfer_s": self.transfer_s or None,
            "sources": [
                {
                    "source": each.source,
                    "bytes": each.nbytes,
                    "share": each.share,
                    "bytes_per_s": each.rate,
                    "transport": each.transport,
                    "held_bytes_per_s": each.rate_limit,
                }
                for each in self.sources
            ],
            "bytes_repeated": self.bytes_repeated,
            "replans": self.replans,
            "reasons": list(self.reasons),
            "median_fork_s": self.median_s,
            "median_storage_s": self.storage_s,
        }


def stats_with_upstream(fork: ForkInfo, forks: Sequence[ForkInfo], model: ModelInfo | None) -> ForkStats:
    """The account of a fork with those of the relays before it, up to one that read from a whole source."""
    latest: dict[str, ForkInfo] = {}
    for each in sorted(forks, key=lambda each: -each.age_s):
        latest[each.instance_id] = each
    chain, passed = [fork], {fork.instance_id}
    while (above := _relay_of(chain[-1], latest)) is not None and above.instance_id not in passed:
        chain.append(above)
        passed.add(above.instance_id)
    account: ForkStats | None = None
    for each in reversed(chain):
        account = ForkStats.of(each, model, account)
    if account is None:
        raise ValueError("a chain begins with the fork itself")
    return account


def _relay_of(fork: ForkInfo, latest: Mapping[str, ForkInfo]) -> ForkInfo | None:
    """The fork of the source that gave most, if that had not ended when this one began."""
    sources = fleet_queries.sources_of(fork)
    above = latest.get(next(iter(sources), ""))
    return above if above is not None and fleet_queries.ended_s(above) < fork.age_s else None


def row_of(fork: ForkInfo, models: Sequence[ModelInfo]) -> ModelInfo | None:
    """Return the row of a fork's model, version and rank; of several, the one that has medians to tell."""
    of = (fork.model, fork.version, fork.rank.key)
    rows = [row for row in models if (row.model, row.version, row.rank_key) == of]
    rows.sort(key=lambda row: (row.fork_s is not None, row.image_bytes == fork.image_bytes))
    return rows[-1] if rows else None
