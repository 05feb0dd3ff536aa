"""Methods of an engine's classes, wrapped in this process: where its own extension points do not reach.

Each wrapper is called in the method's place, as ``wrapper(method, self, …)``. Nothing is imported here but
the standard library: plug-ins are loaded in each of an engine's processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

WRAPPED: Final = "rfork_wrapped"
"""Of a method that is wrapped: what it wraps."""

Method = Callable[..., Any]


def patch_method(owner: type, name: str, wrapper: Method) -> None:
    """Have a method of a class called through `wrapper` from now on. Again is harmless."""
    method: Method = getattr(owner, name)
    if hasattr(method, WRAPPED):
        return

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        return wrapper(method, *arguments, **named)

    setattr(call, WRAPPED, method)
    setattr(owner, name, call)


def call_before(callback: Method) -> Method:
    """The wrapper that calls ``told(self, …)`` first, and then the method."""

    def wrapper(method: Method, *arguments: Any, **named: Any) -> Any:
        callback(*arguments, **named)
        return method(*arguments, **named)

    return wrapper


def call_after(callback: Method) -> Method:
    """The wrapper that calls ``told(result, self, …)`` once the method has returned."""

    def wrapper(method: Method, *arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        callback(result, *arguments, **named)
        return result

    return wrapper
