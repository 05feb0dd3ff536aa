"""`rfork launch`: start an SGLang or vLLM server that forks, and drain it before it exits.

With a planner, the server is started with RFORK_DRAIN_TIMEOUT_S=0: it is drained here, for at most
`drain_timeout_s` seconds, before SIGTERM reaches it, and would otherwise wait a second time. Other signals do
not drain it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from rfork import settings as options
from rfork.addresses import redacted
from rfork.cli.console import handle_errors, log_misspelt_variables
from rfork.engines import flags
from rfork.engines.launch import drain_server, engine_environment, rewrite_command, supervise, with_plugin_path
from rfork.engines.prefetch import Prefetch
from rfork.errors import SettingsError
from rfork.logs import configure, logger
from rfork.planner_client.ownership import owner_secret
from rfork.settings import InstanceSettings

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
        log_misspelt_variables()
        replica = started.environment[flags.variable("replica")]
        owner_secret(settings)  # read now, because the file may be removed before the server exits
        log.info(
            "starting the engine", engine=started.engine, replica=replica, command=redacted(" ".join(started.command))
        )
        with (
            with_plugin_path(engine_environment(started.environment, settings)) as environment,
            Prefetch(started.engine, started.arguments, settings, environment),
        ):
            code = supervise(started.command, environment, lambda stop: drain_server(settings, stop=stop))
        raise typer.Exit(code)


def parse_launch_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the RFORK_* variables set by the options, and the engine command. Exits after ``--help``."""
    parser = argparse.ArgumentParser(
        prog="rfork launch",
        usage="rfork launch [OPTIONS] -- COMMAND…",
        description="Start an SGLang or vLLM server that forks its weights. Options may also be written as --rfork-…",
        allow_abbrev=False,
        exit_on_error=False,
    )
    flags.add(parser.add_argument_group("options of the server's rfork"), lambda name: (f"--{name}", f"--rfork-{name}"))
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    try:
        values, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise SettingsError(str(error), hint="see `rfork launch --help`") from None
    command: list[str] = values.command
    if unknown:
        raise SettingsError(f"unknown option {unknown[0]}", hint="see `rfork launch --help`")
    return flags.to_environment(values), command[1:] if command[:1] == ["--"] else command


def _settings(environment: Mapping[str, str]) -> InstanceSettings:
    """Return the settings of the server. Raises SettingsError before it starts."""
    overrides = {name: environment.get(flags.variable(name)) or None for name, _ in flags.fields(excluded=())}
    return options.load(InstanceSettings, **overrides)
