"""The command `rfork explain`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rfork import settings as options
from rfork.cli.completion import complete_fork
from rfork.cli.console import handle_errors, print_json, print_renderable
from rfork.cli.explain.diagnosis import comparison, diagnose
from rfork.cli.explain.fork_stats import row_of, stats_with_upstream
from rfork.cli.explain.render import render_fork
from rfork.cli.explain.time_breakdown import time_losses
from rfork.cli.explain.version import version_summary
from rfork.cli.options import JsonOption, PlannerOption
from rfork.cli.resolve import find_fork
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings


def explain(
    fork: Annotated[
        str,
        typer.Argument(
            metavar="FORK",
            help="Id of a fork, or of an instance for its latest fork; a unique prefix is enough.",
            autocompletion=complete_fork,
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
        with PlannerClient.of(options.load(InstanceSettings, planner=planner)) as client:
            view = find_fork(client, fork)
            models = client.models()
            model = row_of(view, models)
            instances = client.instances(model=view.model)
            stats = stats_with_upstream(view, client.forks(model=view.model), model)
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
        hosts = {each.report.instance_id: each.report.placement.host for each in instances}
        print_renderable(render_fork(stats, diagnosis, hosts, version))
