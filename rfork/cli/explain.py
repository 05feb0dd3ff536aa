"""`rfork explain`: the duration of a fork, or why it fell back, with its version, phases, sources and errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Final, Literal

import typer
from rich.console import ConsoleRenderable, Group
from rich.text import Text

from rfork import weights_version
from rfork.cli import fleet_queries, formatters
from rfork.cli.console import Cell, Column, FittedTable, handle_errors, print_json, print_renderable
from rfork.cli.diagnosis import Diagnosis, ForkStats, comparison, diagnose, row_of, stats_with_upstream, time_losses
from rfork.cli.options import JsonOption, PlannerOption, planner_client
from rfork.errors import PlannerRejected, UserError
from rfork.planner_client.client import PlannerClient
from rfork.schema import CrossLayoutResult, ForkInfo, InstanceInfo, ModelInfo

FORKS_HINT: Final = "`rfork status --forks` lists known forks; the planner forgets the oldest finished ones"
ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
BAR: Final = 20
PHASES: Final = {
    "capture": "inspected the target's tensors",
    "offer": "opened its own snapshot or checkpoint",
    "plan": "waited for a plan",
    "transfer": "read and verified chunks",
    "resume": "loaded chunks kept by a previous process",
    "fallback": "loaded without peers",
    "digest": "computed digests for serving",
}
"""Description of each phase."""
VERSION_ORIGINS: Final = {
    "commit": "commit of its model",
    "files": "fingerprint of its files",
    "weights": "digest of its weights",
    "update": "weights updated in place",
    "revision": "revision that it was started with",
}
"""Origin of a version by its scheme. Versions without a scheme are stated, or recorded in a snapshot."""
MAX_VERSIONS_LISTED: Final = 4


def explain(
    fork: Annotated[
        str,
        typer.Argument(
            metavar="FORK", help="Id of a fork, or of an instance for its latest fork; a unique prefix is enough."
        ),
    ],
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain why a fork was slow or fell back, and what to do about it.

    Shows its version and the version's origin, the time per phase against the minimum that the link allows,
    the bytes and rate limit of each source, and all errors.
    """
    with handle_errors(as_json=as_json):
        with planner_client(planner) as client:
            view = find_fork(client, fork)
            models = client.models()
            instances = client.instances(model=view.model)
            stats = stats_with_upstream(view, client.forks(model=view.model), row_of(view, models))
        diagnosis = diagnose(stats)
        version = version_summary(view, models)
        if as_json:
            print_json(
                {
                    "fork": view.model_dump(mode="json"),
                    "stats": stats.to_dict(),
                    "version": asdict(version),
                    "time_losses": [asdict(loss) for loss in time_losses(stats)],
                    "comparison": comparison(stats),
                    "diagnosis": asdict(diagnosis),
                }
            )
            return
        hosts = {each.report.instance_id: _host_of(each) for each in instances}
        print_renderable(render_fork(stats, diagnosis, hosts, version))


def _host_of(view: InstanceInfo) -> str:
    host = view.report.placement.host
    return host if view.report.holder is None else f"{host} ({fleet_queries.HOLDER})"


def find_fork(client: PlannerClient, text: str) -> ForkInfo:
    """Return the fork with this id, or the latest fork of an instance; a unique prefix is enough.

    Raises UserError if there is none or several, and the errors of the client.
    """
    if not ID.fullmatch(text):
        raise UserError(f"{text!r} is not an id: ids have only letters, digits and . _ : -", hint=FORKS_HINT)
    try:
        return client.fork(text)
    except PlannerRejected as error:
        if error.problem != "unknown-fork":
            raise
    forks = client.forks()
    by_instance = fleet_queries.latest_forks(forks)
    if text in by_instance:
        return by_instance[text]
    found = {fork.fork_id: fork for fork in forks if fork.fork_id.startswith(text)}
    found |= {name: fork for name, fork in by_instance.items() if name.startswith(text)}
    if not found:
        raise _not_found_error(client, text)
    if len({fork.fork_id for fork in found.values()}) > 1:
        names = sorted(found)
        raise UserError(
            f"{text!r} is ambiguous, {len(names)} ids match: {formatters.first_names(names)}",
            hint="type more of the id",
        )
    return next(iter(found.values()))


