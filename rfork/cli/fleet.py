"""What the planner knows at one moment, and what commands ask of it: pure functions over wire models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rfork import weights_version
from rfork.cli import units
from rfork.control.client import PlannerClient
from rfork.image import ranges
from rfork.wire import ForkView, InstanceView, ModelView

UNDER_WAY = ("planning", "running")
"""States of a fork that has not ended."""
SILENT_S = 12.0
"""An instance that said nothing for so long is in trouble: by default it reports every 5 s."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The rows of `/v1/models`, `/v1/instances` and `/v1/forks`."""

    models: tuple[ModelView, ...] = ()
    instances: tuple[InstanceView, ...] = ()
    forks: tuple[ForkView, ...] = ()

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


def titles(models: Sequence[ModelView]) -> list[str]:
    """Return the name of each row: model and rank, and the weights' digest where a version has several."""
    names = [_title(row) for row in models]
    counts = Counter((name, row.version) for name, row in zip(names, models, strict=True))
    return [
        f"{name} ({row.weights_id[:6] if row.weights_id else 'not known yet'})"
        if counts[name, row.version] > 1
        else name
        for name, row in zip(names, models, strict=True)
    ]


def _title(row: ModelView) -> str:
    rank = units.rank(row.rank_key)
    return row.model if rank == "-" else f"{row.model} {rank}"


def under_way(forks: Iterable[ForkView]) -> list[ForkView]:
    """The forks that have not ended, the oldest first."""
    return sorted((fork for fork in forks if fork.state in UNDER_WAY), key=lambda fork: -fork.age_s)


def ended(forks: Iterable[ForkView]) -> list[ForkView]:
    """The forks that have ended, the last that ended first."""
    return sorted((fork for fork in forks if fork.finish is not None), key=ended_s)


def ended_s(fork: ForkView) -> float:
    """Seconds since a fork ended, as far as the planner knows; 0 while it goes on."""
    return max(0.0, fork.age_s - fork.finish.seconds) if fork.finish is not None else 0.0


def verified_share(fork: ForkView) -> float:
    """Part of the image that is verified, from 0 to 1."""
    if fork.state == "finished":
        return 1.0
    if fork.progress is None or not fork.chunk_count:
        return 0.0
    return min(1.0, ranges.count(fork.progress.verified) / fork.chunk_count)


def rate_of(fork: ForkView) -> float:
    """Bytes a second: now, while it is under way; of the whole fork, once it has ended. 0: not known."""
    if fork.finish is not None:
        return fork.finish.bytes_read / fork.finish.seconds if fork.finish.seconds else 0.0
    return fork.progress.bytes_per_s if fork.progress is not None else 0.0


def eta_s(fork: ForkView) -> float | None:
    """Seconds until a fork under way is whole, if it goes on as now; None: nothing moves."""
    speed = rate_of(fork)
    if fork.finish is not None or speed <= 0:
        return None
    return (1.0 - verified_share(fork)) * fork.image_bytes / speed


def phase_of(fork: ForkView) -> str:
    """What a fork does now, or how it ended: the word for it."""
    if fork.finish is not None:
        return fork.finish.outcome
    if fork.progress is not None and fork.progress.phases:
        return list(fork.progress.phases)[-1]
    return fork.state


def sources_of(fork: ForkView) -> dict[str, int]:
    """Bytes by source, most first; sources of the plan that gave none yet come last.

    A fork that reads its own storage names that as its target's id in the plan, and by ``KIND:URI`` in what
    it tells: it stands here once it tells.
    """
    last = fork.finish or fork.progress
    told = last.sources if last is not None else {}
    given = dict(sorted(told.items(), key=lambda item: -item[1]))
    if fork.finish is None:
        for share in fork.plan:
            if share.source_id != fork.instance_id:
                given.setdefault(share.source_id, 0)
    return given


def transports_of(fork: ForkView) -> Mapping[str, str]:
    """Over which each source is (or was) read."""
    last = fork.finish or fork.progress
    return last.transports if last is not None else {}


def rates_of(fork: ForkView) -> Mapping[str, float]:
    """Bytes a second of each source, as the fork told: now; once it has ended, each in its fastest second.

    A source that gives nothing now is not in it, nor is any of an old client or of a fork that was too short.
    """
    last = fork.finish or fork.progress
    return last.source_bytes_per_s if last is not None else {}


def giver_words(
    sources: Iterable[str], transports: Mapping[str, str], rates: Mapping[str, float]
) -> list[str]:
    """Who gives: ``1f3a9c2e (http)``; of several also how much: ``1f3a9c2e (http) 40.00 MB/s``."""
    names = list(sources)
    words = []
    for name in names:
        over = f" ({transports[name]})" if name in transports else ""
        rate = f" {units.rate(rates[name])}" if len(names) > 1 and rates.get(name) else ""
        words.append(f"{units.source(name)}{over}{rate}")
    return words


def trouble_of(view: InstanceView) -> str:
    """What is wrong with an instance, or out of the ordinary; empty: nothing."""
    if view.quarantined:
        return f"quarantined: {view.quarantined}"
    if view.accused:
        return f"accused by a reader: {view.accused}"
    if view.age_s > SILENT_S:
        return f"silent for {view.age_s:.0f} s"
    if view.report.state == "draining":
        readers = len(view.report.readers)
        return (
            f"draining, {units.plural(readers, 'reader')} left"
            if readers
            else "draining, nobody reads from it"
        )
    return ""


def fallbacks(forks: Iterable[ForkView]) -> Counter[str]:
    """How many forks loaded otherwise, by the kind of the last error before that, as in the metrics."""
    return Counter(
        _cause_of(fork.finish.reasons[-1]) if fork.finish.reasons else "no reason given"
        for fork in forks
        if fork.finish is not None and fork.finish.outcome == "fallback"
    )


def _cause_of(reason: str) -> str:
    return "first of its version" if weights_version.is_first(reason) else kind_of(reason)


def kind_of(reason: str) -> str:
    """The error that a reason (``SourceStalled: …``) begins with."""
    return reason.partition(":")[0].strip()
