"""Launcher flags generated from `rfork.settings.InstanceSettings`, passed on to the servers as RFORK_* variables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from pydantic.fields import FieldInfo

from rfork.settings import InstanceSettings, is_advanced, variables_of

NOT_FLAGS: Final = frozenset(
    {"token", "log_json", "log_level"}
    | {name for name, field in InstanceSettings.model_fields.items() if is_advanced(field)}
)
"""Secrets would be visible in process lists, and the server configures its logs; advanced settings have variables."""


def fields(excluded: Collection[str] = NOT_FLAGS) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the name and field of each option that is a flag."""
    yield from ((name, field) for name, field in InstanceSettings.model_fields.items() if name not in excluded)


def variable(name: str) -> str:
    """Return the environment variable of an option."""
    return variables_of(InstanceSettings, name)[0]


def destination(name: str) -> str:
    """Return the argparse destination of an option."""
    return f"rfork_{name}"


def add(
    group: argparse._ArgumentGroup,
    flag_names: Callable[[str], Sequence[str]],
    excluded: Collection[str] = NOT_FLAGS,
) -> None:
    """Add a flag for each option. `flag_names` maps the hyphenated option name to its flag names."""
    for name, field in fields(excluded):
        names = flag_names(name.replace("_", "-"))
        if field.annotation is bool:
            group.add_argument(
                *names, action="store_const", const="1", dest=destination(name), help=help_of(name, field)
            )
        else:
            metavar = name.rpartition("_")[2].upper()
            group.add_argument(*names, metavar=metavar, dest=destination(name), help=help_of(name, field))


def to_environment(values: argparse.Namespace, excluded: Collection[str] = NOT_FLAGS) -> dict[str, str]:
    """Return the options set on the command line as environment variables."""
    return {
        variable(name): str(value)
        for name, _ in fields(excluded)
        if (value := getattr(values, destination(name), None)) is not None
    }


def help_of(name: str, field: FieldInfo) -> str:
    """Return the help text of an option: description, default and variable."""
    default = "" if field.default_factory or field.default in (None, "", False) else f" (default: {field.default})"
    return f"{field.description}{default} [{variable(name)}]".replace("%", "%%")