def _not_found_error(client: PlannerClient, text: str) -> UserError:
    matching = [view.report for view in client.instances() if view.report.instance_id.startswith(text)]
    if len(matching) == 1:
        reason = "it loaded without forking, or its fork was forgotten"
        return UserError(f"no fork of instance {matching[0].instance_id}: {reason}", hint=FORKS_HINT)
    if matching:
        count = formatters.plural(len(matching), "instance")
        return UserError(f"no fork of the {count} whose ids begin with {text!r}", hint=FORKS_HINT)
    return UserError(f"no fork or instance id begins with {text!r}", hint=FORKS_HINT)


# -- the version ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """The version of a fork. `others` are other versions served now, with their number of complete instances.

    `origin`: ``own`` if the target requested it, ``served`` if adopted from the fleet, ``none`` if unknown.
    """

    version: str | None
    origin: Literal["own", "served", "none"]
    first: bool
    others: dict[str, int]

    def text(self) -> str:
        """Return version and origin on one line; empty if the version is not determined."""
        if self.version is None:
            return ""
        origins = {
            "none": "placeholder for weights of unknown version",
            "served": "adopted from the fleet, because the target states no version",
            "own": VERSION_ORIGINS.get(
                self.version.partition(":")[0], "stated (RFORK_VERSION) or recorded in its snapshot"
            ),
        }
        parts = [f"{weights_version.short(self.version)}, {origins[self.origin]}"]
        if self.first:
            parts.append("first instance of this version")
        others = sorted(self.others.items(), key=lambda item: (-item[1], item[0]))[:MAX_VERSIONS_LISTED]
        counts = [
            f"{formatters.plural(count, 'instance')} of {weights_version.short(version)}" for version, count in others
        ]
        if counts:
            parts.append(f"also served: {', '.join(counts)}")
        return "; ".join(parts)


def version_summary(fork: ForkInfo, models: Sequence[ModelInfo]) -> VersionSummary:
    """Return the version that a fork got, and the other versions of its model that are served now."""
    served: Counter[str] = Counter()
    for row in models:
        same_rank = (row.model, row.rank_key) == (fork.model, fork.rank.key)
        if same_rank and row.version and row.version != fork.version and row.seeds:
            served[row.version] += row.seeds
    reasons = (fork.reason, *(fork.finish.reasons if fork.finish is not None else ()))
    first = any(weights_version.is_first(reason) for reason in reasons)
    origin: Literal["own", "served", "none"] = "served" if weights_version.ADOPTS_VERSION in fork.reason else "own"
    if fork.version is not None and weights_version.is_unnamed(fork.version):
        origin = "none"
    return VersionSummary(fork.version, origin, first, dict(served))


# -- rendering ------------------------------------------------------------------------------------------------


def render_fork(
    stats: ForkStats, diagnosis: Diagnosis, hosts: Mapping[str, str], version: VersionSummary | None = None
) -> ConsoleRenderable:
    """Return the complete explanation, the diagnosis last. `hosts`: host by instance id, if known."""
    parts: list[ConsoleRenderable] = [_head(stats, hosts), Text(""), _phases(stats)]
    if stats.sources:
        parts += [Text(""), _sources(stats, hosts)]
    finish = stats.fork.finish
    if finish is not None and finish.cross_layout is not None:
        parts += [Text(""), _layout_parts(finish.cross_layout)]
    parts.append(Text(""))
    if version is not None and (version_text := version.text()):
        parts.append(Text(f"version: {version_text}"))
    parts += [Text(fact) for fact in _facts(stats)]
    if stats.reasons:
        parts += [Text(""), Text("errors, in order", "dim")]
        parts += [Text(f"{number:>3}. {reason}") for number, reason in enumerate(stats.reasons, 1)]
    parts += [Text(""), Text.assemble(("cause  ", "bold"), diagnosis.text)]
    if diagnosis.advice:
        parts.append(Text.assemble(("advice ", "bold"), diagnosis.advice))
    return Group(*parts)


def _head(stats: ForkStats, hosts: Mapping[str, str]) -> Text:
    fork, host = stats.fork, hosts.get(stats.fork.instance_id)
    text = Text.assemble(
        (f"fork {fork.fork_id}", "bold"),
        f" of {formatters.model(fork.model, fork.rank.key)}",
        f"\ntarget {formatters.short(fork.instance_id)}{f' on {host}' if host else ''}: ",
        fleet_queries.phase_text(fork),
        f", {formatters.size(fork.image_bytes)}, {formatters.duration(stats.seconds)}",
    )
    if fork.finish is not None:
        text.append(f", finished {formatters.age(fleet_queries.finished_ago_s(fork))} ago", style="dim")
    return text


def _phases(stats: ForkStats) -> ConsoleRenderable:
    if not stats.phases:
        when = "by this rfork version" if stats.fork.finish is not None else "yet"
        return Text(f"phases: not reported {when}", "dim")
    columns = (
        Column("phase"),
        Column("time", right=True),
        Column("", priority=1),
        Column("", min_width=12, priority=2),
    )
    max_s = max(stats.phases.values()) or 1.0
    rows: list[tuple[Cell, ...]] = []
    for name, seconds in stats.phases.items():
        note = PHASES.get(name, "")
        if name == "transfer" and stats.min_transfer_s is not None and stats.link is not None:
            note += f": at least {formatters.duration(stats.min_transfer_s)} at {formatters.rate(stats.link)}"
        bar = Text("█" * round(BAR * seconds / max_s), "cyan")
        rows.append((name, formatters.duration(seconds), bar, Text(note, "dim")))
    return FittedTable(columns, rows)


def _sources(stats: ForkStats, hosts: Mapping[str, str]) -> FittedTable:
    columns = (
        Column("source", min_width=12),
        Column("sent", right=True),
        Column("share", right=True, priority=2),
        Column("rate" if stats.fork.finish is None else "peak rate", right=True, priority=3),
        Column("transport"),
        Column("rate limit", right=True),
        Column("host", min_width=8, priority=1),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            formatters.source(each.source),
            formatters.size(each.nbytes),
            f"{each.share:.0%}",
            formatters.rate(each.rate) if each.rate else "",
            each.transport or ("storage" if each.from_storage else "not reported"),
            "" if each.rate_limit is None else Text(formatters.rate(each.rate_limit), "yellow"),
            hosts.get(each.source, ""),
        )
        for each in stats.sources
    ]
    return FittedTable(columns, rows)


def _layout_parts(result: CrossLayoutResult) -> FittedTable:
    columns = (
        Column("other layout", min_width=12),
        Column("boxes", right=True, priority=2),
        Column("sent", right=True),
        Column("time", right=True, priority=1),
        Column("instance", priority=3),
        Column("host", min_width=8),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            formatters.layout(part.rank_key, part.layout_id),
            f"{part.boxes:,}",
            formatters.size(part.bytes_read),
            formatters.duration(part.seconds),
            formatters.source(part.instance_id),
            part.host,
        )
        for part in result.parts
    ]
    return FittedTable(columns, rows)


def _cross_layout_facts(result: CrossLayoutResult) -> list[str]:
    read = formatters.size(sum(part.bytes_read for part in result.parts))
    times = (
        f"sources found and placement map recorded in {formatters.duration(result.record_s)}",
        f"boxes fetched in {formatters.duration(result.transfer_s)}",
        f"loaded in {formatters.duration(result.load_s)}",
    )
    facts = [f"other layouts: {read} of {formatters.size(result.needed_bytes)} needed; {', '.join(times)}"]
    return facts + [f"other layout failed: {failure}" for failure in result.failures]


def _facts(stats: ForkStats) -> list[str]:
    facts = [f"link: {formatters.rate(stats.link)} peak" if stats.link else "link: not measured"]
    if stats.replans:
        facts.append(f"replans: {stats.replans:,}")
    if stats.bytes_repeated:
        facts.append(f"read again: {formatters.size(stats.bytes_repeated)}")
    if stats.fork.reason:
        facts.append(f"plan: {stats.fork.reason}")
    if stats.fork.finish is not None and stats.fork.finish.fallback:
        facts.append(f"loaded from: {stats.fork.finish.fallback}")
        if stats.fork.finish.cross_layout is not None:
            facts += _cross_layout_facts(stats.fork.finish.cross_layout)
    if compared := comparison(stats):
        facts.append(f"time: {compared}")
    return facts
