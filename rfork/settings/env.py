"""Loading of settings from environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from pydantic import AliasChoices, SecretStr, ValidationError
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from rfork.errors import SettingsError
from rfork.schema.base import StrictCopyModel

SettingsT = TypeVar("SettingsT", bound=BaseSettings)

ADVANCED: Final[JsonDict] = {"advanced": True}
"""`json_schema_extra` of a field that few users need: documented in a separate table, and not a launcher flag."""


class Settings(StrictCopyModel, BaseSettings):
    """Base of all settings."""


class ExternalSettings(Settings):
    """Base of settings that also read variables of other projects: an argument has precedence over such a variable."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read arguments, then the environment."""
        if isinstance(init_settings, InitSettingsSource):
            # Before 2.11, pydantic-settings prefers a variable to an argument that is passed by the field's name.
            init_settings.init_kwargs = {
                variables_of(cls, name)[0] if is_external(cls, name) else name: value
                for name, value in init_settings.init_kwargs.items()
            }
        return init_settings, env_settings


def is_advanced(field: FieldInfo) -> bool:
    """Return True for a field that is marked `ADVANCED`."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("advanced"))


def is_external(settings_class: type[BaseSettings], name: str) -> bool:
    """Return True for a field that is read from variables of another project."""
    return name in settings_class.model_fields and settings_class.model_fields[name].validation_alias is not None


def is_secret(settings_class: type[BaseSettings], name: str) -> bool:
    """Return True for a field whose value no message may contain."""
    field = settings_class.model_fields.get(name)
    return field is not None and SecretStr.__name__ in repr(field.annotation)


def variables_of(settings_class: type[BaseSettings], name: str) -> tuple[str, ...]:
    """Return the environment variables that a field is read from, in order of precedence."""
    match settings_class.model_fields[name].validation_alias:
        case AliasChoices(choices=choices):
            return tuple(map(str, choices))
        case str(variable):
            return (variable,)
        case _:
            return (f"{settings_class.model_config.get('env_prefix', '')}{name}".upper(),)


def load(settings_class: type[SettingsT], **overrides: object) -> SettingsT:
    """Read settings from the environment; `overrides` that are not None have precedence.

    Raises SettingsError, one line that names the variable, for an invalid value.
    """
    return _validated(settings_class, {name: value for name, value in overrides.items() if value is not None})


def checked(settings_class: type[SettingsT], settings: object, **overrides: object) -> SettingsT:
    """Return the settings with all `overrides` that are not None, and every value validated.

    Reads nothing from the environment. Raises SettingsError as `load` does, and if `settings` is of another class.
    """
    if not isinstance(settings, settings_class):
        raise SettingsError(f"settings is an object of rfork.{settings_class.__name__}, not a {type(settings).__name__}")
    values: dict[str, object] = {name: getattr(settings, name) for name in settings_class.model_fields}
    return _validated(settings_class, values | {name: value for name, value in overrides.items() if value is not None})


def _validated(settings_class: type[SettingsT], values: Mapping[str, object]) -> SettingsT:
    try:
        return settings_class(**values)  # type: ignore[arg-type]  # pydantic validates each value
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # of several fields: the message names them
            raise SettingsError(message) from None
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise SettingsError(f"{name} is not a setting of rfork.{settings_class.__name__}") from None
        variable = variables_of(settings_class, name)[0] if name in settings_class.model_fields else name
        if is_secret(settings_class, name):
            # pydantic's messages about the length of a secret are about the "items" of a "value".
            for error_type, bound, words in (("too_short", "min_length", "least"), ("too_long", "max_length", "most")):
                if first["type"] == error_type:
                    message = f"it must have at {words} {first['ctx'][bound]} characters"
            raise SettingsError(f"{variable}: {message}") from None
        raise SettingsError(f"{variable}: {message} (got {first['input']!r})") from None
