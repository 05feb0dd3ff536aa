"""REST reference: every route of the planner with role, bodies, responses and problems, from its OpenAPI
document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from docs.site.reference.markdown import (
    anchor_of,
    as_json,
    code,
    codes,
    collapsible,
    heading,
    nowrap_code,
    sentence,
    table,
)
from planner.app import create_app
from planner.auth import OPEN_PATHS
from planner.http_errors import MEDIA_TYPE, TYPES
from rfork.settings import PlannerSettings

Document = Mapping[str, Any]
"""A part of an OpenAPI document, as specified JSON."""

TITLES = {
    "instances": "Instances",
    "forks": "Forks",
    "models": "Models",
    "scaleups": "Scale-ups",
    "holders": "Holders",
    "events": "Events",
    "vllm-ascend": "vLLM-Ascend's clients",
}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
GUARD = 1e9
"""Limits from here on are sanity checks and are not documented."""


@cache
def openapi() -> Document:
    """Return the OpenAPI document of a planner with tokens, so that each route names its role."""
    return create_app(PlannerSettings.model_validate({"token": "reference"})).openapi()


def operations() -> Iterator[tuple[str, str, Document]]:
    """Return method, path and operation of each route."""
    for path, methods in openapi()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def page_routes() -> str:
    """Render all routes, grouped by resource."""
    by_tag: defaultdict[str, list[tuple[str, str, Document]]] = defaultdict(list)
    for method, path, operation in operations():
        by_tag[(operation.get("tags") or ["others"])[0]].append((method, path, operation))
    parts = [
        table(
            ["route", "role", "description"],
            (
                [
                    f"[{code(f'{method} {path}')}](#{anchor_of(method, path)})",
                    role_of(path, operation),
                    sentence(_summary(operation)),
                ]
                for method, path, operation in operations()
            ),
        )
    ]
    for tag, found in by_tag.items():
        title = TITLES.get(tag, tag.capitalize())
        parts.append(heading(2, title, anchor_of("routes", tag)))
        parts += [_route(method, path, operation) for method, path, operation in found]
    return "\n".join(parts)


def page_schemas() -> str:
    """Render all schemas with their fields."""
    parts = []
    for name, schema in sorted(openapi()["components"]["schemas"].items()):
        if name in ("HTTPValidationError", "ValidationError"):
            continue  # FastAPI's own, replaced by the planner's problems
        parts.append(heading(3, name, anchor_of(name)))
        if schema.get("description"):
            parts.append(" ".join(schema["description"].split()).replace("``", "`") + "\n")
        parts.append(_fields(schema))
    return "\n".join(parts)


def page_problems() -> str:
    """Render every problem that a route's description names, with its routes."""
    found: defaultdict[tuple[str, int, str], list[str]] = defaultdict(list)
    for method, path, operation in operations():
        for response in operation["responses"].values():
            example = response.get("content", {}).get(MEDIA_TYPE, {}).get("example")
            if example is not None:
                slug = example["type"].removeprefix(TYPES)
                found[(slug, example["status"], example["detail"])].append(f"{method} {path}")
    every = len({path for _, path, _ in operations() if path.startswith("/v1")})
    rows = []
    for (slug, status, detail), routes in sorted(found.items(), key=lambda each: (each[0][1], each[0][0])):
        where = "most routes" if len(routes) >= every // 2 else codes(routes)
        detail_text = "" if detail == "one line that describes the problem" else f"“{detail}”"
        rows.append([nowrap_code(slug, f"problem-{slug}"), str(status), detail_text, where])
    return table(["problem", "status", "example", "of"], rows)


def role_of(path: str, operation: Document) -> str:
    """Return the role that a route requires."""
    return "none: public" if path in OPEN_PATHS else str(operation.get("x-rfork-role", "operator"))


def _summary(operation: Document) -> str:
    return str(operation.get("summary", "")).strip()


def _route(method: str, path: str, operation: Document) -> str:
    parts = [heading(3, code(f"{method} {path}"), anchor_of(method, path))]
    parts.append(f"**{sentence(_summary(operation))}** Role: {role_of(path, operation)}.\n")
    if operation.get("description"):
        parts.append(operation["description"].strip() + "\n")
    parameters = operation.get("parameters", [])
    if parameters:
        rows = (
            [
                nowrap_code(each["name"]),
                each["in"] + ("" if each.get("required") else ", optional"),
                type_of(each["schema"]),
                sentence(each.get("description") or ""),
            ]
            for each in parameters
        )
        parts.append(table(["parameter", "where", "type", "meaning"], rows))
    parts += _body(operation)
    parts += _responses(operation)
    return "\n".join(parts)


