"""Which functions of an engine a plug-in hooks or calls, and whether they are as the plug-in knows them.

Each engine's room keeps its own table of them. Nothing is imported here but the standard library: plug-ins
are loaded in each of an engine's processes.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HookTarget:
    """One function, class or value, by its dotted path, and parameters that it must have, by name."""

    path: str
    parameters: tuple[str, ...] = ()


Incompatible = Sequence[tuple[HookTarget, str]]
"""Points that are not as they were, each with what is wrong."""


def find_incompatible(points: Iterable[HookTarget]) -> Incompatible:
    """The points that are not as they were, each with what is wrong; imports their modules."""
    return [(point, wrong) for point in points if (wrong := _mismatch(point))]


def format_incompatibility(engine: str, version: str, incompatible: Incompatible, tested: Sequence[str]) -> str:
    """One line for users; `engine` by the name that they know it by."""
    what = "; ".join(f"{point.path} {wrong}" for point, wrong in incompatible)
    return f"{engine} {version} is not as rfork knows it (tested: {', '.join(tested)}): {what}"


def _mismatch(point: HookTarget) -> str:
    try:
        found = pkgutil.resolve_name(point.path)
    except (ImportError, AttributeError) as error:
        return f"is gone ({error})"
    if not point.parameters:
        return ""
    try:
        has = inspect.signature(found).parameters
    except (TypeError, ValueError) as error:
        return f"cannot be looked at ({error})"
    # A classmethod has no first parameter any more, and a hook of another plug-in may take anything.
    missing = [name for name in point.parameters if name not in has]
    return f"has no parameter {', '.join(missing)}" if missing else ""
