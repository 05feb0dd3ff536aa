"""Rewrites a command that starts SGLang or vLLM so that the server forks its weights.

Runs before the engine, in rfork's own process (`rfork launch`). No file of the engine is modified.
"""

from __future__ import annotations

import re
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

import rfork
from rfork.engine_command import (
    ALLOWLISTS,
    ENTRY_POINTS,
    LOAD_FORMAT,
    PLUGIN,
    EngineName,
    load_format,
    parse_engine_command,
    plugin_allowlist,
)
from rfork.engines.flags import variable
from rfork.errors import SettingsError
from rfork.settings import InstanceSettings

FILES_MODULE: Final = "_files"
"""Module that exists only in a copied rfork (see deploy/docker/files.py); its functions are entry points."""
ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, slots=True)
class Launch:
    """The rewritten command and its environment."""

    engine: EngineName
    command: tuple[str, ...]
    environment: Mapping[str, str]


def rewrite_command(command: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return the command with ``--load-format rfork`` and an environment that allows the plug-in.

    `environment` is the environment the command would run in. Raises SettingsError if the command starts no
    known engine, cannot be parsed, or requests another load format.
    """
    words, variables = _strip_env_prefix(command, environment)
    if not words:
        raise SettingsError(
            "no command to launch",
            hint="rfork launch --planner URL -- vllm serve MODEL, or … -- python -m sglang.launch_server …",
        )
    found = parse_engine_command(words)
    chosen = load_format(words[found.at :])
    if chosen is not None and chosen != LOAD_FORMAT:
        raise SettingsError(
            f"the command sets --load-format {chosen}, but `rfork launch` requires {LOAD_FORMAT}",
            hint="remove --load-format; a model without a source is loaded by the engine's own loader",
        )
    if chosen is None:
        words = [*words, "--load-format", LOAD_FORMAT]
    allowlist = ALLOWLISTS[found.engine]
    if (names := plugin_allowlist(found.engine, variables.get(allowlist))) is not None:
        variables[allowlist] = names
    variables.setdefault(variable("replica"), replica_name())
    return Launch(found.engine, tuple(words), variables)


def engine_environment(environment: Mapping[str, str], settings: InstanceSettings) -> dict[str, str]:
    """Return the environment of a server that its launcher drains: the server itself does not wait for readers again.

    `settings` are the settings of `environment`. Without a planner the launcher drains nothing.
    """
    overrides = {} if settings.planner is None else {variable("drain_timeout_s"): "0"}
    return {**environment, **overrides}


def replica_name() -> str:
    """Return a unique replica name for one start of one server."""
    host = re.sub(r"[^A-Za-z0-9_.-]+", "-", socket.gethostname())[-40:].strip("-")
    return f"{host or 'server'}-{uuid4().hex[:12]}"


@contextmanager
def with_plugin_path(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield an environment in which any Python process finds rfork and its plug-ins.

    Engines find plug-ins through the metadata of installed packages. An image that rfork's files were only
    copied into has no such metadata, so a temporary folder with the metadata and a link to this rfork is
    prepended to PYTHONPATH. If rfork is installed as well, Python uses the first copy and treats both as one
    package. A copied rfork has its own entry points, which handle images that are too old for it.
    """
    with tempfile.TemporaryDirectory(prefix="rfork-launch-") as temporary:
        folder = Path(temporary)
        (folder / "rfork").symlink_to(Path(rfork.__file__).parent, target_is_directory=True)
        metadata = folder / f"rfork-{rfork.__version__}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rfork\nVersion: {rfork.__version__}\n")
        (metadata / "entry_points.txt").write_text(
            "".join(f"[{group}]\n{PLUGIN} = {where}\n" for group, where in _entry_points().items())
        )
        before = environment.get("PYTHONPATH")
        yield {**environment, "PYTHONPATH": f"{folder}:{before}" if before else str(folder)}


def _entry_points() -> Mapping[str, str]:
    """Return the entry points of this rfork by group, as its metadata would list them."""
    if not Path(rfork.__file__).with_name(f"{FILES_MODULE}.py").is_file():
        return ENTRY_POINTS
    return {group: f"rfork.{FILES_MODULE}:{group.partition('.')[0]}" for group in ENTRY_POINTS}


def _strip_env_prefix(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command without its ``env X=Y`` prefix, and the environment including those variables."""
    words, variables = list(command), dict(environment)
    while words and Path(words[0]).name == "env":
        words = words[1:]
        while words and ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words and words[0].startswith("-"):
            raise SettingsError(
                f"cannot parse `env {words[0]}`",
                hint="set the variables in front of `rfork launch`, or as `env NAME=VALUE …` without options",
            )
    return words, variables
