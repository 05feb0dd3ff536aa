"""Any command that starts SGLang or vLLM, made to fork: its load format named, and rfork's plug-in found.

Runs before the engine, in a process of rfork's own (`rfork launch`). No file of the engine is touched.
"""

from __future__ import annotations

import re
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from uuid import uuid4

import rfork
from rfork.engines import LOAD_FORMAT
from rfork.engines.flags import variable
from rfork.errors import SettingsError
from rfork.settings import Settings

EngineName = Literal["vllm", "sglang"]

PLUGIN: Final = "rfork"
ENTRY_POINTS: Final[Mapping[str, str]] = {
    "vllm.general_plugins": "rfork.engines.vllm.plugin:register",
    "sglang.srt.plugins": "rfork.engines.sglang.plugin:register",
}
"""As in pyproject.toml: where engines look for plug-ins, and what they find there."""
ALLOWLISTS: Final[Mapping[EngineName, str]] = {"vllm": "VLLM_PLUGINS", "sglang": "SGLANG_PLUGINS"}
MODULES: Final[Mapping[str, tuple[EngineName, bool]]] = {
    "vllm.entrypoints.openai.api_server": ("vllm", False),
    "vllm.entrypoints.cli.main": ("vllm", True),
    "sglang.launch_server": ("sglang", False),
    "sglang.cli.main": ("sglang", True),
}
"""Modules that start an engine, and whether they want the word ``serve`` first."""
SHELLS: Final = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh", "fish"})
PYTHON: Final = re.compile(r"python[0-9.]*")
ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
TAKE_A_VALUE: Final = frozenset({"-X", "-W", "--check-hash-based-pycs"})
"""Options of Python's own that are followed by a word."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started instead: the command, and its environment."""

    engine: EngineName
    command: tuple[str, ...]
    environment: Mapping[str, str]