def _body(operation: Document) -> Iterator[str]:
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"Body ({code(media_type)}): {type_of(content.get('schema', {}))}.\n"
        for name, example in content.get("examples", {}).items():
            yield collapsible(f"Body: {name}", as_json(_without_defaults(example["value"])))


def _responses(operation: Document) -> Iterator[str]:
    rows, examples = [], []
    for status, response in sorted(operation["responses"].items()):
        content = response.get("content", {})
        slugs, types = "", ""
        for media_type, media in content.items():
            if media_type == MEDIA_TYPE:
                slug = media.get("example", {}).get("type", "").removeprefix(TYPES)
                slugs = f"[{code(slug)}](#problem-{slug})" if slug else ""
            else:
                types = type_of(media.get("schema", {})) if media.get("schema") else code(media_type)
            if media_type == MEDIA_TYPE:
                continue
            if "example" in media:
                examples.append(collapsible(f"Answer {status}", _example_block(media["example"])))
            for name, example in media.get("examples", {}).items():
                examples.append(collapsible(f"Answer {status}: {name}", _example_block(example["value"])))
        headers = codes(name for name in response.get("headers", {}) if name != "X-Request-Id")
        rows.append([status, types or slugs, _response_description(response), headers])
    yield table(["status", "response", "when", "headers"], rows)
    yield from examples


def _response_description(response: Document) -> str:
    """Return a response's description, unless it is FastAPI's default."""
    description = str(response.get("description", ""))
    return "" if description == "Successful Response" else sentence(description)


def _example_block(example: object) -> str:
    return f"```text\n{example.rstrip()}\n```\n" if isinstance(example, str) else as_json(_without_defaults(example))


def _without_defaults(value: Any) -> Any:
    """Return an example without fields that equal their defaults."""
    if isinstance(value, Mapping):
        kept = {key: _without_defaults(each) for key, each in value.items()}
        return {key: each for key, each in kept.items() if each not in (None, [], {})}
    return [_without_defaults(each) for each in value] if isinstance(value, list | tuple) else value


def _fields(schema: Document) -> str:
    if "enum" in schema:
        return "One of " + codes(map(str, schema["enum"])) + ".\n"
    required = set(schema.get("required", ()))
    rows = (
        [
            nowrap_code(name),
            type_of(field) + _bounds(field),
            "" if name in required else _default(field),
            sentence(field.get("description") or ""),
        ]
        for name, field in schema.get("properties", {}).items()
    )
    description = list(rows)
    return table(["field", "type", "default", "description"], description) if description else "No fields.\n"


def _default(field: Document) -> str:
    value = field.get("default")
    if value is None or value in ([], {}, ""):
        return "none"
    if isinstance(value, Mapping):
        return "its own defaults"
    return code(str(value).lower() if isinstance(value, bool) else str(value))


def _bounds(field: Document) -> str:
    inside = next((each for each in field.get("anyOf", ()) if each.get("type") != "null"), field)
    limits = []
    for name, sign in LIMITS.items():
        if name in inside and abs(inside[name]) < GUARD:
            limits.append(f"{sign} {inside[name]:g}" if inside[name] < 1e5 else f"{sign} {inside[name]:,.0f}")
    if "maxLength" in inside:
        limits.append(f"at most {inside['maxLength']} characters")
    if "maxItems" in inside:
        limits.append(f"at most {inside['maxItems']}")
    return ", " + ", ".join(limits) if limits else ""


def type_of(schema: Document) -> str:
    """Describe the type of a schema; link to other schemas."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{anchor_of(name)})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(type_of(each) for each in schema[several] if each.get("type") != "null")
    if "enum" in schema:
        return " or ".join(code(str(value)) for value in schema["enum"])
    if "const" in schema:
        return code(str(schema["const"]))
    schema_type = schema.get("type", "any")
    if schema_type == "array":
        if "prefixItems" in schema:
            return "[" + ", ".join(type_of(each) for each in schema["prefixItems"]) + "]"
        return f"list of {type_of(schema.get('items', {}))}"
    if schema_type == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {type_of(schema['additionalProperties'])}"
    return str(schema_type)
