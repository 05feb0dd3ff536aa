"""fork() for model weights: a new inference instance pulls its weights from one that already runs.

The public names load lazily, so that the planner can import `rfork.wire` and `rfork.settings` on a
machine without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rfork.engines.torch import fork, seed
    from rfork.errors import RforkError
    from rfork.fork.report import ForkReport
    from rfork.image.capture import capture
    from rfork.settings import Settings
    from rfork.wire import Rank

__version__ = "0.1.0"

_HOMES = {
    "ForkReport": "rfork.fork.report",
    "Rank": "rfork.wire",
    "RforkError": "rfork.errors",
    "Settings": "rfork.settings",
    "capture": "rfork.image.capture",
    "fork": "rfork.engines.torch",
    "seed": "rfork.engines.torch",
}

__all__ = ["ForkReport", "Rank", "RforkError", "Settings", "__version__", "capture", "fork", "seed"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'rfork' has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
