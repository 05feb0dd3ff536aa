"""fork() for model weights: a new inference instance pulls its weights from one that already runs.

The public names load lazily, so that the planner can import `rfork.wire` and `rfork.settings` on a
machine without torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rfork import artifacts
    from rfork.artifacts.report import ArtifactReport
    from rfork.engines.pretrained import fork_pretrained, report_of
    from rfork.engines.torch import fork, seed
    from rfork.errors import RforkError
    from rfork.fork.report import ForkReport
    from rfork.image.capture import capture
    from rfork.settings import ArtifactSettings, Settings, StorageSettings
    from rfork.storage.modules.lazy import load_tensors, open, tensors
    from rfork.storage.modules.load import LoadReport, load
    from rfork.storage.modules.no_init import no_init
    from rfork.storage.modules.save import save
    from rfork.wire import Rank

__version__ = "0.1.0"

_HOMES = {
    "ArtifactReport": "rfork.artifacts.report",
    "ArtifactSettings": "rfork.settings",
    "ForkReport": "rfork.fork.report",
    "LoadReport": "rfork.storage.modules.load",
    "Rank": "rfork.wire",
    "RforkError": "rfork.errors",
    "Settings": "rfork.settings",
    "StorageSettings": "rfork.settings",
    "capture": "rfork.image.capture",
    "fork": "rfork.engines.torch",
    "fork_pretrained": "rfork.engines.pretrained",
    "load": "rfork.storage.modules.load",
    "load_tensors": "rfork.storage.modules.lazy",
    "no_init": "rfork.storage.modules.no_init",
    "open": "rfork.storage.modules.lazy",
    "report_of": "rfork.engines.pretrained",
    "save": "rfork.storage.modules.save",
    "seed": "rfork.engines.torch",
    "tensors": "rfork.storage.modules.lazy",
}

_ROOMS = frozenset({"artifacts"})
"""Rooms that are used by their own name: ``rfork.artifacts.fetch(…)``."""

__all__ = [
    "ArtifactReport",
    "ArtifactSettings",
    "ForkReport",
    "LoadReport",
    "Rank",
    "RforkError",
    "Settings",
    "StorageSettings",
    "__version__",
    "artifacts",
    "capture",
    "fork",
    "fork_pretrained",
    "load",
    "load_tensors",
    "no_init",
    "open",
    "report_of",
    "save",
    "seed",
    "tensors",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"rfork.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'rfork' has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """`rfork.fork` and `rfork.seed` are functions, and also the names of two rooms.

    Importing a room would bind its name here to the module; the public function keeps the name, and
    the rooms are reached by ``from rfork.fork.session import …``.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
