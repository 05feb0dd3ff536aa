"""Engine functions that a plug-in calls or wraps: checks of their signatures, and wrappers of methods.

Each engine package has its own table of functions. Methods are wrapped where an engine has no suitable
extension point. Each wrapper is called in place of the method, as ``wrapper(method, self, …)``. The engine
proceeds whatever fails in a wrapper. No other package is imported here, because plug-ins are loaded in every
process of an engine.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from re import Pattern
from typing import Any, Final, Literal

from rfork.logs import logger

WRAPPED: Final = "rfork_wrapped"
"""Attribute of a wrapped method that refers to the original."""

Method = Callable[..., Any]


class _MethodCall:
    """The call of the engine's method that a wrapper makes, and how it ended."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self.failed = False
        """True if the engine's method has raised an exception."""
        self.returned = False
        self.result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self._method(*args, **kwargs)
        except BaseException:
            self.failed = True
            raise
        self.returned = True
        return self.result


def patch_method(
    owner: type,
    name: str,
    wrapper: Method,
    *,
    on_failure: Callable[[], None] | None = None,
    may_refuse: bool = False,
) -> None:
    """Replace a method of a class by a call of `wrapper`. Idempotent.

    An exception of the wrapper itself is logged and not raised: the engine's method runs, if it has not, and
    its result is returned. Afterwards `on_failure` is called; without it, the wrapper is not called again.
    With `may_refuse`, exceptions of the wrapper are raised. Those of the engine's method are always raised.
    """
    method: Method = getattr(owner, name)
    if hasattr(method, WRAPPED):
        return
    enabled = True

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal enabled
        if not enabled:
            return method(*args, **kwargs)
        method_call = _MethodCall(method)
        try:
            return wrapper(method_call, *args, **kwargs)
        except Exception as error:
            if may_refuse or method_call.failed:
                raise
            _log_failure(f"{owner.__name__}.{name}", error)
            if on_failure is not None:
                on_failure()
            else:
                enabled = False
        return method_call.result if method_call.returned else method(*args, **kwargs)

    setattr(call, WRAPPED, method)
    setattr(owner, name, call)


def _log_failure(method: str, error: Exception) -> None:
    logger(__name__).error(
        "rfork's hook failed, the engine proceeds without it",
        method=method,
        reason=f"{type(error).__name__}: {error}",
        exc_info=error,
    )


def call_before(callback: Method) -> Method:
    """Return a wrapper that calls ``callback(self, …)`` and then the method."""

    def wrapper(method: Method, *args: Any, **kwargs: Any) -> Any:
        callback(*args, **kwargs)
        return method(*args, **kwargs)

    return wrapper


def call_after(callback: Method) -> Method:
    """Return a wrapper that calls ``callback(result, self, …)`` after the method has returned."""

    def wrapper(method: Method, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        callback(result, *args, **kwargs)
        return result

    return wrapper


Tier = Literal["core", "lifecycle", "comfort"]
"""Consequence of a missing hook target: no fork (`core`), no seed (`lifecycle`), a feature less (`comfort`)."""

TIERS: Final[tuple[Tier, ...]] = ("core", "lifecycle", "comfort")


@dataclass(frozen=True, slots=True)
class HookTarget:
    """A function, class or value of an engine, named by its dotted path, with the parameters it must accept."""

    path: str
    parameters: tuple[str, ...] = ()
    tier: Tier = "core"
    optional: bool = False
    """True for an attribute that is only hooked where the engine has it: its owner must exist."""


Incompatible = Sequence[tuple[HookTarget, str]]
"""Hook targets that do not match, each with the reason."""


def find_incompatible(hook_targets: Iterable[HookTarget]) -> Incompatible:
    """Return the hook targets that do not match, each with the reason. Imports their modules."""
    return [(hook_target, mismatch) for hook_target in hook_targets if (mismatch := _mismatch(hook_target))]


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Hook targets that an installed engine lacks, by tier."""

    core: Incompatible = ()
    lifecycle: Incompatible = ()
    comfort: Incompatible = ()

    @classmethod
    def of(cls, hook_targets: Iterable[HookTarget]) -> Compatibility:
        """Check the hook targets. Imports their modules."""
        found = find_incompatible(hook_targets)
        return cls(*(tuple(one for one in found if one[0].tier == tier) for tier in TIERS))


def unlisted_methods(owner: type, pattern: Pattern[str], listed: Container[str]) -> Sequence[str]:
    """Return the public methods of a class that match `pattern` and are not `listed`, sorted.

    A new version of an engine may change weights in a method that this rfork does not know.
    """
    return sorted(
        name
        for name in dir(owner)
        if not name.startswith("_") and name not in listed and pattern.search(name) and callable(getattr(owner, name))
    )


def format_incompatibility(engine: str, version: str, incompatible: Incompatible, tested: Sequence[str]) -> str:
    """Return a one-line message for users. `engine` is the engine's display name."""
    details = "; ".join(f"{hook_target.path} {mismatch}" for hook_target, mismatch in incompatible)
    return f"{engine} {version} is incompatible with this rfork (tested: {', '.join(tested)}): {details}"


def _mismatch(hook_target: HookTarget) -> str:
    owner, _, name = hook_target.path.rpartition(".")
    try:
        if hook_target.optional and not hasattr(pkgutil.resolve_name(owner), name):
            return ""
        if name in getattr(pkgutil.resolve_name(owner), "__dataclass_fields__", ()):
            return ""  # an option of a configuration, which may exist on instances only
        found = pkgutil.resolve_name(hook_target.path)
    except (ImportError, AttributeError) as error:
        return f"does not exist ({error})"
    except Exception as error:  # a module of an engine may raise anything when it is imported
        return f"cannot be imported ({type(error).__name__}: {error})"
    if not hook_target.parameters:
        return ""
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError) as error:
        return f"cannot be inspected ({error})"
    # A bound classmethod has no first parameter, and the hook of another plug-in may accept any arguments.
    missing = [name for name in hook_target.parameters if name not in parameters]
    return f"has no parameter {', '.join(missing)}" if missing else ""
