"""Variables that begin as rfork's do and name no option, but nearly: most likely misspelt."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Final

from pydantic_settings import BaseSettings

from rfork.settings.artifacts import ArtifactSettings
from rfork.settings.hook import HookSettings
from rfork.settings.instance import Settings
from rfork.settings.planner import PlannerSettings
from rfork.settings.sidecar import SidecarSettings
from rfork.settings.storage import StorageSettings
from rfork.settings.tls import TlsSettings
from rfork.settings.tracing import TracingSettings

KINDS: Final[tuple[type[BaseSettings], ...]] = (
    ArtifactSettings, HookSettings, PlannerSettings, Settings, SidecarSettings, StorageSettings, TlsSettings,
    TracingSettings,
)  # fmt: skip
ALIKE: Final = 0.8
"""How much of two names must agree, from 0 to 1, for one to be a slip of the other."""
OTHERS: Final = frozenset({"RFORK_POD_NAME", "RFORK_POD_NAMESPACE"})
"""Of manifests, which make others of them."""
_service: Final = re.compile(r"RFORK_.*_(SERVICE_(HOST|PORT.*)|PORT(_\d+_(TCP|UDP).*)?)")
"""What Kubernetes sets for each Service of a namespace."""


def misspelt(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Such variables, each with the one that was meant. `environment`: this process's, unless given."""
    known = set(variables())
    found: dict[str, str] = {}
    for name in sorted(os.environ if environment is None else environment):
        if not name.startswith("RFORK_") or name in known | OTHERS or _service.fullmatch(name):
            continue
        longer = [each for each in known if each.startswith(name)]
        if len(longer) == 1:
            found[name] = longer[0]
        elif meant := difflib.get_close_matches(name, sorted(known), 1, ALIKE):
            found[name] = meant[0]
    return found


def variables() -> Iterator[str]:
    """The variable of every option."""
    for kind in KINDS:
        prefix = kind.model_config.get("env_prefix", "")
        yield from (f"{prefix}{name}".upper() for name in kind.model_fields)
