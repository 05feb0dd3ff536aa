"""Checks of what callers pass to the public functions, before anything is opened: one line each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from rfork.errors import SettingsError
from rfork.schema import Rank
from rfork.schema.types import ModelName

MAX_REPR_CHARS = 60
_model_name: Final[TypeAdapter[str]] = TypeAdapter(ModelName)


def check_module(module: object) -> None:
    """Raise SettingsError for anything but a module: also for its class."""
    from torch import nn  # commands check names before they need torch

    if isinstance(module, type):
        raise SettingsError(f"a module is needed, not the class {module.__name__}", hint="pass an object of it")
    if not isinstance(module, nn.Module):
        raise SettingsError(f"a module is needed, not {_type_text(module)}")


def check_model_name(name: object) -> None:
    """Raise SettingsError for a name that the planner would refuse."""
    try:
        _model_name.validate_python(name, strict=True)
    except ValidationError as error:
        raise SettingsError(
            f"the model name {_short_repr(name)} cannot be used: {error.errors()[0]['msg']}",
            hint="a name has 1 to 512 characters, and no line breaks or other control characters",
        ) from None


def check_rank(rank: object) -> None:
    """Raise SettingsError for what is no rank, or one whose index is not below its size."""
    if rank is None:
        return
    if not isinstance(rank, Rank):
        raise SettingsError(f"rank is a Rank, not {_type_text(rank)}", hint="e.g. rank=rfork.Rank(tp=0, tp_size=2)")
    for axis in ("tp", "pp", "ep"):
        index, size = getattr(rank, axis), getattr(rank, f"{axis}_size")
        if index >= size:
            raise SettingsError(f"{axis}={index} is not below {axis}_size={size}", hint="indices begin at 0")


def check_patterns(exclude: object) -> None:
    """Raise SettingsError for one pattern instead of several, which would be read letter by letter."""
    if isinstance(exclude, (str, bytes)):
        raise SettingsError(f"exclude is a list of patterns: pass [{exclude!r}] instead of {exclude!r}")
    if not isinstance(exclude, Sequence):
        raise SettingsError(f"exclude is a list of patterns, not {_type_text(exclude)}")
    for pattern in exclude:
        if not isinstance(pattern, str):
            raise SettingsError(f"exclude is a list of patterns, and {_short_repr(pattern)} is {_type_text(pattern)}")


def check_deadline(deadline: object) -> None:
    """Raise SettingsError for what is no positive number of seconds."""
    if deadline is None:
        return
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)):
        raise SettingsError(f"deadline is a number of seconds, not {_type_text(deadline)}")
    if not 0 < deadline < math.inf:
        raise SettingsError(f"deadline is a positive number of seconds, not {deadline}")


def check_uri(name: str, uri: object) -> None:
    """Raise SettingsError for what is neither a path nor a URI; `name` is that of the argument."""
    if uri is not None and not isinstance(uri, (str, Path)):
        raise SettingsError(f"{name} is a path or a URI, not {_type_text(uri)}")


def check_callable(name: str, function: object) -> None:
    """Raise SettingsError for what cannot be called; `name` is that of the argument."""
    if function is not None and not isinstance(function, Callable):  # type: ignore[arg-type]
        raise SettingsError(f"{name} is a function, not {_type_text(function)}")


def _type_text(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_REPR_CHARS else f"{text[:MAX_REPR_CHARS]}…"
