"""The pip settings of this machine, for builds in a container: passed as build secrets, never as arguments or files."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

PASSED: Final[tuple[str, ...]] = (
    "index-url",
    "extra-index-url",
    "find-links",
    "trusted-host",
    "proxy",
    "timeout",
    "default-timeout",
    "retries",
)
"""Settings about reaching packages. `cert` is passed as a secret of its own."""
CA_SECRET: Final = "/run/secrets/pip-ca"
PUBLIC_HOSTS: Final = frozenset({"pypi.org", "files.pythonhosted.org"})


@dataclass(frozen=True)
class PipSettings:
    """Settings by name, as in pip.conf."""

    values: dict[str, str]
    ca: Path | None
    """CA bundle."""

    def config(self) -> str:
        """Return the text of the secret `pip.conf`."""
        lines = [f"{name} = {value}" for name, value in self.values.items()]
        lines += [f"cert = {CA_SECRET}"] if self.ca is not None else []
        return "\n".join(("[global]", *lines, ""))

    def folders(self) -> tuple[Path, ...]:
        """Return the directories of packages on this machine, which a build must mount.

        An index in a directory `simple` refers to files next to it.
        """
        found = (Path(word.removeprefix("file://")) for word in self._locations() if word.startswith(("/", "file://")))
        complete = (each.parent if each.name == "simple" else each for each in found)
        return tuple(dict.fromkeys(each for each in complete if each.is_dir()))

    def private_names(self) -> frozenset[str]:
        """Return host names and directories that no image may contain."""
        hosts = {urlsplit(word).hostname or "" for word in (*self._locations(), self.values.get("proxy", ""))}
        hosts |= set(self.values.get("trusted-host", "").split())
        return frozenset({*hosts, *map(str, self.folders())} - PUBLIC_HOSTS - {""})

    def _locations(self) -> list[str]:
        return [word for name in PASSED[:3] for word in self.values.get(name, "").split()]


def pip_settings() -> PipSettings:
    """Return the settings of this Python's pip, from its files and its environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    return parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def parse(text: str) -> PipSettings:
    """Parse the output of `pip config list`: ``SECTION.NAME='VALUE'``. The environment and `install` override."""
    found: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        rank = ("global", "install", ":env:").index(section) if section in ("install", ":env:") else 0
        if rank >= found.get(name, (0, ""))[0]:
            found[name] = (rank, " ".join(str(ast.literal_eval(value)).split()))
    values: dict[str, str] = {name: found[name][1] for name in PASSED if name in found}
    return PipSettings(values, Path(found["cert"][1]) if "cert" in found else None)
