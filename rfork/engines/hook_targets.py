"""Engine functions that a plug-in hooks or calls, and checks that they still have the expected signatures.

Each engine package has its own table. Only the standard library is imported here, because plug-ins are loaded
in every process of an engine.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HookTarget:
    """A function, class or value, named by its dotted path, with the parameters it must accept."""

    path: str
    parameters: tuple[str, ...] = ()


Incompatible = Sequence[tuple[HookTarget, str]]
"""Hook targets that do not match, each with the reason."""


def find_incompatible(hook_targets: Iterable[HookTarget]) -> Incompatible:
    """Return the hook targets that do not match, each with the reason. Imports their modules."""
    return [(hook_target, mismatch) for hook_target in hook_targets if (mismatch := _mismatch(hook_target))]


def format_incompatibility(engine: str, version: str, incompatible: Incompatible, tested: Sequence[str]) -> str:
    """Return a one-line message for users. `engine` is the engine's display name."""
    details = "; ".join(f"{hook_target.path} {mismatch}" for hook_target, mismatch in incompatible)
    return f"{engine} {version} is incompatible with this rfork (tested: {', '.join(tested)}): {details}"


def _mismatch(hook_target: HookTarget) -> str:
    try:
        found = pkgutil.resolve_name(hook_target.path)
    except (ImportError, AttributeError) as error:
        return f"does not exist ({error})"
    if not hook_target.parameters:
        return ""
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError) as error:
        return f"cannot be inspected ({error})"
    # A bound classmethod has no first parameter, and the hook of another plug-in may accept any arguments.
    missing = [name for name in hook_target.parameters if name not in parameters]
    return f"has no parameter {', '.join(missing)}" if missing else ""
