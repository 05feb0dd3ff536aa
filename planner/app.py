"""The planner as an ASGI application."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import rfork
from planner import problems
from planner.api.forks import forks_router
from planner.api.health import health_router
from planner.api.instances import instances_router
from planner.api.models import models_router
from planner.leases import Clock
from planner.metrics import Metrics
from planner.middleware import OPEN_PATHS, BearerToken, BodyLimit, RequestLog
from planner.registry import Registry
from planner.store.base import Store
from planner.store.memory import MemoryStore
from rfork.settings import PlannerSettings
from rfork.wire import Problem

DESCRIPTION: Final = """
Decides which inference instance reads which chunks of a model's weights from which other.

* An instance registers with `PUT /v1/instances/{id}` and repeats that as its heartbeat.
* A new one asks with `POST /v1/forks`, reads along the plan's routes, reports progress, and finishes.
* Registration is soft state: a planner that restarts knows everything again after one heartbeat.

Times are in seconds, sizes in bytes, chunk ranges half-open. Errors are RFC 9457 problem documents.
"""


def create_app(settings: PlannerSettings, clock: Clock | None = None, store: Store | None = None) -> FastAPI:
    """Build the application; `clock` and `store` default to this machine's clocks and memory."""
    metrics = Metrics()
    registry = Registry(
        settings, store or MemoryStore(keep_forks=settings.keep_forks), clock or Clock(), metrics
    )
    app = FastAPI(title="rfork planner", version=rfork.__version__, description=DESCRIPTION)
    problems.install(app)
    # The one added last is met first: the log sees every request, the limit only those let in.
    app.add_middleware(BodyLimit)
    if settings.token is not None:
        app.add_middleware(BearerToken, token=settings.token.get_secret_value())
    app.add_middleware(RequestLog)
    for router in (
        instances_router(registry),
        forks_router(registry),
        models_router(registry),
        health_router(registry, metrics),
    ):
        app.include_router(router)
    _describe(app, guarded=settings.token is not None)
    return app


def _describe(app: FastAPI, *, guarded: bool) -> None:
    """Add to the OpenAPI document what routes alone do not tell: the problem's schema and the token."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    components = document.setdefault("components", {})
    components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
    if guarded:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        for path in OPEN_PATHS:
            for operation in document["paths"][path].values():
                operation["security"] = []
    app.openapi_schema = document
