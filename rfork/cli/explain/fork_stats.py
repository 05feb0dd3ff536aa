"""Statistics of a fork: seconds by phase, minimum transfer time, and bytes by source.

Old clients do not report phases, link speed and transports; they are unknown here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rfork.cli import fleet_queries
from rfork.schema import ForkInfo, ModelInfo, source_type


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Bytes received from one source; `share` is its part of all received bytes, from 0 to 1."""

    source: str
    nbytes: int
    share: float
    transport: str | None
    rate_limit: int | None
    """Bytes per second to which the source limited all its readers together; None: no limit."""
    rate: float | None = None
    """Reported bytes per second: current, or in the fastest second of a finished fork; None: not reported."""

    @property
    def from_storage(self) -> bool:
        """Return whether the source is storage, not an instance."""
        return source_type(self.source) != "peer"

    @property
    def throttled_seconds(self) -> float:
        """Minimum seconds to send these bytes at the rate limit; 0: no limit."""
        return self.nbytes / self.rate_limit if self.rate_limit else 0.0


@dataclass(frozen=True, slots=True)
class ForkStats:
    """Statistics of one fork: sizes in bytes, times in seconds."""

    fork: ForkInfo
    seconds: float
    """Duration of the fork, or its age if it is still running."""
    phases: Mapping[str, float]
    link: float | None
    """Bytes per second in the fastest second; None: unknown."""
    sources: tuple[SourceStats, ...]
    reasons: tuple[str, ...]
    bytes_repeated: int
    replans: int
    median_s: float | None
    """Median of the model's forks that read only from peers."""
    storage_s: float | None
    """Median of the model's forks that read only from storage."""
    upstream: ForkStats | None = None
    """Fork of the main source, if that was still receiving the weights."""

    @classmethod
    def of(cls, fork: ForkInfo, model: ModelInfo | None = None, upstream: ForkStats | None = None) -> Self:
        """Return the statistics of a fork, with medians of its model if `model` is known."""
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
        """Seconds of the transfer; 0 if unknown."""
        return self.phases.get("transfer", 0.0)

    @property
    def fetched(self) -> int:
        """Bytes that had to be fetched: the image without chunks kept by a previous process."""
        served_bytes = sum(each.nbytes for each in self.sources)
        return served_bytes if "resume" in self.phases and served_bytes else self.fork.image_bytes

    @property
    def min_transfer_s(self) -> float | None:
        """Fetched bytes divided by the link's measured speed; None if that is unknown."""
        return self.fetched / self.link if self.link else None

    @property
    def storage_share(self) -> float:
        """Share of the bytes read from the target's own storage."""
        return sum(each.share for each in self.sources if each.from_storage)

    @property
    def mean_rate(self) -> float:
        """Bytes per second over the entire fork; 0 if nothing was read."""
        served_bytes = sum(each.nbytes for each in self.sources)
        return served_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def slowest_throttled(self) -> SourceStats | None:
        """Source whose rate limit cost the most time; None if no source had a limit."""
        throttled = [each for each in self.sources if each.throttled_seconds > 0]
        return max(throttled, key=lambda each: each.throttled_seconds) if throttled else None

    def to_dict(self) -> dict[str, object]:
        """Return the statistics for JSON; unknown values are null."""
        return {
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "link_bytes_per_s": self.link,
            "min_transfer_s": self.min_transfer_s,
            "transfer_s": self.transfer_s or None,
            "sources": [
                {
                    "source": each.source,
                    "bytes": each.nbytes,
                    "share": each.share,
                    "bytes_per_s": each.rate,
                    "transport": each.transport,
                    "rate_limit_bytes_per_s": each.rate_limit,
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
    """Return the statistics of a fork, linked to those of the relays upstream of it, up to a complete source."""
    latest: dict[str, ForkInfo] = {}
    for each in sorted(forks, key=lambda each: -each.age_s):
        latest[each.instance_id] = each
    chain, visited = [fork], {fork.instance_id}
    while (relay := _relay_of(chain[-1], latest)) is not None and relay.instance_id not in visited:
        chain.append(relay)
        visited.add(relay.instance_id)
    stats = ForkStats.of(chain.pop(), model)
    while chain:
        stats = ForkStats.of(chain.pop(), model, stats)
    return stats


def _relay_of(fork: ForkInfo, latest: Mapping[str, ForkInfo]) -> ForkInfo | None:
    """Return the fork of the main source, if it was still running when this fork began."""
    sources = fleet_queries.sources_of(fork)
    source_fork = latest.get(next(iter(sources), ""))
    return source_fork if source_fork is not None and fleet_queries.finished_ago_s(source_fork) < fork.age_s else None


def row_of(fork: ForkInfo, models: Sequence[ModelInfo]) -> ModelInfo | None:
    """Return the row of a fork's model, version and rank; one with medians is preferred."""
    key = (fork.model, fork.version, fork.rank.key)
    rows = [row for row in models if (row.model, row.version, row.rank_key) == key]
    rows.sort(key=lambda row: (row.fork_s is not None, row.image_bytes == fork.image_bytes))
    return rows[-1] if rows else None
