"""Reading options from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from rfork.errors import SettingsError

Kind = TypeVar("Kind", bound=BaseSettings)


def load(kind: type[Kind], **overrides: object) -> Kind:
    """Read `kind` from the environment, with `overrides` (None means: not given) on top.

    Raises SettingsError, one line naming the variable, when a value cannot be used.
    """
    return _made(kind, {name: value for name, value in overrides.items() if value is not None})


def checked(kind: type[Kind], settings: object, **overrides: object) -> Kind:
    """Return the settings with `overrides` (None means: not given) on top, all values validated.

    Nothing is read from the environment. Raises SettingsError, as `load`, and for what is no `kind`.
    """
    if not isinstance(settings, kind):
        raise SettingsError(f"settings is an object of rfork.{kind.__name__}, not a {type(settings).__name__}")
    values: dict[str, object] = {name: getattr(settings, name) for name in kind.model_fields}
    return _made(kind, values | {name: value for name, value in overrides.items() if value is not None})


def _made(kind: type[Kind], given: Mapping[str, object]) -> Kind:
    try:
        return kind(**given)  # type: ignore[arg-type]  # pydantic validates each value
    except ValidationError as error:
        first = error.errors()[0]
        prefix = kind.model_config.get("env_prefix", "")
        name = f"{prefix}{'_'.join(str(part) for part in first['loc'][:1]).upper()}".rstrip("_")
        got = f" (got {first['input']!r})" if first["loc"] else ""
        raise SettingsError(f"{name}: {first['msg'].removeprefix('Value error, ')}{got}") from None
