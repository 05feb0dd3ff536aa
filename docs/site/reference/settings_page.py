"""Settings: every setting of `rfork.settings`, with its variable, type, default and description."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docs.site.reference.markdown import anchor_of, cell, code, heading, nowrap_code, sentence, table
from rfork.settings import SETTINGS_CLASSES, CacheDirs, Settings, is_advanced, is_external, variables_of

WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    SecretStr: "secret",
}
COMPUTED = "(detected)"
"""Defaults that differ between machines."""

OTHER_VARIABLES = [
    ["`AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, `AWS_CA_BUNDLE`, …", "Credentials and configuration of S3."],
    ["`HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, `HF_HOME`", "Location of the Hugging Face cache."],
]
"""Variables that no settings class has as a field."""


@dataclass(frozen=True)
class SettingsOption:
    """One setting, as a row of the page. `variables`: those that set it, in order of precedence."""

    variables: tuple[str, ...]
    name: str
    type_name: str
    default: str
    text: str
    group: Literal["documented", "advanced", "external"]

    @property
    def variable(self) -> str:
        """The preferred environment variable."""
        return self.variables[0]


def options(settings_class: type[Settings]) -> Iterator[SettingsOption]:
    """Yield the settings of a class, in the order of its fields."""
    for name, field in settings_class.model_fields.items():
        yield SettingsOption(
            variables_of(settings_class, name),
            name,
            _type(field.annotation, field),
            _default(field),
            field.description or "",
            "external" if is_external(settings_class, name) else "advanced" if is_advanced(field) else "documented",
        )


def page() -> str:
    """Return a table per class, one of the advanced settings, and one of variables of other projects."""
    parts = []
    for settings_class in SETTINGS_CLASSES:
        prefix = settings_class.variable_prefix
        parts.append(heading(2, f"{settings_class.__name__} ({prefix}…)", anchor_of(settings_class.__name__)))
        parts.append("\n".join(line.strip() for line in (settings_class.__doc__ or "").splitlines()).strip() + "\n")
        parts.append(_table(each for each in options(settings_class) if each.group == "documented"))
    everything = [each for settings_class in SETTINGS_CLASSES for each in options(settings_class)]
    parts.append(heading(2, "Advanced", "advanced"))
    parts.append("The defaults of these settings are right for almost everyone. They may change between releases.\n")
    parts.append(_table(each for each in everything if each.group == "advanced"))
    parts.append(heading(2, "Variables of other projects", "external"))
    parts.append("rfork reads these variables with the meaning that the projects that own them define.\n")
    external = [*(each for each in everything if each.group == "external"), *options(CacheDirs)]
    rows = ([code(", ".join(each.variables)).replace(", ", "`, `"), sentence(each.text)] for each in external)
    parts.append(table(["variable", "purpose"], [*rows, *OTHER_VARIABLES]))
    return "\n".join(parts)


def _table(options_of_table: Iterable[SettingsOption]) -> str:
    rows = (
        [nowrap_code(each.variable, anchor_of(each.variable)), each.type_name, each.default, sentence(each.text)]
        for each in options_of_table
    )
    return table(["variable", "type", "default", "description"], rows)


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
