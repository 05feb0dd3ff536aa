"""Parser of command lines that start SGLang or vLLM: the engine, the start of its arguments, and relevant
options.

Pure functions on lists of words, used by `rfork launch` and by the planner's Kubernetes integration. Imports
no torch.
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
"""Load format under which engines know rfork."""
PLUGIN: Final = "rfork"
"""Name of rfork's entry points, for plug-in allowlists."""
ENTRY_POINTS: Final[Mapping[str, str]] = {
    "vllm.general_plugins": "rfork.engines.vllm.plugin:register",
    "sglang.srt.plugins": "rfork.engines.sglang.plugin:register",
}
"""Entry points as in pyproject.toml: group and object, by engine."""
ALLOWLISTS: Final[Mapping[EngineName, str]] = {"vllm": "VLLM_PLUGINS", "sglang": "SGLANG_PLUGINS"}
"""Variables with the plug-in allowlist of each engine."""
MODULES: Final[Mapping[str, tuple[EngineName, bool]]] = {
    "vllm.entrypoints.openai.api_server": ("vllm", False),
    "vllm.entrypoints.cli.main": ("vllm", True),
    "sglang.launch_server": ("sglang", False),
    "sglang.cli.main": ("sglang", True),
}
"""Modules that start an engine, and whether they need the word ``serve`` first."""
SHELLS: Final = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh", "fish"})
PYTHON: Final = re.compile(r"python[0-9.]*")
OPTIONS_WITH_VALUE: Final = frozenset({"-X", "-W", "--check-hash-based-pycs"})
"""Options of Python itself that are followed by a value."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The engine that a command starts, and the index of its first argument."""

    engine: EngineName
    at: int


MODEL_FLAGS: Final[Mapping[EngineName, tuple[str, ...]]] = {
    "vllm": ("--model",),
    "sglang": ("--model-path", "--model"),
}
"""Flags of the model's path or hub id. vLLM also accepts it as the first argument of ``serve``."""


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """The model that a command serves, as far as its arguments show it."""

    path: str
    revision: str | None = None
    served_name: str | None = None
    """Name that SGLang's instances of the model use; vLLM's are named by the path."""


def model_arguments(engine: EngineName, arguments: Sequence[str]) -> ModelArguments | None:
    """Return the model in the arguments of an engine; None if they do not contain one, as with a configuration file."""
    path = next(filter(None, (flag_value(arguments, flag) for flag in MODEL_FLAGS[engine])), None)
    if path is None and engine == "vllm" and arguments and not arguments[0].startswith("-"):
        path = arguments[0]
    if path is None:
        return None
    served_name = flag_value(arguments, "--served-model-name") if engine == "sglang" else None
    return ModelArguments(path, flag_value(arguments, "--revision"), None if served_name == path else served_name)


def parse_engine_command(words: Sequence[str]) -> EngineCommand:
    """Return the engine that the command starts. Raises SettingsError if there is none or it cannot be
    determined.
    """
    for at, word in enumerate(words):
        name = Path(word).name
        if name in SHELLS:
            raise SettingsError(
                f"the command starts a shell ({word}): commands inside it cannot be changed",
                hint="write the engine's own command after `--`; in a script, put `rfork launch … --` in front of it",
            )
        if name in ("vllm", "sglang") and _starts_engine(words, at):
            engine: EngineName = "vllm" if name == "vllm" else "sglang"
            return EngineCommand(engine, _index_after_serve(words, at + 1, name))
        if PYTHON.fullmatch(name) and (found := _python(words, at + 1)) is not None:
            return found
    raise SettingsError(
        f"the command starts neither vLLM nor SGLang: {' '.join(words)[:200]}",
        hint="supported: `vllm serve`, `sglang serve`, and `python -m` with " + ", ".join(MODULES),
    )


def load_format(arguments: Sequence[str]) -> str | None:
    """Return the last load format in the arguments, or None."""
    return flag_value(arguments, "--load-format")


def flag_value(arguments: Sequence[str], name: str) -> str | None:
    """Return the last value of a flag, written with hyphens or underscores; None without the flag."""
    found: str | None = None
    for at, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") == name:
            found = value if equals else arguments[at + 1] if at + 1 < len(arguments) else ""
    return found


def plugin_allowlist(engine: EngineName, allowlist: str | None) -> str | None:
    """Return the value of the engine's `ALLOWLISTS` variable with rfork added; None: there is no allowlist.

    vLLM loads no plug-in for an empty list; SGLang treats it as no list.
    """
    if allowlist is None or (engine == "sglang" and not allowlist.strip()):
        return allowlist
    names = [name for name in map(str.strip, allowlist.split(",")) if name]
    return ",".join(names if PLUGIN in names else [*names, PLUGIN])


def _starts_engine(words: Sequence[str], at: int) -> bool:
    """Return True if a word with the name of an engine is the program, not an argument of another one."""
    return at == 0 or not words[at - 1].startswith("--")


def _python(words: Sequence[str], at: int) -> EngineCommand | None:
    """Return the engine that a Python with these arguments starts; None: a script's path follows."""
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        flags = "" if word.startswith("--") else word[1:]
        if flags[:1] not in ("X", "W") and {"E", "I"} & set(flags.partition("m")[0]):
            raise SettingsError(
                f"python {word} ignores PYTHONPATH, which the engine needs to find rfork", hint="remove it"
            )
        if flags[:1] == "c":
            raise SettingsError("the command runs `python -c`: code inside it cannot be changed")
        if flags.endswith("m") and flags[:1] not in ("X", "W"):
            module = words[at + 1] if at + 1 < len(words) else ""
            if module not in MODULES:
                raise SettingsError(
                    f"python -m {module} does not start a supported engine",
                    hint=f"supported: {', '.join(MODULES)}",
                )
            engine, serves = MODULES[module]
            return EngineCommand(engine, _index_after_serve(words, at + 2, module) if serves else at + 2)
        at += 2 if word in OPTIONS_WITH_VALUE else 1
    return None


def _index_after_serve(words: Sequence[str], at: int, name: str) -> int:
    """Return the index of the first argument after ``NAME serve``."""
    verb = words[at] if at < len(words) else ""
    if verb != "serve":
        raise SettingsError(f"`{' '.join(filter(None, (name, verb)))}` is not a server; use `{name} serve`")
    return at + 1
