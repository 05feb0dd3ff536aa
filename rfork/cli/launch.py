"""`rfork launch`: start SGLang or vLLM so that it forks, and drain it before it ends.

Where a planner is set, the server is given RFORK_DRAIN_TIMEOUT_S=0: it is drained here, for `drain_s` seconds at
most, before the SIGTERM reaches it, and would else wait as long again. So no other signal drains it.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from rfork import settings as options
from rfork.cli.console import handle_errors
from rfork.engines import flags
from rfork.engines.launch import engine_environment, rewrite_command, with_plugin_path
from rfork.engines.supervisor import supervise
from rfork.errors import RforkError, SettingsError
from rfork.logs import configure, logger
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.drain import drain_replica
from rfork.planner_client.ownership import owner_secret
from rfork.settings import InstanceSettings, redacted

log = logger(__name__)

CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}


def launch(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] -- COMMAND…", show_default=False)] = None,
) -> None:
    """Start an SGLang or vLLM server that forks its weights (`rfork launch --help` lists the options)."""
    with handle_errors():
        environment_overrides, command = parse_launch_arguments(arguments or ())
        started = rewrite_command(command, {**os.environ, **environment_overrides})
        settings = _settings(started.environment)
        configure(settings.log_json, settings.log_level)
        replica = started.environment[flags.variable("replica")]
        owner_secret(settings)  # read now: its file may be gone when the server ends
        log.info("launching", engine=started.engine, replica=replica, command=redacted(" ".join(started.command)))
        with with_plugin_path(engine_environment(started.environment, settings)) as environment:
            code = supervise(started.command, environment, lambda stop: _drain(settings, replica, stop))
        raise typer.Exit(code)


def parse_launch_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The RFORK_* that the options in front set, and the command behind them. Exits after ``--help``."""
    parser = argparse.ArgumentParser(
        prog="rfork launch",
        usage="rfork launch [OPTIONS] -- COMMAND…",
        description="Start an SGLang or vLLM server that forks its weights. Each option may be spelt --rfork-…, too.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    flags.add(
        parser.add_argument_group("what the server's rfork is told"),
        lambda name: (f"--{name}", f"--rfork-{name}"),
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    try:
        values, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise SettingsError(str(error), hint="see `rfork launch --help`") from None
    command: list[str] = values.command
    if unknown:
        raise SettingsError(f"there is no option {unknown[0]}", hint="see `rfork launch --help`")
    return flags.to_environment(values), command[1:] if command[:1] == ["--"] else command


def _settings(environment: Mapping[str, str]) -> InstanceSettings:
    """Those that the server will have. Raises SettingsError before it is started."""
    overrides = {name: environment.get(flags.variable(name)) or None for name, _ in flags.fields(without=())}
    return options.load(InstanceSettings, **overrides)


def _drain(settings: InstanceSettings, replica: str, stop: threading.Event) -> None:
    if settings.planner is None:
        return
    try:
        log.info("draining", replica=replica, most_s=settings.drain_timeout_s)
        with PlannerClient.of(settings) as client:
            for each in drain_replica(client, replica, wait_s=settings.drain_timeout_s, force=True, stop=stop):
                log.info("drained", instance_id=each.instance_id, can_exit=each.can_exit, reason=each.reason)
    except RforkError as error:
        log.warning("not drained", because=str(error))
    except Exception:  # a bug is no reason for the engine to outlive a SIGTERM
        log.exception("not drained")
