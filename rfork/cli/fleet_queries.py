"""The planner's state at one moment, and pure functions over it that commands share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text
from typing_extensions import Self

from rfork import weights_version
from rfork.cli import formatters
from rfork.cli.console import Column, FittedTable
from rfork.image import ranges
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo, HolderInfo, InstanceInfo, ModelInfo

RUNNING_STATES = ("planning", "running")
"""States of a fork that has not finished."""
COLOURS = {"forked": "green", "fallback": "yellow", "failed": "red", "interrupted": "red", "planning": "dim"}
"""Colour by phase or outcome; all others are cyan."""
ROLES = {"serving": ("seed", "green"), "loading": ("relay", "cyan"), "draining": ("draining", "yellow")}
"""Role and colour of an instance by its state, unless a holder keeps it."""
HOLDER = "holder"
"""Role of an instance that a holder keeps without an engine."""
SILENT_S = 12.0
"""An instance without a report for longer is a problem: by default instances report every 5 s."""


@dataclass(frozen=True, slots=True)
class FleetState:
    """The rows of `/v1/models`, `/v1/instances`, `/v1/forks` and, if requested, `/v1/holders`."""

    models: tuple[ModelInfo, ...] = ()
    instances: tuple[InstanceInfo, ...] = ()
    forks: tuple[ForkInfo, ...] = ()
    holders: tuple[HolderInfo, ...] = ()

    @classmethod
    def of(cls, client: PlannerClient, model: str | None = None) -> Self:
        """Fetch the current state, of all models or of one. Raises the errors of the client."""
        models = tuple(row for row in client.models() if model in (None, row.model))
        holders = holders_of_model(filter(keeps_images, client.holders()), model)
        return cls(models, tuple(client.instances(model=model)), tuple(client.forks(model=model)), holders)

    @property
    def hosts(self) -> Mapping[str, str]:
        """Host of each instance, by instance id."""
        return {view.report.instance_id: view.report.placement.host for view in self.instances}

    def to_dict(self) -> dict[str, object]:
        """Return all rows of the REST interface, for JSON."""
        return {
            "models": [row.model_dump(mode="json") for row in self.models],
            "instances": [row.model_dump(mode="json") for row in self.instances],
            "forks": [row.model_dump(mode="json") for row in self.forks],
            "holders": [row.model_dump(mode="json") for row in self.holders],
        }


def keeps_images(holder: HolderInfo) -> bool:
    """Return False for a report of `rfork launch`, which only selects what the holder of its host keeps."""
    return holder.report.memory_bytes > 0


def holders_of_model(holders: Iterable[HolderInfo], model: str | None) -> tuple[HolderInfo, ...]:
    """Return the holders with only the images of one model, without those that have none; all if it is None."""
    if model is None:
        return tuple(holders)
    found = []
    for holder in holders:
        images = tuple(image for image in holder.report.images if image.model == model)
        refused = tuple(image for image in holder.report.refused if image.model == model)
        if images or refused:
            report = holder.report.model_copy(update={"images": images, "refused": refused})
            found.append(holder.model_copy(update={"report": report}))
    return tuple(found)


def model_table(models: Sequence[ModelInfo], heading: str) -> FittedTable:
    """Return a table of models: instances, bytes read from storage and from peers, and the medians of their times.

    The first column, under this heading, has model and rank, and the weights digest if a version has several.
    """
    names = [formatters.model(row.model, row.rank_key) for row in models]
    counts = Counter((name, row.version) for name, row in zip(names, models, strict=True))
    columns = (
        Column(heading, min_width=12),
        Column("version", min_width=8, priority=1),
        Column("size", right=True),
        Column("seeds", right=True),
        Column("held", right=True, priority=6),
        Column("relays", right=True, priority=6),
        Column("forks", right=True),
        Column("storage", right=True, priority=5),
        Column("forked", right=True, priority=4),
        Column("median fork", right=True, priority=2),
        Column("median load", right=True, priority=3),
        Column("saved", right=True, priority=1),
    )
    rows = []
    for name, row in zip(names, models, strict=True):
        is_ambiguous = counts[name, row.version] > 1
        rows.append(
            (
                f"{name} ({row.weights_id[:6] if row.weights_id else 'unknown'})" if is_ambiguous else name,
                formatters.version(row.version),
                formatters.size(row.image_bytes),
                f"{row.seeds:,}",
                f"{row.holders:,}" if row.holders else "",
                f"{row.relays:,}",
                f"{row.forks_running:,}",
                formatters.size(row.storage_bytes),
                formatters.size(row.forked_bytes),
                "" if row.fork_s is None else formatters.duration(row.fork_s),
                "" if row.storage_s is None else formatters.duration(row.storage_s),
                formatters.duration(row.seconds_saved) if row.seconds_saved else "",
            )
        )
    return FittedTable(columns, rows)


def running_forks(forks: Iterable[ForkInfo]) -> list[ForkInfo]:
    """Return the forks that have not finished, oldest first."""
    return sorted((fork for fork in forks if fork.state in RUNNING_STATES), key=lambda fork: -fork.age_s)


def finished_forks(forks: Iterable[ForkInfo]) -> list[ForkInfo]:
    """Return the finished forks, the latest first."""
    return sorted((fork for fork in forks if fork.finish is not None), key=finished_ago_s)


def latest_forks(forks: Iterable[ForkInfo]) -> dict[str, ForkInfo]:
    """Return the latest fork of each instance, by instance id."""
    return {fork.instance_id: fork for fork in sorted(forks, key=lambda fork: -fork.age_s)}


def finished_ago_s(fork: ForkInfo) -> float:
    """Return the seconds since a fork finished, as known to the planner; 0 while it is running."""
    return max(0.0, fork.age_s - fork.finish.seconds) if fork.finish is not None else 0.0


def verified_share(fork: ForkInfo) -> float:
    """Return the verified share of the image, from 0 to 1."""
    if fork.state == "finished":
        return 1.0
    if fork.progress is None or not fork.chunk_count:
        return 0.0
    return min(1.0, ranges.count(fork.progress.verified) / fork.chunk_count)


def rate_of(fork: ForkInfo) -> float:
    """Return bytes per second: current for a running fork, the mean for a finished one; 0 if unknown."""
    if fork.finish is not None:
        return fork.finish.bytes_read / fork.finish.seconds if fork.finish.seconds else 0.0
    return fork.progress.bytes_per_s if fork.progress is not None else 0.0


def eta_s(fork: ForkInfo) -> float | None:
    """Return the seconds until a running fork is complete at its current rate; None if no data arrives."""
    speed = rate_of(fork)
    if fork.finish is not None or speed <= 0:
        return None
    return (1.0 - verified_share(fork)) * fork.image_bytes / speed


def phase_of(fork: ForkInfo) -> str:
    """Return the current phase of a fork, or its outcome."""
    if fork.finish is not None:
        return fork.finish.outcome
    if fork.progress is not None and fork.progress.phases:
        return list(fork.progress.phases)[-1]
    return fork.state


def phase_text(fork: ForkInfo) -> Text:
    """Return the current phase of a fork, or its outcome, in its colour."""
    phase = phase_of(fork)
    return Text(phase, COLOURS.get(phase, "cyan"))


def last_error(fork: ForkInfo) -> str:
    """Return the last error of a finished fork; empty if it has none."""
    return fork.finish.reasons[-1] if fork.finish is not None and fork.finish.reasons else ""


def sources_of(fork: ForkInfo) -> dict[str, int]:
    """Return bytes by source, largest first; planned sources without bytes come last.

    In a plan, the target's own storage has the target's instance id; in reports it is ``TYPE:URI``. It is
    listed here once it is reported.
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
    """Return the transport over which each source is (or was) read."""
    last = fork.finish or fork.progress
    return last.transports if last is not None else {}


