"""Options that several commands share; each overrides the setting of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rfork.cli.completion import complete_version
from rfork.engines.model_name import canonical_model_name

PlannerOption = Annotated[
    str | None,
    typer.Option("--planner", metavar="URL", help="URL of the planner [env: RFORK_PLANNER]", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for machines.")]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Name of the model; seeds and forks meet under it [default: the folder's name]",
    ),
]
VersionOption = Annotated[
    str | None,
    typer.Option(
        "--version",
        metavar="VERSION",
        help="Version of the weights; instances share weights only of equal versions "
        "[env: RFORK_VERSION] [default: the hub commit, else a fingerprint of the files]",
        show_default=False,
        autocompletion=complete_version,
    ),
]
FolderArgument = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face model folder.")]
BindOption = Annotated[
    str | None, typer.Option("--bind", metavar="ADDRESS", help="Address to listen on [env: RFORK_BIND]")
]
EgressOption = Annotated[
    int | None,
    typer.Option(
        "--egress-rate", metavar="BYTES", help="Most bytes a second to give [env: RFORK_MAX_EGRESS_BYTES_PER_S]"
    ),
]
HostOption = Annotated[
    str | None, typer.Option("--host", metavar="NAME", help="Name of this node [env: RFORK_NODE_NAME]")
]


def model_name(folder: Path, name: str | None) -> str:
    """The name seeds and forks meet under. Raises SettingsError for one that the planner would refuse."""
    from rfork.engines.argument_checks import check_model_name

    chosen = canonical_model_name(folder) if name is None else name
    check_model_name(chosen)
    return chosen
