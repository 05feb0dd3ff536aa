"""Options of `rfork.settings.InstanceSettings` as flags of launchers, which hand them on to servers as RFORK_*."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from pydantic.fields import FieldInfo

from rfork.settings import InstanceSettings

NOT_FLAGS: Final = frozenset({"token", "owner_secret", "verify", "log_json", "log_level"})
"""Secrets show in process lists, and the server logs as it is told to."""


def fields(without: Collection[str] = NOT_FLAGS) -> Iterator[tuple[str, FieldInfo]]:
    """The name of each option that is a flag, and what is known of it."""
    yield from ((name, field) for name, field in InstanceSettings.model_fields.items() if name not in without)


def variable(name: str) -> str:
    """The environment variable of an option."""
    return f"{InstanceSettings.model_config.get('env_prefix', '')}{name}".upper()


def destination(name: str) -> str:
    """Where argparse keeps the value of an option."""
    return f"rfork_{name}"


def add(
    group: argparse._ArgumentGroup,
    spelt: Callable[[str], Sequence[str]],
    without: Collection[str] = NOT_FLAGS,
) -> None:
    """Add a flag for each option; `spelt` gives its names, of the option's with hyphens."""
    for name, field in fields(without):
        names = spelt(name.replace("_", "-"))
        if field.annotation is bool:
            group.add_argument(
                *names, action="store_const", const="1", dest=destination(name), help=help_of(name, field)
            )
        else:
            metavar = name.rpartition("_")[2].upper()
            group.add_argument(*names, metavar=metavar, dest=destination(name), help=help_of(name, field))


def to_environment(values: argparse.Namespace, without: Collection[str] = NOT_FLAGS) -> dict[str, str]:
    """The options that were given, as environment variables."""
    return {
        variable(name): str(value)
        for name, _ in fields(without)
        if (value := getattr(values, destination(name), None)) is not None
    }


def help_of(name: str, field: FieldInfo) -> str:
    """What an option does, its default, and its variable."""
    default = "" if field.default_factory or field.default in (None, "", False) else f" (default: {field.default})"
    return f"{field.description}{default} [{variable(name)}]".replace("%", "%%")