def rates_of(fork: ForkInfo) -> Mapping[str, float]:
    """Return the reported bytes per second of each source.

    Current rates for a running fork, peak rates for a finished one. Idle sources, sources of old clients and
    sources of very short forks are missing.
    """
    last = fork.finish or fork.progress
    return last.source_bytes_per_s if last is not None else {}


def sources_text(fork: ForkInfo) -> str:
    """Return the sources of a fork, largest first: ``1f3a9c2e (http), snapshot:s3://…``; empty without sources.

    For a running fork with several sources, each has its current rate: ``1f3a9c2e (http) 40.00 MB/s``.
    """
    sources, transports = sources_of(fork), transports_of(fork)
    rates = rates_of(fork) if fork.finish is None and len(sources) > 1 else {}
    texts = []
    for name in sources:
        transport = f" ({transports[name]})" if name in transports else ""
        rate = f" {formatters.rate(rates[name])}" if rates.get(name) else ""
        texts.append(f"{formatters.source(name)}{transport}{rate}")
    return ", ".join(texts)


def role_of(view: InstanceInfo) -> tuple[str, str]:
    """Return the role of an instance, and its colour."""
    role, colour = ROLES[view.report.state]
    return (role if view.report.holder is None or role == "draining" else HOLDER), colour


def instance_problem(view: InstanceInfo) -> str:
    """Return what is wrong or unusual about an instance; empty if nothing."""
    if view.quarantined:
        return f"quarantined: {view.quarantined}"
    if view.accused:
        return f"accused by a reader: {view.accused}"
    if view.age_s > SILENT_S:
        return f"no report for {view.age_s:.0f} s"
    if view.report.state == "draining":
        readers = len(view.report.readers)
        return f"draining, {formatters.plural(readers, 'reader')} left" if readers else "draining, no readers"
    return ""


def fallbacks(forks: Iterable[ForkInfo]) -> Counter[str]:
    """Count forks that fell back, by their last error, as in the metrics."""
    return Counter(
        _cause_of(fork.finish.reasons[-1]) if fork.finish.reasons else "no reason reported"
        for fork in forks
        if fork.finish is not None and fork.finish.outcome == "fallback"
    )


def _cause_of(reason: str) -> str:
    return "first of its version" if weights_version.is_first(reason) else error_kind_of(reason)


def error_kind_of(reason: str) -> str:
    """Return the error with which a reason (``SourceTimeout: …``) begins."""
    return reason.partition(":")[0].strip()
