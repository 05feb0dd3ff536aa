"""Detects misspelt environment variables: names with rfork's prefix that are similar to a setting's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
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
MIN_SIMILARITY: Final = 0.8
"""Minimum ratio of `difflib` between a misspelt name and the intended one: one letter in five may differ."""
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
    swapped = [each for each in known if sorted(each) == sorted(name)]
    words = {each.removeprefix(PREFIX): each for each in known}
    similar = get_close_matches(name.removeprefix(PREFIX), words, n=1, cutoff=MIN_SIMILARITY)
    return next(iter([*swapped, *(words[word] for word in similar)]), None)


def _is_abbreviation(name: str, intended: str) -> bool:
    """Return True if `name` is a prefix of `intended` and longer than half of it: ``TLS_CERT``, ``TLS_CERTIFICATE``."""
    return intended.startswith(name) and 2 * (len(name) - len(PREFIX)) > len(intended) - len(PREFIX)