def rewritten(command: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """The command with ``--load-format rfork``, and the environment in which its plug-in is allowed.

    `environment` is what the command would get. Raises SettingsError where it starts no engine, where that
    cannot be told, and where it asks for another load format.
    """
    words, variables = _without_env(command, environment)
    if not words:
        raise SettingsError(
            "there is no command to launch",
            hint="rfork launch --planner URL -- vllm serve MODEL, or … -- python -m sglang.launch_server …",
        )
    engine, at = _engine(words)
    chosen = _load_format(words[at:])
    if chosen is not None and chosen != LOAD_FORMAT:
        raise SettingsError(
            f"the command asks for --load-format {chosen}: `rfork launch` sets {LOAD_FORMAT}",
            hint="leave --load-format out; what nobody holds is loaded as without it",
        )
    if chosen is None:
        words = [*words, "--load-format", LOAD_FORMAT]
    allowlist = ALLOWLISTS[engine]
    if (allowed := variables.get(allowlist)) is not None and (engine == "vllm" or allowed.strip()):
        names = [name for name in map(str.strip, allowed.split(",")) if name]
        variables[allowlist] = ",".join(names if PLUGIN in names else [*names, PLUGIN])
    variables.setdefault(variable("replica"), replica_name())
    return Launch(engine, tuple(words), variables)


def for_the_engine(environment: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The environment of a server whose launcher drains it: its own side waits for no reader again.

    `settings` are those of the environment. Without a planner in them the launcher drains nothing.
    """
    alone = {} if settings.planner is None else {variable("drain_s"): "0"}
    return {**environment, **alone}


def replica_name() -> str:
    """A name for one start of one server, which no other has."""
    host = re.sub(r"[^A-Za-z0-9_.-]+", "-", socket.gethostname())[-40:].strip("-")
    return f"{host or 'server'}-{uuid4().hex[:12]}"


@contextmanager
def findable(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment in which any Python finds rfork and its plug-ins, inside the `with` block.

    Engines find plug-ins by the metadata of installed packages. An image to which rfork's files were only
    added has none; so a folder is put in front of Python's path that has the metadata, and a link to this
    rfork. Where rfork is installed as well, Python takes the first and knows them for one.
    """
    with tempfile.TemporaryDirectory(prefix="rfork-launch-") as made:
        folder = Path(made)
        (folder / "rfork").symlink_to(Path(rfork.__file__).parent, target_is_directory=True)
        metadata = folder / f"rfork-{rfork.__version__}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: rfork\nVersion: {rfork.__version__}\n"
        )
        (metadata / "entry_points.txt").write_text(
            "".join(f"[{group}]\n{PLUGIN} = {where}\n" for group, where in ENTRY_POINTS.items())
        )
        before = environment.get("PYTHONPATH")
        yield {**environment, "PYTHONPATH": f"{folder}:{before}" if before else str(folder)}


def _without_env(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command less an ``env X=Y`` in front of it, and the environment that it makes."""
    words, variables = list(command), dict(environment)
    while words and Path(words[0]).name == "env":
        words = words[1:]
        while words and ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words and words[0].startswith("-"):
            raise SettingsError(
                f"cannot tell what `env {words[0]}` leaves of the environment",
                hint="set the variables in front of `rfork launch`, or as `env NAME=VALUE …` without options",
            )
    return words, variables


def _engine(words: Sequence[str]) -> tuple[EngineName, int]:
    """Which engine the words start, and where its own arguments begin."""
    for at, word in enumerate(words):
        name = Path(word).name
        if name in SHELLS:
            raise SettingsError(
                f"the command is a shell's ({word}): what it starts cannot be changed",
                hint="write the engine's own command behind `--`; "
                "in a script, put `rfork launch … --` in front of it",
            )
        if name in ("vllm", "sglang") and _starts(words, at):
            engine: EngineName = "vllm" if name == "vllm" else "sglang"
            return engine, _served(words, at + 1, name)
        if PYTHON.fullmatch(name) and (found := _python(words, at + 1)) is not None:
            return found
    raise SettingsError(
        f"the command starts neither vLLM nor SGLang: {' '.join(words)[:200]}",
        hint="known are `vllm serve`, `sglang serve`, and `python -m` with " + ", ".join(MODULES),
    )


def _starts(words: Sequence[str], at: int) -> bool:
    """Whether a word that is named as an engine is a program, and not an argument of another."""
    return at == 0 or not words[at - 1].startswith("--")


def _python(words: Sequence[str], at: int) -> tuple[EngineName, int] | None:
    """The engine that a Python with these arguments starts; None: what follows is a script's path."""
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        flags = "" if word.startswith("--") else word[1:]
        if flags[:1] not in ("X", "W") and {"E", "I"} & set(flags.partition("m")[0]):
            raise SettingsError(
                f"python {word} ignores PYTHONPATH, by which the engine finds rfork", hint="leave it out"
            )
        if flags[:1] == "c":
            raise SettingsError("the command is a program of `python -c`: what it starts cannot be changed")
        if flags.endswith("m") and flags[:1] not in ("X", "W"):
            module = words[at + 1] if at + 1 < len(words) else ""
            if module not in MODULES:
                raise SettingsError(
                    f"python -m {module} is none of the modules that start an engine",
                    hint=f"known are {', '.join(MODULES)}",
                )
            engine, serves = MODULES[module]
            return engine, _served(words, at + 2, module) if serves else at + 2
        at += 2 if word in TAKE_A_VALUE else 1
    return None


def _served(words: Sequence[str], at: int, name: str) -> int:
    """Where the arguments of ``NAME serve`` begin."""
    verb = words[at] if at < len(words) else ""
    if verb != "serve":
        raise SettingsError(f"`{' '.join(filter(None, (name, verb)))}` is no server: `{name} serve` is")
    return at + 1


def _load_format(arguments: Sequence[str]) -> str | None:
    """The load format that the arguments name last; None where they name none."""
    found: str | None = None
    for at, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") == "--load-format":
            found = value if equals else arguments[at + 1] if at + 1 < len(arguments) else ""
    return found
