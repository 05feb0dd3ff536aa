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
from rfork.cli import format
from rfork.errors import RforkError
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings

TIMEOUT_S: Final = 0.3
MAX_ITEMS: Final = 200
"""Maximum number of suggestions."""

Completions = list[tuple[str, str]]
"""Suggestions, each with a description that the shell may show."""

_replica: Final = re.compile(r"(.+)-(?:main|speculative)-.+")


def complete_model(context: typer.Context, incomplete: str) -> Completions:
    """Complete names of models."""

    def query(client: PlannerClient) -> Iterable[tuple[str, str]]:
        seeds: Counter[str] = Counter()
        for row in client.models():
            seeds[row.model] += row.seeds
        return ((name, format.plural(count, "seed")) for name, count in seeds.items())

    return _query(context, incomplete, query)


def complete_version(context: typer.Context, incomplete: str) -> Completions:
    """Complete versions of the given model, or of all models."""
    model = context.params.get("model")

    def query(client: PlannerClient) -> Iterable[tuple[str, str]]:
        seeds: Counter[tuple[str, str]] = Counter()
        for row in client.models():
            if row.version and model in (None, row.model):
                seeds[row.version, row.model] += row.seeds
        return ((version, f"{format.plural(count, 'seed')} of {of}") for (version, of), count in seeds.items())

    return _query(context, incomplete, query)


def complete_instance(context: typer.Context, incomplete: str) -> Completions:
    """Complete ids of instances."""
    return _query(
        context,
        incomplete,
        lambda client: (
            (view.report.instance_id, f"{view.report.model} on {view.report.placement.host}")
            for view in client.instance_page(limit=1000).items
        ),
    )


def complete_replica(context: typer.Context, incomplete: str) -> Completions:
    """Complete names of replicas (RFORK_REPLICA)."""
    return _query(
        context,
        incomplete,
        lambda client: (
            (match.group(1), view.report.model)
            for view in client.instance_page(limit=1000).items
            if (match := _replica.fullmatch(view.report.instance_id))
        ),
    )


def complete_fork(context: typer.Context, incomplete: str) -> Completions:
    """Complete ids of forks, newest first."""
    return _query(
        context,
        incomplete,
        lambda client: (
            (fork.fork_id, f"{fork.model}, {fork.state}")
            for fork in sorted(client.fork_page(limit=1000).items, key=lambda fork: fork.age_s)
        ),
    )


def _query(
    context: typer.Context, incomplete: str, query: Callable[[PlannerClient], Iterable[tuple[str, str]]]
) -> Completions:
    planner_url = context.params.get("planner")
    try:
        settings = options.load(InstanceSettings, planner=planner_url if isinstance(planner_url, str) else None)
        with PlannerClient.of(settings.model_copy(update={"planner_timeout_s": TIMEOUT_S})) as client:
            found = dict(pair for pair in query(client) if pair[0].startswith(incomplete))
    except RforkError:
        return []
    return list(found.items())[:MAX_ITEMS]
