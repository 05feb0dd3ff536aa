"""The planner as an ASGI application."""

from __future__ import annotations

from typing import Any, Final

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


class PlannerApp(FastAPI):
    """Adds to the OpenAPI document what routes alone do not tell: the problem's schema and the token."""

    def __init__(self, *, guarded: bool) -> None:
        super().__init__(title="rfork planner", version=rfork.__version__, description=DESCRIPTION)
        self._guarded = guarded
        self._document: dict[str, Any] | None = None

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made once."""
        if self._document is None:
            self._document = self._describe()
        return self._document

    def _describe(self) -> dict[str, Any]:
        document = get_openapi(
            title=self.title, version=self.version, description=self.description, routes=self.routes
        )
        components = document.setdefault("components", {})
        components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
        if self._guarded:
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"token": []}]
            for path in OPEN_PATHS:
                for operation in document["paths"][path].values():
                    operation["security"] = []
        return document


def create_app(settings: PlannerSettings, clock: Clock | None = None, store: Store | None = None) -> FastAPI:
    """Build the application; `clock` and `store` default to this machine's clocks and memory."""
    metrics = Metrics()
    registry = Registry(
        settings, store or MemoryStore(keep_forks=settings.keep_forks), clock or Clock(), metrics
    )
    app = PlannerApp(guarded=settings.token is not None)
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
    return app
