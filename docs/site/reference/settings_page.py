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

from docs.site.reference.markdown import anchor_of, cell, code, heading, sentence, table, whole
from rfork import settings

ORDER = (
    settings.Settings,
    settings.StorageSettings,
    settings.ArtifactSettings,
    settings.TlsSettings,
    settings.TracingSettings,
    settings.PlannerSettings,
    settings.HookSettings,
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
NOT_TOLD = "(worked out)"
"""Defaults that differ from machine to machine."""


@dataclass(frozen=True)
class Option:
    """One option as the page tells it."""

    variable: str
    name: str
    kind: str
    default: str
    text: str


def kinds() -> tuple[type[BaseSettings], ...]:
    """All classes of settings, in the page's order."""
    found = [value for value in vars(settings).values() if isinstance(value, type)]
    rest = [each for each in found if issubclass(each, BaseSettings) and each not in ORDER]
    return (*ORDER, *sorted(rest, key=lambda each: each.__name__))


def options(kind: type[BaseSettings]) -> Iterator[Option]:
    """The options of a class, in the order in which it has them."""
    prefix = str(kind.model_config.get("env_prefix", ""))
    for name, field in kind.model_fields.items():
        variable = str(field.validation_alias or prefix + name.upper())
        yield Option(variable, name, _type(field.annotation, field), _default(field), field.description or "")


def page() -> str:
    """A table for each class."""
    parts = []
    for kind in kinds():
        prefix = str(kind.model_config.get("env_prefix", ""))
        parts.append(heading(2, f"{kind.__name__} ({prefix}…)", anchor_of(kind.__name__)))
        parts.append("\n".join(line.strip() for line in (kind.__doc__ or "").splitlines()).strip() + "\n")
        rows = (
            [
                whole(each.variable, anchor_of(each.variable)),
                each.kind,
                each.default,
                sentence(each.text),
            ]
            for each in options(kind)
        )
        parts.append(table(["variable", "type", "default", "what it says"], rows))
    return "\n".join(parts)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return NOT_TOLD
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
    told = [
        f"{sign} {getattr(limit, name):.12g}"
        for limit in field.metadata
        for name, sign in signs.items()
        if getattr(limit, name, None) is not None
    ]
    return ", " + ", ".join(told) if told else ""
