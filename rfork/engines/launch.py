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

FILES: Final = "_files"
"""The module that only rfork as files has (see deploy/docker/files.py): its functions are entry points."""
ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started instead: the command, and its environment."""

    engine: EngineName
    command: tuple[str, ...]
    environment: Mapping[str, str]


def rewrite_command(command: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """The command with ``--load-format rfork``, and the environment in which its plug-in is allowed.

    `environment` is what the command would get. Raises SettingsError where it starts no engine, where that
    cannot be told, and where it asks for another load format.
    """
    words, variables = _strip_env_prefix(command, environment)
    if not words:
        raise SettingsError(
            "there is no command to launch",
            hint="rfork launch --planner URL -- vllm serve MODEL, or … -- python -m sglang.launch_server …",
        )
    found = parse_engine_command(words)
    chosen = load_format(words[found.at :])
    if chosen is not None and chosen != LOAD_FORMAT:
        raise SettingsError(
            f"the command asks for --load-format {chosen}: `rfork launch` sets {LOAD_FORMAT}",
            hint="leave --load-format out; what nobody holds is loaded as without it",
        )
    if chosen is None:
        words = [*words, "--load-format", LOAD_FORMAT]
    allowlist = ALLOWLISTS[found.engine]
    if (names := plugin_allowlist(found.engine, variables.get(allowlist))) is not None:
        variables[allowlist] = names
    variables.setdefault(variable("replica"), replica_name())
    return Launch(found.engine, tuple(words), variables)


def engine_environment(environment: Mapping[str, str], settings: InstanceSettings) -> dict[str, str]:
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
def with_plugin_path(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment in which any Python finds rfork and its plug-ins, inside the `with` block.

    Engines find plug-ins by the metadata of installed packages. An image to which rfork's files were only
    added has none; so a folder is put in front of Python's path that has the metadata, and a link to this
    rfork. Where rfork is installed as well, Python takes the first and knows them for one. An rfork that
    comes as files has entry points of its own, which know what to do in an image that is too old for it.
    """
    with tempfile.TemporaryDirectory(prefix="rfork-launch-") as made:
        folder = Path(made)
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
    """Those of this rfork, by group: as in its own metadata, were it found."""
    if not Path(rfork.__file__).with_name(f"{FILES}.py").is_file():
        return ENTRY_POINTS
    return {group: f"rfork.{FILES}:{group.partition('.')[0]}" for group in ENTRY_POINTS}


def _strip_env_prefix(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
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
