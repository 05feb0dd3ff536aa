"""Rows of `rfork top` as values. Pure functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from rfork.cli import fleet_queries
from rfork.cli.fleet_queries import FleetState
from rfork.schema import ForkInfo, InstanceInfo, ModelInfo


@dataclass(frozen=True, slots=True)
class RunningFork:
    """A running fork. `rate_limit`: lowest rate limit of its sources in bytes per second.

    `source_bytes_per_s`: current rate of each source, as reported by the fork.
    """

    fork_id: str
    instance_id: str
    host: str
    model: str
    version: str | None
    rank: str
    phase: str
    share: float
    bytes_per_s: float
    eta_s: float | None
    seconds: float
    sources: dict[str, int]
    source_bytes_per_s: dict[str, float]
    transports: dict[str, str]
    rate_limit: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class InstanceProblem:
    """An instance with a problem, or one that is draining."""

    instance_id: str
    host: str
    model: str
    version: str | None
    problem: str


@dataclass(frozen=True, slots=True)
class SourceRow:
    """An instance that serves. `rate_limit`: maximum bytes per second to all its readers.

    `bytes_per_s`: total of the current rates reported by its readers.
    """

    instance_id: str
    host: str
    model: str
    version: str | None
    rank: str
    state: str
    readers: int
    slots: int
    bytes_per_s: float
    rate_limit: int | None


@dataclass(frozen=True, slots=True)
class FinishedFork:
    """A fork that finished `finished_ago_s` seconds ago."""

    fork_id: str
    instance_id: str
    host: str
    model: str
    version: str | None
    outcome: str
    finished_ago_s: float
    seconds: float
    bytes_per_s: float
    sources: dict[str, int]
    transports: dict[str, str]
    fallback: str | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """All rows. `bytes_per_s`: total rate of the running forks; `fallbacks`: number by reason."""

    instances: int
    hosts: int
    bytes_per_s: float
    models: tuple[ModelInfo, ...]
    running: tuple[RunningFork, ...]
    problems: tuple[InstanceProblem, ...]
    sources: tuple[SourceRow, ...]
    finished: tuple[FinishedFork, ...]
    fallbacks: dict[str, int]

    def to_dict(self) -> dict[str, object]:
        """Return the overview for JSON; models are rows of `/v1/models`."""
        return asdict(self) | {"models": [row.model_dump(mode="json") for row in self.models]}


def overview(seen: FleetState) -> Overview:
    """Return the overview of a fleet: oldest forks first, and sources with most readers first."""
    hosts = seen.hosts
    running = tuple(
        _running_row(fork, hosts.get(fork.instance_id, "")) for fork in fleet_queries.running_forks(seen.forks)
    )
    finished = fleet_queries.finished_forks(seen.forks)
    return Overview(
        instances=len(seen.instances),
        hosts=len(set(hosts.values())),
        bytes_per_s=sum(fork.bytes_per_s for fork in running),
        models=seen.models,
        running=running,
        problems=tuple(_problems(seen.instances)),
        sources=tuple(
            sorted(
                _source_rows(seen.instances, running),
                key=lambda source_row: (-source_row.readers, source_row.model, source_row.instance_id),
            )
        ),
        finished=tuple(_finished_row(fork, hosts.get(fork.instance_id, "")) for fork in finished),
        fallbacks=dict(fleet_queries.fallbacks(finished).most_common()),
    )


def _running_row(fork: ForkInfo, host: str) -> RunningFork:
    return RunningFork(
        fork_id=fork.fork_id,
        instance_id=fork.instance_id,
        host=host,
        model=fork.model,
        version=fork.version,
        rank=fork.rank.key,
        phase=fleet_queries.phase_of(fork),
        share=fleet_queries.verified_share(fork),
        bytes_per_s=fleet_queries.rate_of(fork),
        eta_s=fleet_queries.eta_s(fork),
        seconds=fork.age_s,
        sources=fleet_queries.sources_of(fork),
        source_bytes_per_s=dict(fleet_queries.rates_of(fork)),
        transports=dict(fleet_queries.transports_of(fork)),
        rate_limit=min(fork.source_rate_limits.values(), default=None),
        reason=fork.reason,
    )


def _finished_row(fork: ForkInfo, host: str) -> FinishedFork:
    finish = fork.finish
    if finish is None:
        raise ValueError(f"fork {fork.fork_id} has not finished")
    return FinishedFork(
        fork_id=fork.fork_id,
        instance_id=fork.instance_id,
        host=host,
        model=fork.model,
        version=fork.version,
        outcome=finish.outcome,
        finished_ago_s=fleet_queries.finished_ago_s(fork),
        seconds=finish.seconds,
        bytes_per_s=fleet_queries.rate_of(fork),
        sources=fleet_queries.sources_of(fork),
        transports=dict(fleet_queries.transports_of(fork)),
        fallback=finish.fallback,
        reasons=finish.reasons,
    )


def _problems(instances: tuple[InstanceInfo, ...]) -> list[InstanceProblem]:
    return [
        InstanceProblem(view.report.instance_id, view.report.placement.host, view.report.model, view.version, problem)
        for view in instances
        if (problem := fleet_queries.instance_problem(view))
    ]


def _source_rows(instances: tuple[InstanceInfo, ...], running: tuple[RunningFork, ...]) -> list[SourceRow]:
    """Return the seeds, and the relays with readers."""
    rates: Counter[str] = Counter()
    for fork in running:
        rates.update(fork.source_bytes_per_s)
    return [
        SourceRow(
            instance_id=report.instance_id,
            host=report.placement.host,
            model=report.model,
            version=view.version,
            rank=report.rank.key,
            state=report.state,
            readers=len(report.readers),
            slots=report.max_readers,
            bytes_per_s=rates[report.instance_id],
            rate_limit=report.egress_rate,
        )
        for view, report in ((view, view.report) for view in instances)
        if report.state == "serving" or report.readers
    ]
