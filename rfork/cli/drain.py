"""`rfork drain`: have an instance give no new readers a place, and wait until it may end."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from rfork import settings as options
from rfork.cli.connect import planner_client
from rfork.cli.console import err, escaped, out, print_json, reported
from rfork.cli.options import JsonOption, PlannerOption
from rfork.control.client import PlannerClient
from rfork.errors import PlannerRefused, PlannerUnreachable, SourceBusy
from rfork.settings import Settings
from rfork.wire import MayExit

LOOK_S = 0.5


def drain(
    instance: Annotated[
        str, typer.Argument(metavar="INSTANCE", help="Id of the instance (see `rfork status`).")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Even if it is the last that holds its weights.")
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(min=0, help="Most seconds to wait until it may end; 0: only look [env: RFORK_DRAIN_S]"),
    ] = None,
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drain an instance, as for a Kubernetes preStop hook. Exit code 0 when it may end, 4 if not in time."""
    with reported(as_json=as_json):
        chosen = options.load(Settings, planner=planner, drain_s=wait)
        with planner_client(chosen) as client:
            answer = drained(client, instance, force=force, wait_s=chosen.drain_s)
        if as_json:
            print_json({"instance_id": instance, **answer.model_dump(mode="json")})
        else:
            out.print(f"{instance} may end: {answer.reason}", markup=False)


def drained(client: PlannerClient, instance_id: str, *, force: bool, wait_s: float) -> MayExit:
    """Drain the instance and wait until it may end, over restarts of the planner.

    Raises SourceBusy where it may not within `wait_s`, PlannerRefused where it is the last seed.
    """
    deadline = time.monotonic() + wait_s
    asked = False
    while True:
        try:
            if not asked:
                _drain(client, instance_id, force=force)
                asked = True
            answer = client.may_exit(instance_id)
        except PlannerUnreachable as error:
            if time.monotonic() >= deadline:
                raise
            # A planner that comes back has forgotten that it was asked.
            asked, why = False, str(error)
        else:
            if answer.may_exit:
                return answer
            why = answer.reason
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise SourceBusy(
                f"instance {instance_id} is drained, and may not end after {wait_s:g} s: {why}",
                hint="wait longer (--wait), or end it all the same: its readers go on from elsewhere",
            )
        err.print(f"waiting: {escaped(why)}")
        time.sleep(min(LOOK_S, left_s))


def _drain(client: PlannerClient, instance_id: str, *, force: bool) -> None:
    try:
        client.drain(instance_id, force=force)
    except PlannerRefused as error:
        if error.problem == "unknown-instance":
            return
        if error.problem == "last-seed":
            error.hint = "wait until another holds them, or pass --force as an operator: the next starts cold"
        raise
