"""Shell completion from the planner: models, versions, instances, forks and replicas.

Runs in a new process for each press of Tab: one request to the planner within `TIMEOUT_S`, and no suggestions
if that fails.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import typer

from rfork import settings as options
from rfork.cli import formatters
from rfork.errors import RforkError
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings

TIMEOUT_S: Final = 0.3
MAX_SUGGESTIONS: Final = 200

Suggestion = tuple[str, str]
"""A value, and a description that the shell may show."""

_REPLICA_RANK: Final = re.compile(r"(?P<replica>.+)-(?:main|speculative)-.+")
"""Id of an instance that belongs to a replica."""


def complete_model(context: typer.Context, incomplete: str) -> list[Suggestion]:
    """Complete names of models."""

    def models(client: PlannerClient) -> Iterable[Suggestion]:
        seeds: Counter[str] = Counter()
        for row in client.models():
            seeds[row.model] += row.seeds
        return ((model, formatters.plural(count, "seed")) for model, count in seeds.items())

    return _complete(context, incomplete, models)


def complete_version(context: typer.Context, incomplete: str) -> list[Suggestion]:
    """Complete versions of the given model, or of all models."""
    given_model = context.params.get("model")

    def versions(client: PlannerClient) -> Iterable[Suggestion]:
        seeds: Counter[tuple[str, str]] = Counter()
        for row in client.models():
            if row.version and given_model in (None, row.model):
                seeds[row.version, row.model] += row.seeds
        return (
            (version, f"{formatters.plural(count, 'seed')} of {model}") for (version, model), count in seeds.items()
        )

    return _complete(context, incomplete, versions)


def complete_instance(context: typer.Context, incomplete: str) -> list[Suggestion]:
    """Complete ids of instances."""
    return _complete(
        context,
        incomplete,
        lambda client: (
            (view.report.instance_id, f"{view.report.model} on {view.report.placement.host}")
            for view in client.instance_page(limit=1000).items
        ),
    )


def complete_replica(context: typer.Context, incomplete: str) -> list[Suggestion]:
    """Complete names of replicas (RFORK_REPLICA)."""
    return _complete(
        context,
        incomplete,
        lambda client: (
            (match["replica"], view.report.model)
            for view in client.instance_page(limit=1000).items
            if (match := _REPLICA_RANK.fullmatch(view.report.instance_id))
        ),
    )


def complete_fork(context: typer.Context, incomplete: str) -> list[Suggestion]:
    """Complete ids of forks, newest first."""
    return _complete(
        context,
        incomplete,
        lambda client: (
            (fork.fork_id, f"{fork.model}, {fork.state}")
            for fork in sorted(client.fork_page(limit=1000).items, key=lambda fork: fork.age_s)
        ),
    )


def _complete(
    context: typer.Context, incomplete: str, fetch: Callable[[PlannerClient], Iterable[Suggestion]]
) -> list[Suggestion]:
    """Return the fetched suggestions that start with `incomplete`, each value once; none if the planner fails."""
    planner_url = context.params.get("planner")
    try:
        settings = options.load(InstanceSettings, planner=planner_url if isinstance(planner_url, str) else None)
        with PlannerClient.of(settings.model_copy(update={"planner_timeout_s": TIMEOUT_S})) as client:
            matching = dict(suggestion for suggestion in fetch(client) if suggestion[0].startswith(incomplete))
    except RforkError:
        return []
    return list(matching.items())[:MAX_SUGGESTIONS]
