"""Settings: every option of `rfork.settings`, with its variable, its type and what it does."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from docs.site.reference.markdown import anchor_of, cell, code, heading, nowrap_code, sentence, table
from rfork import settings

ORDER = (
    settings.InstanceSettings,
    settings.StorageSettings,
    settings.ArtifactSettings,
    settings.TlsSettings,
    settings.TracingSettings,
    settings.PlannerSettings,
    settings.KubernetesSettings,
    settings.SidecarSettings,
)
"""Those that most people need first; any that is missing here comes behind."""

WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    SecretStr: "secret",
}
COMPUTED = "(worked out)"
"""Defaults that differ from machine to machine."""


@dataclass(frozen=True)
class SettingsOption:
    """One option as the page tells it."""

    variable: str
    name: str
    type_name: str
    default: str
    text: str


def settings_classes() -> tuple[type[BaseSettings], ...]:
    """All classes of settings, in the page's order."""
    found = [value for value in vars(settings).values() if isinstance(value, type)]
    rest = [each for each in found if issubclass(each, BaseSettings) and each not in ORDER]
    return (*ORDER, *sorted(rest, key=lambda each: each.__name__))


def options(settings_class: type[BaseSettings]) -> Iterator[SettingsOption]:
    """The options of a class, in the order in which it has them."""
    prefix = str(settings_class.model_config.get("env_prefix", ""))
    for name, field in settings_class.model_fields.items():
        variable = str(field.validation_alias or prefix + name.upper())
        yield SettingsOption(variable, name, _type(field.annotation, field), _default(field), field.description or "")


def page() -> str:
    """A table for each class."""
    parts = []
    for settings_class in settings_classes():
        prefix = str(settings_class.model_config.get("env_prefix", ""))
        parts.append(heading(2, f"{settings_class.__name__} ({prefix}…)", anchor_of(settings_class.__name__)))
        parts.append("\n".join(line.strip() for line in (settings_class.__doc__ or "").splitlines()).strip() + "\n")
        rows = (
            [
                nowrap_code(each.variable, anchor_of(each.variable)),
                each.type_name,
                each.default,
                sentence(each.text),
            ]
            for each in options(settings_class)
        )
        parts.append(table(["variable", "type", "default", "what it says"], rows))
    return "\n".join(parts)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return COMPUTED
    value = field.default
    if value is PydanticUndefined:
        return "(must be set)"
    if value is None or value in ((), ""):
        return "none"
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, tuple):
        return code(",".join(map(str, value)))
    if isinstance(value, int) and value and not value % (1 << 20):
        return f"{code(str(value))} ({value >> 20} MiB)"
    if isinstance(value, float):
        return code(f"{value:g}")
    return code(str(value))


def _type(annotation: Any, field: FieldInfo | None = None) -> str:  # whatever a field may be annotated with
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inside[0], field)
    if origin is Literal:
        return cell(" or ".join(code(str(value)) for value in inside))
    if origin in (Union, types.UnionType):
        return " or ".join(_type(each, field) for each in inside if each is not type(None))
    if origin is tuple:
        return f"list of {_type(inside[0])}" if inside else "list"
    if annotation in WORDS:
        return WORDS[annotation] + (_bounds(field) if field is not None else "")
    return "text"


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    constraints = [
        f"{sign} {getattr(limit, name):.12g}"
        for limit in field.metadata
        for name, sign in signs.items()
        if getattr(limit, name, None) is not None
    ]
    return ", " + ", ".join(constraints) if constraints else ""
