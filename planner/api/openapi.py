"""OpenAPI responses of routes: examples, headers and problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from fastapi.openapi.models import Example
from pydantic import BaseModel

from planner.http_errors import MEDIA_TYPE, TYPES, openapi_responses
from rfork.schema import Problem

Responses = dict[int | str, dict[str, object]]

ALWAYS: Final = (401, 403, 422, 429)
"""Problems that any route under /v1 may return."""
WITH_BODY: Final = (400, 408, 413)
"""Further problems of a route with a body."""
REQUEST_ID: Final = {
    "X-Request-Id": {
        "description": "the caller's, or one chosen by the planner; it is in the planner's log",
        "schema": {"type": "string"},
    }
}
RETRY_AFTER: Final = {
    "Retry-After": {
        "description": "seconds after which to retry",
        "schema": {"type": "integer", "minimum": 0},
    }
}


@dataclass(frozen=True)
class ProblemDoc:
    """A problem with a specific name: the last part of its `type`."""

    status: int
    slug: str
    detail: str


def problems(*statuses: int | ProblemDoc) -> Responses:
    """Return the problems of a route."""
    found: Responses = {}
    for each in statuses:
        status = each.status if isinstance(each, ProblemDoc) else each
        document = openapi_responses(status)[status]
        document["headers"] = REQUEST_ID | (RETRY_AFTER if status in (429, 503) else {})
        if isinstance(each, ProblemDoc):
            example = Problem(
                type=TYPES + each.slug, title=HTTPStatus(status).phrase, status=status, detail=each.detail
            )
            schema = {"$ref": "#/components/schemas/Problem"}
            document["content"] = {MEDIA_TYPE: {"schema": schema, "example": example.model_dump(exclude_none=True)}}
        found[status] = document
    return found


def success(
    example: BaseModel | Sequence[BaseModel] | Mapping[str, BaseModel] | None = None, *, status: int = 200
) -> Responses:
    """Return the successful response of a route; a mapping contains several named examples."""
    document: dict[str, object] = {"headers": REQUEST_ID}
    content: dict[str, object] | None = None
    if isinstance(example, BaseModel):
        content = {"example": example.model_dump(mode="json")}
    elif isinstance(example, Mapping):
        content = {"examples": openapi_examples(example)}
    elif example is not None:
        content = {"example": [each.model_dump(mode="json") for each in example]}
    if content is not None:
        document["content"] = {"application/json": content}
    return {status: document}


def openapi_examples(examples: Mapping[str, BaseModel]) -> dict[str, Example]:
    """Return the examples in OpenAPI's format."""
    return {name: {"value": example.model_dump(mode="json")} for name, example in examples.items()}
