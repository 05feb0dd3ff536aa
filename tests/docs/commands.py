"""Checks that commands on a page exist: `rfork` commands and options, variables, make targets, chart values."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

import rfork
from rfork.cli.app import app
from rfork.cli.launch import parse_launch_arguments
from rfork.engine_command import parse_engine_command
from rfork.engines import flags
from rfork.errors import RforkError, SettingsError
from rfork.settings import variables

ROOT: Final = Path(__file__).parents[2]
VARIABLE: Final = re.compile(r"(?<![A-Z_])_?RFORK_[A-Z0-9_]+(?P<some>[*…]?)")
ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
TYPER_OPTIONS: Final = frozenset({"--help", "--install-completion", "--show-completion"})
SEPARATORS: Final = frozenset({"|", "||", "&", "&&", ";", "(", ")", "|&", ";;"})
REDIRECTIONS: Final = frozenset({">", ">>", "<", "2>", ">&", "<<<"})


def simple_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell script, without leading assignments and redirections."""
    joined = re.sub(r"\\\n\s*", " ", text)
    # A substituted command is a command as well.
    for inner in re.findall(r"\$\(([^()]*)\)", joined):
        yield from simple_commands(inner)
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation that continues on the next line
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if word in SEPARATORS:
                while command and (ASSIGNMENT.fullmatch(command[0]) or command[0] in ("export", "time", "exec")):
                    command = command[1:]
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def command_problem(words: Sequence[str]) -> str | None:
    """Return the problem of a simple command that a checker exists for; None if there is none."""
    program = Path(words[0]).name
    rest = list(words[1:])
    if program == "rfork":
        return rfork_problem(rest)
    if program == "make":
        return make_problem(rest)
    if program == "helm":
        return helm_problem(rest)
    if program.startswith("python") and rest[:1] == ["-m"] and rest[1:2] and rest[1].startswith("benchmarks."):
        return module_problem(rest[1])
    if "serve" in rest[:1] or "sglang.launch_server" in rest[:2]:
        return engine_problem(words)
    return None


def rfork_problem(words: Sequence[str]) -> str | None:
    """Check an `rfork` command against its tree of subcommands and options."""
    quoted_command = f"`rfork {' '.join(words)}`"
    if list(words[:1]) == ["launch"]:
        try:
            _, engine = parse_launch_arguments([word for word in words[1:] if word != "…"])
        except (RforkError, SystemExit) as error:
            return f"{quoted_command}: {error}"
        return engine_problem(engine) if engine else None
    command: TyperCommand | TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    for word in words:
        if word.startswith("-") and word != "-":
            known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
            if (name := word.partition("=")[0]) not in known | TYPER_OPTIONS:
                return f"{quoted_command}: no option {name}"
        elif isinstance(command, TyperGroup):
            if word.isupper():
                return None  # `rfork COMMAND --help`: any of them
            if word not in command.commands:
                return f"{quoted_command}: no command {word}"
            command = command.commands[word]  # type: ignore[assignment]
    return None


def make_problem(words: Sequence[str]) -> str | None:
    """Check `make TARGET… NAME=VALUE…` against the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    unknown = [word for word in words if "=" not in word and not word.startswith("-") and word not in targets]
    return f"no target {unknown[0]} in the Makefile" if unknown else None


def module_problem(name: str) -> str | None:
    """Check that the module of ``python -m benchmarks.NAME`` exists."""
    path = ROOT / name.replace(".", "/")
    exists = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    return None if exists or "NAME" in name else f"no module {name}"


def helm_problem(words: Sequence[str]) -> str | None:
    """Check each ``--set NAME=VALUE`` of a helm command against the chart's schema."""
    schema = json.loads((ROOT / "deploy/helm/rfork/values.schema.json").read_text())
    for at, word in enumerate(words):
        if word in ("--set", "--set-string") and at + 1 < len(words):
            for pair in re.split(r",(?=[a-zA-Z.]+=)", words[at + 1]):
                path = pair.partition("=")[0]
                if not _is_value(schema, path.split(".")):
                    return f"the chart has no value {path}"
    return None


def _is_value(schema: Mapping[str, object], path: Sequence[str]) -> bool:
    known = cast(Mapping[str, Mapping[str, object]], schema.get("properties", {}))
    if not path:
        return True
    if path[0] in known:
        return _is_value(known[path[0]], path[1:])
    return not known and schema.get("additionalProperties") is not False


def engine_problem(words: Sequence[str]) -> str | None:
    """Check an engine's command: `rfork launch` recognises it, and rfork's flags in it exist."""
    try:
        parse_engine_command([word for word in words if word != "…"])
    except SettingsError as error:
        return str(error)
    parser = argparse.ArgumentParser(add_help=False)
    flags.add(parser.add_argument_group(), lambda name: [f"--rfork-{name}"])
    known = {option for action in parser._actions for option in action.option_strings}
    unknown = [word for word in words if word.startswith("--rfork-") and word.partition("=")[0] not in known]
    return f"no flag {unknown[0]}" if unknown else None


def setting_variables() -> set[str]:
    """Return every environment variable that sets a setting."""
    return set(variables())


def unknown_variables(text: str) -> list[str]:
    """Return the RFORK_… variables in a text that set no setting; ``RFORK_STORAGE_*`` names several."""
    known = setting_variables()
    makefile = (ROOT / "Makefile").read_text()
    return [
        found[0]
        for found in VARIABLE.finditer(text)
        if not (
            any(name.startswith(found[0].rstrip("*…")) for name in known)
            if found["some"] or found[0].endswith("_")
            else found[0] in known or found[0] in makefile
        )
    ]


def unknown_python_names(text: str) -> list[str]:
    """Return names and keyword arguments of `rfork` in a piece of Python that do not exist."""
    wrong = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rfork":
            if not hasattr(rfork, node.attr):
                wrong.append(f"rfork.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("rfork."):
            wrong += _unknown_keywords(node)
    return wrong


def _unknown_keywords(call: ast.Call) -> list[str]:
    name = ast.unparse(call.func)
    found: object = rfork
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    if not callable(found):
        return []
    parameters = inspect.signature(found).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [f"{name}({word.arg}=)" for word in call.keywords if word.arg is not None and word.arg not in parameters]
