"""Command lines that start SGLang or vLLM: which engine, where its arguments begin, what they ask for.

Pure functions over words, for whoever starts a command (`rfork launch`) and whoever changes one before it is
started elsewhere (the planner's Kubernetes hook). Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rfork.errors import SettingsError

EngineName = Literal["vllm", "sglang"]

LOAD_FORMAT: Final = "rfork"
"""The load format that engines know rfork by."""
PLUGIN: Final = "rfork"
"""The name of rfork's entry points, for engines that are told which plug-ins to load."""
ENTRY_POINTS: Final[Mapping[str, str]] = {
    "vllm.general_plugins": "rfork.engines.vllm.plugin:register",
    "sglang.srt.plugins": "rfork.engines.sglang.plugin:register",
}
"""As in pyproject.toml: where engines look for plug-ins, and what they find there."""
ALLOWLISTS: Final[Mapping[EngineName, str]] = {"vllm": "VLLM_PLUGINS", "sglang": "SGLANG_PLUGINS"}
"""The variables by which engines are told to load some plug-ins only."""
MODULES: Final[Mapping[str, tuple[EngineName, bool]]] = {
    "vllm.entrypoints.openai.api_server": ("vllm", False),
    "vllm.entrypoints.cli.main": ("vllm", True),
    "sglang.launch_server": ("sglang", False),
    "sglang.cli.main": ("sglang", True),
}
"""Modules that start an engine, and whether they want the word ``serve`` first."""
SHELLS: Final = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh", "fish"})
PYTHON: Final = re.compile(r"python[0-9.]*")
OPTIONS_WITH_VALUE: Final = frozenset({"-X", "-W", "--check-hash-based-pycs"})
"""Options of Python's own that are followed by a word."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The engine that a command starts, and at which word its own arguments begin."""

    engine: EngineName
    at: int


def parse_engine_command(words: Sequence[str]) -> EngineCommand:
    """Which engine the words start. Raises SettingsError where none, or where that cannot be told."""
    for at, word in enumerate(words):
        name = Path(word).name
        if name in SHELLS:
            raise SettingsError(
                f"the command is a shell's ({word}): what it starts cannot be changed",
                hint="write the engine's own command behind `--`; in a script, put `rfork launch … --` in front of it",
            )
        if name in ("vllm", "sglang") and _starts_engine(words, at):
            engine: EngineName = "vllm" if name == "vllm" else "sglang"
            return EngineCommand(engine, _index_after_serve(words, at + 1, name))
        if PYTHON.fullmatch(name) and (found := _python(words, at + 1)) is not None:
            return found
    raise SettingsError(
        f"the command starts neither vLLM nor SGLang: {' '.join(words)[:200]}",
        hint="known are `vllm serve`, `sglang serve`, and `python -m` with " + ", ".join(MODULES),
    )


def load_format(arguments: Sequence[str]) -> str | None:
    """The load format that the arguments name last; None where they name none."""
    found: str | None = None
    for at, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") == "--load-format":
            found = value if equals else arguments[at + 1] if at + 1 < len(arguments) else ""
    return found


def plugin_allowlist(engine: EngineName, allowlist: str | None) -> str | None:
    """The value of the engine's `ALLOWLISTS` variable with rfork among the plug-ins; None: there is no list.

    vLLM loads no plug-in by an empty list, SGLang takes one for none.
    """
    if allowlist is None or (engine == "sglang" and not allowlist.strip()):
        return allowlist
    names = [name for name in map(str.strip, allowlist.split(",")) if name]
    return ",".join(names if PLUGIN in names else [*names, PLUGIN])


def _starts_engine(words: Sequence[str], at: int) -> bool:
    """Whether a word that is named as an engine is a program, and not an argument of another."""
    return at == 0 or not words[at - 1].startswith("--")


def _python(words: Sequence[str], at: int) -> EngineCommand | None:
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
            return EngineCommand(engine, _index_after_serve(words, at + 2, module) if serves else at + 2)
        at += 2 if word in OPTIONS_WITH_VALUE else 1
    return None


def _index_after_serve(words: Sequence[str], at: int, name: str) -> int:
    """Where the arguments of ``NAME serve`` begin."""
    verb = words[at] if at < len(words) else ""
    if verb != "serve":
        raise SettingsError(f"`{' '.join(filter(None, (name, verb)))}` is no server: `{name} serve` is")
    return at + 1
