"""Reading options from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from rfork.errors import SettingsError

SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def load(settings_class: type[SettingsT], **overrides: object) -> SettingsT:
    """Read `settings_class` from the environment, with `overrides` (None means: not given) on top.

    Raises SettingsError, one line naming the variable, when a value cannot be used.
    """
    return _made(settings_class, {name: value for name, value in overrides.items() if value is not None})


def checked(settings_class: type[SettingsT], settings: object, **overrides: object) -> SettingsT:
    """Return the settings with `overrides` (None means: not given) on top, all values validated.

    Nothing is read from the environment. Raises SettingsError, as `load`, and for what is no `settings_class`.
    """
    if not isinstance(settings, settings_class):
        raise SettingsError(f"settings is an object of rfork.{settings_class.__name__}, not a {type(settings).__name__}")
    values: dict[str, object] = {name: getattr(settings, name) for name in settings_class.model_fields}
    return _made(settings_class, values | {name: value for name, value in overrides.items() if value is not None})


def _made(settings_class: type[SettingsT], values: Mapping[str, object]) -> SettingsT:
    try:
        return settings_class(**values)  # type: ignore[arg-type]  # pydantic validates each value
    except ValidationError as error:
        first = error.errors()[0]
        prefix = settings_class.model_config.get("env_prefix", "")
        name = f"{prefix}{'_'.join(str(part) for part in first['loc'][:1]).upper()}".rstrip("_")
        got = f" (got {first['input']!r})" if first["loc"] else ""
        raise SettingsError(f"{name}: {first['msg'].removeprefix('Value error, ')}{got}") from None
