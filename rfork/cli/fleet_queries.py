"""What the planner knows at one moment, and what commands ask of it: pure functions over wire models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rfork import weights_version
from rfork.cli import format
from rfork.image import ranges
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo, InstanceInfo, ModelInfo

RUNNING_STATES = ("planning", "running")
"""States of a fork that has not ended."""
SILENT_S = 12.0
"""An instance that said nothing for so long is in trouble: by default it reports every 5 s."""


@dataclass(frozen=True, slots=True)
class FleetState:
    """The rows of `/v1/models`, `/v1/instances` and `/v1/forks`."""

    models: tuple[ModelInfo, ...] = ()
    instances: tuple[InstanceInfo, ...] = ()
    forks: tuple[ForkInfo, ...] = ()

    @classmethod
    def of(cls, client: PlannerClient, model: str | None = None) -> Self:
        """All that the planner knows now, or what it knows of one model. Raises as the client's methods."""
        models = tuple(row for row in client.models() if model in (None, row.model))
        return cls(models, tuple(client.instances(model=model)), tuple(client.forks(model=model)))

    @property
    def hosts(self) -> Mapping[str, str]:
        """The host of each instance, by its id."""
        return {view.report.instance_id: view.report.placement.host for view in self.instances}

    def to_dict(self) -> dict[str, object]:
        """All rows as the REST interface has them, ready for JSON."""
        return {
            "models": [row.model_dump(mode="json") for row in self.models],
            "instances": [row.model_dump(mode="json") for row in self.instances],
            "forks": [row.model_dump(mode="json") for row in self.forks],
        }


def model_titles(models: Sequence[ModelInfo]) -> list[str]:
    """Return the name of each row: model and rank, and the weights' digest where a version has several."""
    names = [_title(row) for row in models]
    counts = Counter((name, row.version) for name, row in zip(names, models, strict=True))
    return [
        f"{name} ({row.weights_id[:6] if row.weights_id else 'not known yet'})"
        if counts[name, row.version] > 1
        else name
        for name, row in zip(names, models, strict=True)
    ]


def _title(row: ModelInfo) -> str:
    rank = format.rank(row.rank_key)
    return row.model if rank == "-" else f"{row.model} {rank}"


def running_forks(forks: Iterable[ForkInfo]) -> list[ForkInfo]:
    """The forks that have not ended, the oldest first."""
    return sorted((fork for fork in forks if fork.state in RUNNING_STATES), key=lambda fork: -fork.age_s)


def ended(forks: Iterable[ForkInfo]) -> list[ForkInfo]:
    """The forks that have ended, the last that ended first."""
    return sorted((fork for fork in forks if fork.finish is not None), key=ended_s)


def ended_s(fork: ForkInfo) -> float:
    """Seconds since a fork ended, as far as the planner knows; 0 while it goes on."""
    return max(0.0, fork.age_s - fork.finish.seconds) if fork.finish is not None else 0.0


def verified_share(fork: ForkInfo) -> float:
    """Part of the image that is verified, from 0 to 1."""
    if fork.state == "finished":
        return 1.0
    if fork.progress is None or not fork.chunk_count:
        return 0.0
    return min(1.0, ranges.count(fork.progress.verified) / fork.chunk_count)


def rate_of(fork: ForkInfo) -> float:
    """Bytes a second: now, while it is under way; of the whole fork, once it has ended. 0: not known."""
    if fork.finish is not None:
        return fork.finish.bytes_read / fork.finish.seconds if fork.finish.seconds else 0.0
    return fork.progress.bytes_per_s if fork.progress is not None else 0.0


def eta_s(fork: ForkInfo) -> float | None:
    """Seconds until a fork under way is whole, if it goes on as now; None: nothing moves."""
    speed = rate_of(fork)
    if fork.finish is not None or speed <= 0:
        return None
    return (1.0 - verified_share(fork)) * fork.image_bytes / speed


def phase_of(fork: ForkInfo) -> str:
    """What a fork does now, or how it ended: the word for it."""
    if fork.finish is not None:
        return fork.finish.outcome
    if fork.progress is not None and fork.progress.phases:
        return list(fork.progress.phases)[-1]
    return fork.state


def sources_of(fork: ForkInfo) -> dict[str, int]:
    """Bytes by source, most first; sources of the plan that gave none yet come last.

    A fork that reads its own storage names that as its target's id in the plan, and by ``KIND:URI`` in what
    it tells: it stands here once it tells.
    """
    last = fork.finish or fork.progress
    reported = last.sources if last is not None else {}
    bytes_by_source = dict(sorted(reported.items(), key=lambda item: -item[1]))
    if fork.finish is None:
        for share in fork.plan:
            if share.source_id != fork.instance_id:
                bytes_by_source.setdefault(share.source_id, 0)
    return bytes_by_source


def transports_of(fork: ForkInfo) -> Mapping[str, str]:
    """Over which each source is (or was) read."""
    last = fork.finish or fork.progress
    return last.transports if last is not None else {}


def rates_of(fork: ForkInfo) -> Mapping[str, float]:
    """Bytes a second of each source, as the fork told: now; once it has ended, each in its fastest second.

    A source that gives nothing now is not in it, nor is any of an old client or of a fork that was too short.
    """
    last = fork.finish or fork.progress
    return last.source_bytes_per_s if last is not None else {}


def format_sources(sources: Iterable[str], transports: Mapping[str, str], rates: Mapping[str, float]) -> list[str]:
    """Who gives: ``1f3a9c2e (http)``; of several also how much: ``1f3a9c2e (http) 40.00 MB/s``."""
    names = list(sources)
    words = []
    for name in names:
        transport_suffix = f" ({transports[name]})" if name in transports else ""
        rate = f" {format.rate(rates[name])}" if len(names) > 1 and rates.get(name) else ""
        words.append(f"{format.format_source(name)}{transport_suffix}{rate}")
    return words


def instance_problem(view: InstanceInfo) -> str:
    """What is wrong with an instance, or out of the ordinary; empty: nothing."""
    if view.quarantined:
        return f"quarantined: {view.quarantined}"
    if view.accused:
        return f"accused by a reader: {view.accused}"
    if view.age_s > SILENT_S:
        return f"silent for {view.age_s:.0f} s"
    if view.report.state == "draining":
        readers = len(view.report.readers)
        return f"draining, {format.plural(readers, 'reader')} left" if readers else "draining, nobody reads from it"
    return ""


def fallbacks(forks: Iterable[ForkInfo]) -> Counter[str]:
    """How many forks loaded otherwise, by the kind of the last error before that, as in the metrics."""
    return Counter(
        _cause_of(fork.finish.reasons[-1]) if fork.finish.reasons else "no reason given"
        for fork in forks
        if fork.finish is not None and fork.finish.outcome == "fallback"
    )


def _cause_of(reason: str) -> str:
    return "first of its version" if weights_version.is_first(reason) else error_kind_of(reason)


def error_kind_of(reason: str) -> str:
    """The error that a reason (``SourceTimeout: …``) begins with."""
    return reason.partition(":")[0].strip()
