"""Detects misspelt environment variables: names with rfork's prefix that are similar to a setting's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
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
_KUBERNETES_SERVICE_VARIABLE: Final = re.compile(
    r"RFORK_(.*_)?(SERVICE_(HOST|PORT(_.*)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)"
)
"""Variables that Kubernetes sets for each Service of a namespace, here one whose name starts with ``rfork``."""


def variables() -> Iterator[str]:
    """Yield the environment variable of every setting, except variables of other projects."""
    for settings_class in SETTINGS_CLASSES:
        for name in settings_class.model_fields:
            yield from (each for each in variables_of(settings_class, name) if each.startswith(PREFIX))


def find_typos(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return each misspelt variable of `environment` (default: of this process) with the likely intended one."""
    known = set(variables())
    ignored = known | IGNORED_VARIABLES
    typos: dict[str, str] = {}
    for name in sorted(os.environ if environment is None else environment):
        if not name.startswith(PREFIX) or name in ignored or _KUBERNETES_SERVICE_VARIABLE.fullmatch(name):
            continue
        intended = _intended_variable(name, known)
        if intended is not None:
            typos[name] = intended
    return typos


def _intended_variable(name: str, known: Iterable[str]) -> str | None:
    """Return the known variable that is abbreviated by `name`, if it is the only one, else the most similar one."""
    abbreviated = [each for each in known if _is_abbreviation(name, each)]
    if len(abbreviated) == 1:
        return abbreviated[0]
    similar = [each for each in known if _is_typo(name, each)]
    return min(similar, key=lambda each: (_edit_distance(name, each), each), default=None)


def _is_abbreviation(name: str, intended: str) -> bool:
    """Return True if `name` is a prefix of `intended` and longer than half of it: ``TLS_CERT``, ``TLS_CERTIFICATE``."""
    return intended.startswith(name) and 2 * (len(name) - len(PREFIX)) > len(intended) - len(PREFIX)


def _is_typo(name: str, intended: str) -> bool:
    """Return True if two names differ by few edits for their length."""
    edits = _edit_distance(name, intended)
    if sorted(name) == sorted(intended):
        return edits <= MAX_TYPOS
    return edits <= min(MAX_TYPOS, (len(intended) - len(PREFIX)) // MIN_LETTERS_PER_TYPO)


def _edit_distance(name: str, intended: str) -> int:
    """Return the Damerau-Levenshtein distance: letters omitted, inserted, changed, or swapped with the next."""
    previous_row, row = [0] * (len(intended) + 1), list(range(len(intended) + 1))
    for i, letter in enumerate(name):
        row_before_previous, previous_row, row = previous_row, row, [i + 1]
        for j, other in enumerate(intended):
            edits = min(previous_row[j] + (letter != other), previous_row[j + 1] + 1, row[j] + 1)
            if i and j and letter == intended[j - 1] and name[i - 1] == other:
                edits = min(edits, row_before_previous[j - 1] + 1)
            row.append(edits)
    return row[-1]
