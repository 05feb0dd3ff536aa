"""What `rfork top` shows of a fleet: the rows that matter now, as values. Pure functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from rfork.cli import fleet
from rfork.cli.fleet import Fleet
from rfork.wire import ForkView, InstanceView, ModelView


@dataclass(frozen=True, slots=True)
class GoingFork:
    """A fork under way; `held` are the bytes a second that its sources hold their readers to, the least.

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
    held: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """An instance that something is wrong with, or that is about to end."""

    instance_id: str
    host: str
    model: str
    version: str | None
    what: str


@dataclass(frozen=True, slots=True)
class Giver:
    """An instance that gives; `held` are the bytes a second that it gives all its readers at most.

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
    held: int | None


@dataclass(frozen=True, slots=True)
class EndedFork:
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
    models: tuple[ModelView, ...]
    going: tuple[GoingFork, ...]
    troubles: tuple[Trouble, ...]
    givers: tuple[Giver, ...]
    ended: tuple[EndedFork, ...]
    fallbacks: dict[str, int]

    def to_dict(self) -> dict[str, object]:
        """Ready for JSON; the models are rows of `/v1/models`."""
        return asdict(self) | {"models": [row.model_dump(mode="json") for row in self.models]}


def overview(seen: Fleet) -> Overview:
    """The forks that take longest stand first, and so do the givers with most readers."""
    hosts = seen.hosts
    going = tuple(_going(fork, hosts.get(fork.instance_id, "")) for fork in fleet.under_way(seen.forks))
    ended = fleet.ended(seen.forks)
    return Overview(
        instances=len(seen.instances),
        hosts=len(set(hosts.values())),
        bytes_per_s=sum(fork.bytes_per_s for fork in going),
        models=seen.models,
        going=going,
        troubles=tuple(_troubles(seen.instances)),
        givers=tuple(
            sorted(
                _givers(seen.instances, going),
                key=lambda giver: (-giver.readers, giver.model, giver.instance_id),
            )
        ),
        ended=tuple(_ended(fork, hosts.get(fork.instance_id, "")) for fork in ended),
        fallbacks=dict(fleet.fallbacks(ended).most_common()),
    )


def _going(fork: ForkView, host: str) -> GoingFork:
    return GoingFork(
        fork_id=fork.fork_id,
        instance_id=fork.instance_id,
        host=host,
        model=fork.model,
        version=fork.version,
        rank=fork.rank.key,
        phase=fleet.phase_of(fork),
        share=fleet.verified_share(fork),
        bytes_per_s=fleet.rate_of(fork),
        eta_s=fleet.eta_s(fork),
        seconds=fork.age_s,
        sources=fleet.sources_of(fork),
        source_bytes_per_s=dict(fleet.rates_of(fork)),
        transports=dict(fleet.transports_of(fork)),
        held=min(fork.held.values(), default=None),
        reason=fork.reason,
    )


def _ended(fork: ForkView, host: str) -> EndedFork:
    finish = fork.finish
    if finish is None:
        raise ValueError(f"fork {fork.fork_id} has not ended")
    return EndedFork(
        fork_id=fork.fork_id,
        instance_id=fork.instance_id,
        host=host,
        model=fork.model,
        version=fork.version,
        outcome=finish.outcome,
        ended_s=fleet.ended_s(fork),
        seconds=finish.seconds,
        bytes_per_s=fleet.rate_of(fork),
        sources=fleet.sources_of(fork),
        transports=dict(fleet.transports_of(fork)),
        fallback=finish.fallback,
        reasons=finish.reasons,
    )


def _troubles(instances: tuple[InstanceView, ...]) -> list[Trouble]:
    return [
        Trouble(view.report.instance_id, view.report.placement.host, view.report.model, view.version, what)
        for view in instances
        if (what := fleet.trouble_of(view))
    ]


def _givers(instances: tuple[InstanceView, ...], going: tuple[GoingFork, ...]) -> list[Giver]:
    """Seeds, and relays that somebody reads from."""
    gives: Counter[str] = Counter()
    for fork in going:
        gives.update(fork.source_bytes_per_s)
    return [
        Giver(
            instance_id=report.instance_id,
            host=report.placement.host,
            model=report.model,
            version=view.version,
            rank=report.rank.key,
            state=report.state,
            readers=len(report.readers),
            slots=report.max_readers,
            bytes_per_s=gives[report.instance_id],
            held=report.egress_rate,
        )
        for view, report in ((view, view.report) for view in instances)
        if report.state == "serving" or report.readers
    ]
