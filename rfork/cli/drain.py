"""`rfork drain`: stop new readers on instances, and wait until they can exit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rfork import settings as options
from rfork.cli.console import handle_errors, out, print_json, print_result, waiting
from rfork.cli.options import JsonOption, PlannerOption
from rfork.errors import SettingsError, SourceBusy
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.drain import drain_instance, drain_replica
from rfork.settings import InstanceSettings


def drain(
    instance: Annotated[
        str | None, typer.Argument(metavar="INSTANCE", help="Id of the instance (see `rfork status`).")
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option("--replica", metavar="NAME", help="Drain all instances of this replica (its RFORK_REPLICA)."),
    ] = None,
    own: Annotated[
        bool,
        typer.Option(
            "--own",
            help="Drain all instances of this container's replica (RFORK_REPLICA), even a last seed; for preStop "
            "hooks.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Drain even the last seed of its weights.")] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Maximum seconds to wait until the instance can exit; 0: check once [env: RFORK_DRAIN_TIMEOUT_S]",
        ),
    ] = None,
    planner: PlannerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drain instances, for example in a Kubernetes preStop hook.

    Exit code 0 when all can exit, 4 if some cannot exit in time.
    """
    with handle_errors(as_json=as_json):
        if [instance is not None, replica is not None, own].count(True) != 1:
            raise SettingsError(
                "select either one instance, or a replica with --replica NAME or --own",
                hint="`rfork status` lists the instances",
            )
        chosen = options.load(InstanceSettings, planner=planner, drain_timeout_s=wait)
        if own and chosen.replica is None:
            raise SettingsError(
                "--own drains the replica that RFORK_REPLICA names, but it is not set",
                hint="run it in the server's container, or use --replica NAME",
            )
        named = chosen.replica if own else replica
        with PlannerClient.of(chosen) as client:
            if named is not None:
                # A server that drains itself is about to exit, whether or not it is the last seed.
                _drain_all(client, named, force=force or own, wait_s=chosen.drain_timeout_s, as_json=as_json)
            elif instance is not None:
                with waiting(chosen.drain_timeout_s) as on_wait:
                    drained = drain_instance(
                        client, instance, force=force, wait_s=chosen.drain_timeout_s, on_wait=on_wait
                    )
                result = {"instance_id": instance, **drained.model_dump(mode="json")}
                print_result(result, f"{instance} can exit: {drained.reason}", as_json=as_json)


def _drain_all(client: PlannerClient, replica: str, *, force: bool, wait_s: float, as_json: bool) -> None:
    with waiting(wait_s) as on_wait:
        drain_results = drain_replica(client, replica, force=force, wait_s=wait_s, on_wait=on_wait)
    if as_json:
        print_json({"replica": replica, "instances": [asdict(each) for each in drain_results]})
    elif not drain_results:
        out.print(f"replica {replica} can exit: the planner knows no instance of it")
    else:
        for each in drain_results:
            word = "can exit" if each.can_exit else "cannot exit"
            out.print(f"{each.instance_id} {word}: {each.reason}")
    if left := [each.instance_id for each in drain_results if not each.can_exit]:
        raise SourceBusy(
            f"replica {replica} cannot exit after {wait_s:g} s: {', '.join(left)}",
            hint="wait longer (--wait), or stop it anyway: its readers continue from other sources",
        )
