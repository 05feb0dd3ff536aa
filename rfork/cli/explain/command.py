"""The command `rfork explain`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rfork import settings as options
from rfork.cli.completion import complete_fork
from rfork.cli.console import print_json, reported, show
from rfork.cli.explain.account import row_of, with_upstream
from rfork.cli.explain.causes import losses
from rfork.cli.explain.picture import picture
from rfork.cli.explain.verdict import comparison, verdict
from rfork.cli.explain.version import version_account
from rfork.cli.lookup import find_fork
from rfork.cli.options import JsonOption, PlannerOption
from rfork.control.client import PlannerClient
from rfork.settings import Settings


def explain(
    fork: Annotated[
        str,
        typer.Argument(
            metavar="FORK",
            help="Id of a fork, or of an instance for its last fork; its beginning will do.",
            autocompletion=complete_fork,
        ),
    ],
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a fork took as long as it did, or fell back, and what to do about it.

    Its version and where that is from, phases against what the link allows,
    what each source gave and was held to, and what went wrong.
    """
    with reported(as_json=as_json):
        with PlannerClient.of(options.load(Settings, planner=planner)) as client:
            view = find_fork(client, fork)
            models = client.models()
            model = row_of(view, models)
            instances = client.instances(model=view.model)
            account = with_upstream(view, client.forks(model=view.model), model)
        told = verdict(account)
        version = version_account(view, models)
        if as_json:
            print_json(
                {
                    "fork": view.model_dump(mode="json"),
                    "account": account.to_dict(),
                    "version": asdict(version),
                    "losses": [asdict(loss) for loss in losses(account)],
                    "comparison": comparison(account),
                    "verdict": asdict(told),
                }
            )
            return
        hosts = {each.report.instance_id: each.report.placement.host for each in instances}
        show(picture(account, told, hosts, version))
