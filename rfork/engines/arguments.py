"""Arguments of the public functions: checks, and the default name of a model.

The checks run before anything is opened and raise one-line errors.

Seeds and forks of a model find each other by its name. Instances share weights only if their versions are
equal too (`rfork.weights_version`), so a name need not identify one set of weights. A folder is named by its
last path component, unless that is generic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from rfork.errors import SettingsError
from rfork.schema import ModelName, Rank

HUB_FOLDER: Final = re.compile(r"(?:^|/)models--(?P<name>[^/]+)/snapshots/[^/]+/?$")
"""Folder of a model in the hub's cache: offline engines use it in place of the model's id."""
GENERIC_FOLDER_NAMES: Final = re.compile(
    r"(?:checkpoint|model|models|weights|snapshot|step|epoch|latest|last|best|final|merged|output|out|main|hf|v|r)?"
    r"[-_.]?[0-9]*|[0-9a-f]{7,64}",
    re.IGNORECASE,
)
"""Last path components that many models share: a folder with one of them is named by its full path."""


def canonical_model_name(source: str | Path) -> str:
    """Return a hub id unchanged, also for a folder in the hub's cache; for other folders the last path component.

    If that component is generic (``checkpoint-100``), the name is the full path.
    """
    if hub := HUB_FOLDER.search(str(source)):
        return str(hub["name"].replace("--", "/"))
    folder = Path(source)
    if not isinstance(source, Path) and not folder.is_dir():
        return source
    resolved = folder.resolve()
    return str(resolved) if GENERIC_FOLDER_NAMES.fullmatch(resolved.name) else resolved.name


MAX_REPR_CHARS = 60
_model_name: Final[TypeAdapter[str]] = TypeAdapter(ModelName)


def check_module(module: object) -> None:
    """Raise SettingsError unless `module` is an nn.Module instance. A module class is rejected too."""
    from torch import nn  # commands check names before they import torch

    if isinstance(module, type):
        raise SettingsError(f"expected a module, got the class {module.__name__}", hint="pass an instance of the class")
    if not isinstance(module, nn.Module):
        raise SettingsError(f"expected a module, got {_type_text(module)}")


def check_model_name(name: object) -> None:
    """Raise SettingsError for a model name that the planner would reject."""
    try:
        _model_name.validate_python(name, strict=True)
    except ValidationError as error:
        raise SettingsError(
            f"invalid model name {_short_repr(name)}: {error.errors()[0]['msg']}",
            hint="use 1 to 512 characters without line breaks or other control characters",
        ) from None


def check_rank(rank: object) -> None:
    """Raise SettingsError unless `rank` is a Rank with every index below its size."""
    if rank is None:
        return
    if not isinstance(rank, Rank):
        raise SettingsError(
            f"rank must be a Rank, not {_type_text(rank)}", hint="e.g. rank=rfork.Rank(tp=0, tp_size=2)"
        )
    for axis in ("tp", "pp", "ep"):
        index, size = getattr(rank, axis), getattr(rank, f"{axis}_size")
        if index >= size:
            raise SettingsError(f"{axis}={index} must be less than {axis}_size={size}", hint="indices start at 0")


def check_tensor_parallel(tp: object, *, device: object, rank: object) -> None:
    """Raise SettingsError unless `tp` is a number of processes, and neither `device` nor `rank` is set with it."""
    if tp is None:
        return
    if isinstance(tp, bool) or not isinstance(tp, int):
        hint = "transformers creates the device mesh: pass the number of its processes"
        raise SettingsError(f"tp must be a number of processes, not {_type_text(tp)}", hint=hint)
    if tp < 1:
        raise SettingsError(f"tp must be at least 1, not {tp}")
    for name, value in (("device", device), ("rank", rank)):
        if tp > 1 and value is not None:
            raise SettingsError(f"{name} is derived from tp", hint=f"omit {name}")


def check_patterns(exclude: object) -> None:
    """Raise SettingsError unless `exclude` is a list of patterns.

    A bare string would be read as one pattern per character.
    """
    if isinstance(exclude, (str, bytes)):
        raise SettingsError(f"exclude must be a list of patterns: pass [{exclude!r}] instead of {exclude!r}")
    if not isinstance(exclude, Sequence):
        raise SettingsError(f"exclude must be a list of patterns, not {_type_text(exclude)}")
    for pattern in exclude:
        if not isinstance(pattern, str):
            raise SettingsError(
                f"exclude must be a list of patterns, but {_short_repr(pattern)} is {_type_text(pattern)}"
            )


def check_deadline(deadline: object) -> None:
    """Raise SettingsError unless `deadline` is a positive number of seconds."""
    if deadline is None:
        return
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)):
        raise SettingsError(f"deadline must be a number of seconds, not {_type_text(deadline)}")
    if not 0 < deadline < math.inf:
        raise SettingsError(f"deadline must be a positive number of seconds, not {deadline}")


def check_uri(name: str, uri: object) -> None:
    """Raise SettingsError unless `uri` is a path or a URI. `name` is the name of the argument."""
    if uri is not None and not isinstance(uri, (str, Path)):
        raise SettingsError(f"{name} must be a path or a URI, not {_type_text(uri)}")


def check_callable(name: str, function: object) -> None:
    """Raise SettingsError unless `function` is callable. `name` is the name of the argument."""
    if function is not None and not isinstance(function, Callable):  # type: ignore[arg-type]
        raise SettingsError(f"{name} must be a function, not {_type_text(function)}")


def _type_text(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_REPR_CHARS else f"{text[:MAX_REPR_CHARS]}…"
