"""Errors as problem documents (RFC 9457, `application/problem+json`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from planner.core.problems import ProblemError
from planner.store.base import StoreUnavailable
from rfork.logs import logger
from rfork.schema import Problem

TYPES: Final = "https://rfork.dev/problems/"
MEDIA_TYPE: Final = "application/problem+json"
SLUGS: Final[Mapping[int, str]] = {
    400: "bad-request",
    401: "unauthorized",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    408: "request-timeout",
    413: "body-too-large",
    422: "invalid-request",
    429: "too-many-requests",
    500: "internal-error",
    503: "not-ready",
}
"""Last part of `type` for problems that have no specific name."""


def problem_response(error: ProblemError, path: str) -> JSONResponse:
    """Return the response that carries the problem."""
    problem = Problem(
        type=TYPES + error.slug,
        title=HTTPStatus(error.status).phrase,
        status=error.status,
        detail=error.detail,
        instance=path,
    )
    document: dict[str, object] = problem.model_dump(exclude_none=True)
    if error.errors:
        document["errors"] = [dict(each) for each in error.errors]
    headers = dict(error.headers) if error.headers else None
    return JSONResponse(document, status_code=error.status, headers=headers, media_type=MEDIA_TYPE)


def register_handlers(app: FastAPI, store_unavailable: Callable[[], None]) -> None:
    """Register handlers that turn every error into a problem document.

    `store_unavailable` is called for each request that the store did not answer.
    """
    log = logger("planner.http_errors")

    async def on_problem(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, ProblemError):
            raise error
        return problem_response(error, request.url.path)

    async def on_invalid(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, RequestValidationError):
            raise error
        # Never include the values: they may be secret.
        errors = [{"field": _field(each["loc"]), "message": str(each["msg"])} for each in error.errors()]
        first = f"{errors[0]['field']}: {errors[0]['message']}"
        return problem_response(ProblemError(422, "invalid-request", first, errors=errors), request.url.path)

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        slug, headers = SLUGS.get(error.status_code, "error"), error.headers
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers = {"Allow": ", ".join(_allowed_methods(app, request.url.path))}
        problem = ProblemError(error.status_code, slug, str(error.detail), headers=headers)
        return problem_response(problem, request.url.path)

    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        request_id = str(request.scope.get("request_id", ""))
        log.error("request failed", request_id=request_id, path=request.url.path, exc_info=error)
        problem = ProblemError(
            500,
            "internal-error",
            "internal error; see the planner's log",
            headers={"X-Request-Id": request_id},
        )
        return problem_response(problem, request.url.path)

    async def on_store(request: Request, error: Exception) -> JSONResponse:
        store_unavailable()
        problem = ProblemError(503, "store-unavailable", str(error), headers={"Retry-After": "1"})
        return problem_response(problem, request.url.path)

    app.add_exception_handler(StoreUnavailable, on_store)
    app.add_exception_handler(ProblemError, on_problem)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)


def openapi_responses(*statuses: int) -> dict[int | str, dict[str, object]]:
    """Return the OpenAPI `responses` of a route that may answer with these problems."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {
                MEDIA_TYPE: {
                    "schema": {"$ref": "#/components/schemas/Problem"},
                    "example": {
                        "type": TYPES + SLUGS.get(status, "error"),
                        "title": HTTPStatus(status).phrase,
                        "status": status,
                        "detail": "one line that describes the problem",
                    },
                }
            },
        }
        for status in statuses
    }


def _allowed_methods(app: FastAPI, path: str) -> list[str]:
    """Return all methods of a path: the router's error lists those of only one of its routes."""
    paths = app.openapi()["paths"].items()
    matching = [methods for each, methods in paths if compile_path(each)[0].match(path)]
    return sorted({method.upper() for methods in matching for method in methods}) or ["GET"]


def _field(location: Sequence[int | str]) -> str:
    """Return `("body", "rank", "tp")` as `rank.tp`; a bare `body` stays."""
    parts = location[1:] if len(location) > 1 else location
    return ".".join(str(part) for part in parts)
