"""Detects misspelt environment variables: names with rfork's prefix that are similar to a setting's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Final

from pydantic_settings import BaseSettings

from rfork.settings.artifacts import ArtifactSettings
from rfork.settings.env import variables_of
from rfork.settings.instance import InstanceSettings
from rfork.settings.kubernetes import KubernetesSettings
from rfork.settings.planner import PlannerSettings
from rfork.settings.sidecar import SidecarSettings
from rfork.settings.storage import StorageSettings
from rfork.settings.tls import TlsSettings
from rfork.settings.tracing import TracingSettings

SETTINGS_CLASSES: Final[tuple[type[BaseSettings], ...]] = (
    ArtifactSettings, KubernetesSettings, PlannerSettings, InstanceSettings, SidecarSettings, StorageSettings, TlsSettings,
    TracingSettings,
)  # fmt: skip
PREFIX: Final = "RFORK_"
MIN_LETTERS_PER_TYPO: Final = 5
"""One edit is allowed per this many letters: short words have many neighbours."""
MAX_TYPOS: Final = 2
IGNORED_VARIABLES: Final = frozenset({"RFORK_POD_NAME", "RFORK_POD_NAMESPACE"})
"""Helper variables of Pod manifests, which other variables refer to."""
_service: Final = re.compile(r"RFORK_(.*_)?(SERVICE_(HOST|PORT(_.*)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)")
"""Variables that Kubernetes sets for each Service of a namespace, here one whose name starts with ``rfork``."""


def find_typos(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return each misspelt variable of `environment` (default: of this process) with the likely intended one."""
    known = set(variables())
    found: dict[str, str] = {}
    for name in sorted(os.environ if environment is None else environment):
        if not name.startswith(PREFIX) or name in known | IGNORED_VARIABLES or _service.fullmatch(name):
            continue
        likely = [each for each in sorted(known) if _is_prefix(name, each)]
        if len(likely) != 1:
            near = ((_edit_distance(name, each), each) for each in known if _is_typo(name, each))
            likely = [each for _, each in sorted(near)]
        if likely:
            found[name] = likely[0]
    return found


def _is_prefix(name: str, meant: str) -> bool:
    """Return True if a name is a prefix of another and longer than half of it: ``TLS_CERT``, ``TLS_CERTIFICATE``."""
    return meant.startswith(name) and 2 * (len(name) - len(PREFIX)) > len(meant) - len(PREFIX)


def _is_typo(name: str, meant: str) -> bool:
    """Return True if two names differ by few edits for their length."""
    edits = _edit_distance(name, meant)
    if sorted(name) == sorted(meant):
        return edits <= MAX_TYPOS
    return edits <= min(MAX_TYPOS, (len(meant) - len(PREFIX)) // MIN_LETTERS_PER_TYPO)


def _edit_distance(name: str, meant: str) -> int:
    """Return the edit distance of two names: letters omitted, inserted, changed, or swapped with the next."""
    before, row = [0] * (len(meant) + 1), list(range(len(meant) + 1))
    for at, letter in enumerate(name):
        earlier, before, row = before, row, [at + 1]
        for to, other in enumerate(meant):
            edits = min(before[to] + (letter != other), before[to + 1] + 1, row[to] + 1)
            if at and to and letter == meant[to - 1] and name[at - 1] == other:
                edits = min(edits, earlier[to - 1] + 1)
            row.append(edits)
    return row[-1]


def variables() -> Iterator[str]:
    """Yield the variable of every setting, except variables of other projects."""
    for settings_class in SETTINGS_CLASSES:
        for name in settings_class.model_fields:
            yield from (each for each in variables_of(settings_class, name) if each.startswith(PREFIX))
