"""What `rfork top` shows of a fleet: the rows that matter now, as values. Pure functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from rfork.cli import fleet_queries
from rfork.cli.fleet_queries import FleetState
from rfork.schema import ForkInfo, InstanceInfo, ModelInfo


@dataclass(frozen=True, slots=True)
class RunningFork:
    """A fork under way; `rate_limit` are the bytes a second that its sources hold their readers to, the least.

    `source_bytes_per_s` is what it told that it reads from each now.
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
    """An instance that something is wrong with, or that is about to end."""

    instance_id: str
    host: str
    model: str
    version: str | None
    problem: str


@dataclass(frozen=True, slots=True)
class SourceRow:
    """An instance that gives; `rate_limit` are the bytes a second that it gives all its readers at most.

    `bytes_per_s` is what those that read from it told that they get now.
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
    """A fork that has ended, `ended_s` seconds ago."""

    fork_id: str
    instance_id: str
    host: str
    model: str
    version: str | None
    outcome: str
    ended_s: float
    seconds: float
    bytes_per_s: float
    sources: dict[str, int]
    transports: dict[str, str]
    fallback: str | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """All of it. `bytes_per_s` is what all forks under way read, `fallbacks` counts them by reason."""

    instances: int
    hosts: int
    bytes_per_s: float
    models: tuple[ModelInfo, ...]
    running: tuple[RunningFork, ...]
    problems: tuple[InstanceProblem, ...]
    sources_serving: tuple[SourceRow, ...]
    finished: tuple[FinishedFork, ...]
    fallbacks: dict[str, int]

    def to_dict(self) -> dict[str, object]:
        """Ready for JSON; the models are rows of `/v1/models`."""
        return asdict(self) | {"models": [row.model_dump(mode="json") for row in self.models]}


def overview(seen: FleetState) -> Overview:
    """The forks that take longest stand first, and so do the givers with most readers."""
    hosts = seen.hosts
    running = tuple(
        _running_row(fork, hosts.get(fork.instance_id, "")) for fork in fleet_queries.running_forks(seen.forks)
    )
    finished = fleet_queries.ended(seen.forks)
    return Overview(
        instances=len(seen.instances),
        hosts=len(set(hosts.values())),
        bytes_per_s=sum(fork.bytes_per_s for fork in running),
        models=seen.models,
        running=running,
        problems=tuple(_problems(seen.instances)),
        sources_serving=tuple(
            sorted(
                _source_rows(seen.instances, running),
                key=lambda source_row: (-source_row.readers, source_row.model, source_row.instance_id),
            )
        ),
        finished=tuple(_finished_forks(fork, hosts.get(fork.instance_id, "")) for fork in finished),
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


def _finished_forks(fork: ForkInfo, host: str) -> FinishedFork:
    finish = fork.finish
    if finish is None:
        raise ValueError(f"fork {fork.fork_id} has not ended")
    return FinishedFork(
        fork_id=fork.fork_id,
        instance_id=fork.instance_id,
        host=host,
        model=fork.model,
        version=fork.version,
        outcome=finish.outcome,
        ended_s=fleet_queries.ended_s(fork),
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
    """Seeds, and relays that somebody reads from."""
    reader_counts: Counter[str] = Counter()
    for fork in running:
        reader_counts.update(fork.source_bytes_per_s)
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
            bytes_per_s=reader_counts[report.instance_id],
            rate_limit=report.egress_rate,
        )
        for view, report in ((view, view.report) for view in instances)
        if report.state == "serving" or report.readers
    ]
