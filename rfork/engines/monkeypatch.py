"""Wraps methods of an engine's classes in this process, where the engine has no suitable extension point.

Each wrapper is called in place of the method, as ``wrapper(method, self, …)``. Only the standard library is
imported here, because plug-ins are loaded in every process of an engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

WRAPPED: Final = "rfork_wrapped"
"""Attribute of a wrapped method that refers to the original."""

Method = Callable[..., Any]


def patch_method(owner: type, name: str, wrapper: Method) -> None:
    """Replace a method of a class by a call of `wrapper`. Idempotent."""
    method: Method = getattr(owner, name)
    if hasattr(method, WRAPPED):
        return

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(method, *args, **kwargs)

    setattr(call, WRAPPED, method)
    setattr(owner, name, call)


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
