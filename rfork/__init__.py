"""fork() for model weights: a new inference instance copies its weights from one that is already running.

Public names are loaded lazily, so that the planner can import `rfork.schema` and `rfork.settings` on a
machine without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from rfork.gc_pause import gc_paused

if TYPE_CHECKING:
    from rfork import artifacts
    from rfork._api import fork, seed
    from rfork.artifacts.client import ArtifactReport
    from rfork.engines.pretrained import fork_pretrained, fork_report
    from rfork.errors import RforkError
    from rfork.image.capture import capture
    from rfork.receiver.report import ForkReport
    from rfork.schema import Rank
    from rfork.settings import ArtifactSettings, InstanceSettings, StorageSettings
    from rfork.storage.module_io.lazy import iter_tensors, load_tensors, open_tensors
    from rfork.storage.module_io.load import LoadReport, load
    from rfork.storage.module_io.no_init import no_init
    from rfork.storage.module_io.save import save

__version__ = "0.1.0"

_LAZY_EXPORTS = {
    "ArtifactReport": "rfork.artifacts.client",
    "ArtifactSettings": "rfork.settings",
    "ForkReport": "rfork.receiver.report",
    "InstanceSettings": "rfork.settings",
    "LoadReport": "rfork.storage.module_io.load",
    "Rank": "rfork.schema",
    "RforkError": "rfork.errors",
    "StorageSettings": "rfork.settings",
    "capture": "rfork.image.capture",
    "fork": "rfork._api",
    "fork_pretrained": "rfork.engines.pretrained",
    "fork_report": "rfork.engines.pretrained",
    "iter_tensors": "rfork.storage.module_io.lazy",
    "load": "rfork.storage.module_io.load",
    "load_tensors": "rfork.storage.module_io.lazy",
    "no_init": "rfork.storage.module_io.no_init",
    "open_tensors": "rfork.storage.module_io.lazy",
    "save": "rfork.storage.module_io.save",
    "seed": "rfork._api",
}

_LAZY_PACKAGES = frozenset({"artifacts"})
"""Public packages, used as ``rfork.artifacts.fetch(…)``."""

__all__ = [
    "ArtifactReport",
    "ArtifactSettings",
    "ForkReport",
    "InstanceSettings",
    "LoadReport",
    "Rank",
    "RforkError",
    "StorageSettings",
    "__version__",
    "artifacts",
    "capture",
    "fork",
    "fork_pretrained",
    "fork_report",
    "iter_tensors",
    "load",
    "load_tensors",
    "no_init",
    "open_tensors",
    "save",
    "seed",
]


def __getattr__(name: str) -> object:
    if name in _LAZY_PACKAGES:
        return import_module(f"rfork.{name}")
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module 'rfork' has no attribute {name!r}")
    with gc_paused():
        value: object = getattr(import_module(_LAZY_EXPORTS[name]), name)
    globals()[name] = value
    return value
