"""CLI reference: every command of `rfork` with its arguments and options, from typer's command tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from docs.site.reference.markdown import anchor_of, block, code, heading, nowrap_code, table
from rfork.cli.app import app

ENVIRONMENT = re.compile(r"\s*\[env: ([A-Z0-9_]+)\]")
"""Phrase with which an option's help names the setting that it overrides."""
VALUES = {
    "<str>": "TEXT",
    "<int>": "NUMBER",
    "<float>": "NUMBER",
    "<list[int]>": "NUMBER",
    "<list[str]>": "TEXT",
}


@dataclass(frozen=True)
class CliCommand:
    """An executable command and its full name."""

    name: str
    command: TyperCommand


def commands() -> Iterator[CliCommand]:
    """Return all commands in the order of `rfork --help`."""
    yield from _walk_commands("rfork", cast(TyperGroup, get_command(app)))


def page() -> str:
    """Render one section for each command."""
    return "\n".join(_section(each) for each in commands())


def _walk_commands(name: str, command: TyperCommand | TyperGroup) -> Iterator[CliCommand]:
    if not isinstance(command, TyperGroup):
        yield CliCommand(name, command)
        return
    for child, subcommand in command.commands.items():
        if not subcommand.hidden:
            yield from _walk_commands(f"{name} {child}", cast(TyperCommand, subcommand))


def _section(each: CliCommand) -> str:
    context = typer.Context(each.command, info_name=each.name)
    usage = _plain(" ".join(each.command.collect_usage_pieces(context)))
    parts = [heading(2, each.name, anchor_of(each.name)), block(f"{each.name} {usage}")]
    parts.append(_prose(each.command.help or "") + "\n")
    parameters = cast(list[TyperArgument | TyperOption], each.command.params)  # typer creates no other types
    visible = [each for each in parameters if not each.hidden]
    arguments = [
        [code(_plain("".join(each.get_usage_pieces(context)))), _text(each)[0], _default(each)]
        for each in visible
        if isinstance(each, TyperArgument)
    ]
    options = [
        [
            ", ".join(map(nowrap_code, (*each.opts, *each.secondary_opts))),
            _value(each, context),
            *_option_description(each),
        ]
        for each in visible
        if isinstance(each, TyperOption) and each.name != "help"
    ]
    if arguments:
        parts.append(table(["argument", "meaning", "default"], arguments))
    if options:
        parts.append(table(["option", "value", "description", "setting", "default"], options))
    return "\n".join(parts)


def _plain(usage: str) -> str:
    """Return the usage without the braces that typer puts around required arguments."""
    return re.sub(r"\{([^|}]+)\}", r"\1", usage).replace("......", "...")


def _prose(text: str) -> str:
    """Render a command's help: paragraphs, and example lines as code."""
    paragraphs = [part for part in re.split(r"\n\s*\n", text.replace("\b", "").strip()) if part.strip()]
    return "\n\n".join(block(part) if part.startswith("    ") else part.strip() for part in paragraphs)


def _option_description(option: TyperOption) -> list[str]:
    text, variable = _text(option)
    link = f"[{nowrap_code(variable)}](settings.md#{anchor_of(variable)})" if variable else ""
    return [text, link, _default(option)]


def _text(parameter: TyperOption | TyperArgument) -> tuple[str, str]:
    """Return a parameter's help and the variable of its setting."""
    text = parameter.help or ""
    found = ENVIRONMENT.search(text)
    return ENVIRONMENT.sub("", text).replace("[", "(").replace("]", ")"), found[1] if found else ""


def _value(option: TyperOption, context: typer.Context) -> str:
    """Return the value placeholder of an option; empty for a flag."""
    record = option.get_help_record(context)
    last = record[0].rpartition(" ")[2] if record is not None and not option.is_flag else ""
    return "" if not last or last.startswith("-") else nowrap_code(VALUES.get(last, last))


def _default(parameter: TyperOption | TyperArgument) -> str:
    value = parameter.default
    return "" if value is None or value is False or callable(value) or not str(value) else code(str(value))
