"""Variables that begin as rfork's do and name no option, but nearly: most likely misspelt."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Final

from pydantic_settings import BaseSettings

from rfork.settings.artifacts import ArtifactSettings
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
"""One letter in so many may be off for a name to be a slip of another: short words have many neighbours."""
MAX_TYPOS: Final = 2
IGNORED_VARIABLES: Final = frozenset({"RFORK_POD_NAME", "RFORK_POD_NAMESPACE"})
"""Of manifests, which make others of them."""
_service: Final = re.compile(r"RFORK_(.*_)?(SERVICE_(HOST|PORT(_.*)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)")
"""What Kubernetes sets for each Service of a namespace, also for one named ``rfork``."""


def find_typos(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Such variables, each with the one that was meant. `environment`: this process's, unless given."""
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
    """Whether a name is the first half, or more, of another: ``TLS_CERT`` of ``TLS_CERTIFICATE``."""
    return meant.startswith(name) and 2 * (len(name) - len(PREFIX)) > len(meant) - len(PREFIX)


def _is_typo(name: str, meant: str) -> bool:
    """Whether so few letters are off, as long as the name is, that it is most likely that one."""
    slips = _edit_distance(name, meant)
    if sorted(name) == sorted(meant):
        return slips <= MAX_TYPOS
    return slips <= min(MAX_TYPOS, (len(meant) - len(PREFIX)) // MIN_LETTERS_PER_TYPO)


def _edit_distance(name: str, meant: str) -> int:
    """Letters left out, put in, changed, or swapped with the next: the edit distance of two names."""
    before, row = [0] * (len(meant) + 1), list(range(len(meant) + 1))
    for at, letter in enumerate(name):
        earlier, before, row = before, row, [at + 1]
        for to, other in enumerate(meant):
            slips = min(before[to] + (letter != other), before[to + 1] + 1, row[to] + 1)
            if at and to and letter == meant[to - 1] and name[at - 1] == other:
                slips = min(slips, earlier[to - 1] + 1)
            row.append(slips)
    return row[-1]


def variables() -> Iterator[str]:
    """The variable of every option."""
    for settings_class in SETTINGS_CLASSES:
        prefix = settings_class.model_config.get("env_prefix", "")
        yield from (f"{prefix}{name}".upper() for name in settings_class.model_fields)
