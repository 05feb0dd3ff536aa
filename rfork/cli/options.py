"""Options shared by several commands; each overrides the setting of the same name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from rfork import settings as options
from rfork.engines.arguments import canonical_model_name
from rfork.errors import SettingsError
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings

_size = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)

PlannerOption = Annotated[
    str | None,
    typer.Option("--planner", metavar="URL", help="URL of the planner [env: RFORK_PLANNER]", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ModelFilterOption = Annotated[str | None, typer.Option("--model", metavar="NAME", help="Show only this model.")]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Name of the model, under which forks find its seeds [default: the folder's name]",
    ),
]
VersionOption = Annotated[
    str | None,
    typer.Option(
        "--version",
        metavar="VERSION",
        help="Version of the weights; only instances of equal versions share weights "
        "[env: RFORK_VERSION] [default: the hub commit, else a fingerprint of the files]",
        show_default=False,
    ),
]
FolderArgument = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Hugging Face model folder.")]
BindOption = Annotated[
    str | None, typer.Option("--bind", metavar="ADDRESS", help="Address to listen on [env: RFORK_BIND]")
]
EgressOption = Annotated[
    int | None,
    typer.Option(
        "--egress-rate", metavar="BYTES", help="Maximum bytes per second to serve [env: RFORK_MAX_EGRESS_BYTES_PER_S]"
    ),
]
HostOption = Annotated[
    str | None, typer.Option("--node-name", metavar="NAME", help="Name of this node [env: RFORK_NODE_NAME]")
]


def planner_client(planner: str | None) -> PlannerClient:
    """Return a client of the planner that the option or the environment names. Raises SettingsError."""
    return PlannerClient.of(options.load(InstanceSettings, planner=planner))


def model_name(folder: Path, name: str | None) -> str:
    """Return the name under which forks find the model. Raises SettingsError for an invalid name."""
    from rfork.engines.arguments import check_model_name

    chosen = canonical_model_name(folder) if name is None else name
    check_model_name(chosen)
    return chosen


def bytes_in(text: str, option: str) -> int:
    """Parse a size such as ``5GB`` (powers of 1000) or ``500MiB`` (of 1024). Raises SettingsError."""
    match = _size.fullmatch(text.strip())
    size = 0
    if match is not None:
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
    if size < 1:
        raise SettingsError(f"{option}: {text!r} is not a size", hint="e.g. 5GB or 500MiB")
    return size
