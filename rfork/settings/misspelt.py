"""Variables that begin as rfork's do and name no option, but nearly: most likely misspelt."""

from __future__ import annotations

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
PREFIX: Final = "RFORK_"
LETTERS_A_SLIP: Final = 5
"""One letter in so many may be off for a name to be a slip of another: short words have many neighbours."""
MOST_SLIPS: Final = 2
OTHERS: Final = frozenset({"RFORK_POD_NAME", "RFORK_POD_NAMESPACE"})
"""Of manifests, which make others of them."""
_service: Final = re.compile(r"RFORK_(.*_)?(SERVICE_(HOST|PORT(_.*)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)")
"""What Kubernetes sets for each Service of a namespace, also for one named ``rfork``."""


def misspelt(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Such variables, each with the one that was meant. `environment`: this process's, unless given."""
    known = set(variables())
    found: dict[str, str] = {}
    for name in sorted(os.environ if environment is None else environment):
        if not name.startswith(PREFIX) or name in known | OTHERS or _service.fullmatch(name):
            continue
        likely = [each for each in sorted(known) if _cut_short(name, each)]
        if len(likely) != 1:
            near = ((_slips(name, each), each) for each in known if _slip(name, each))
            likely = [each for _, each in sorted(near)]
        if likely:
            found[name] = likely[0]
    return found


def _cut_short(name: str, meant: str) -> bool:
    """Whether a name is the first half, or more, of another: ``TLS_CERT`` of ``TLS_CERTIFICATE``."""
    return meant.startswith(name) and 2 * (len(name) - len(PREFIX)) > len(meant) - len(PREFIX)


def _slip(name: str, meant: str) -> bool:
    """Whether so few letters are off, as long as the name is, that it is most likely that one."""
    slips = _slips(name, meant)
    if sorted(name) == sorted(meant):
        return slips <= MOST_SLIPS
    return slips <= min(MOST_SLIPS, (len(meant) - len(PREFIX)) // LETTERS_A_SLIP)


def _slips(name: str, meant: str) -> int:
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
    for kind in KINDS:
        prefix = kind.model_config.get("env_prefix", "")
        yield from (f"{prefix}{name}".upper() for name in kind.model_fields)
