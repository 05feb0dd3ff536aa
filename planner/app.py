"""The planner as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import rfork
from planner import http_errors
from planner.api.events import events_router
from planner.api.forks import forks_router
from planner.api.health import health_router
from planner.api.instances import instances_router
from planner.api.models import models_router
from planner.api.previews import previews_router
from planner.api.scaleups import scaleups_router
from planner.auth import OPEN_PATHS, SECURITY_SCHEME, Auth, role_needed
from planner.event_bus import EventBus
from planner.integrations.vllm_ascend.router import ascend_router
from planner.leases import Clock
from planner.metrics import Metrics
from planner.middleware import AuthMiddleware, BodyLimit, RequestLog
from planner.origins import KnownHosts, OriginGuard
from planner.registry import SWEEP_INTERVAL_S, Registry
from planner.request_rate_limit import RateLimit
from planner.sse import sse_router
from planner.store.base import PlannerStore, StoreUnavailable
from planner.store.memory import MemoryStore
from planner.tracing import TracingMiddleware
from planner.ui.broadcaster import Broadcaster
from planner.ui.files import page_routes
from rfork.logs import logger
from rfork.schema import Problem
from rfork.settings import PlannerSettings
from rfork.tracing import PLANNER, Tracer
from rfork.tracing import get_tracer as process_tracer

DESCRIPTION: Final = """
Decides which inference instance reads which chunks of a model's weights from which other.

* An instance registers with `PUT /v1/instances/{id}` and repeats that as its heartbeat.
* A new one asks with `POST /v1/forks`, reads along the plan's routes, reports progress, and finishes.
* Registration is soft state: a planner that restarts knows everything again after one heartbeat.

Times are in seconds, sizes in bytes, chunk ranges half-open. Errors are RFC 9457 problem documents.
"""


class PlannerApp(FastAPI):
    """Adds to the OpenAPI document what routes alone do not tell: the problem's schema and the token."""

    def __init__(self, registry: Registry, metrics: Metrics, *, guarded: bool, heartbeat_s: float) -> None:
        super().__init__(
            title="rfork planner",
            version=rfork.__version__,
            description=DESCRIPTION,
            lifespan=lambda _: lifespan(registry),
            docs_url=None,  # `page_routes` has it, without the internet
            redoc_url=None,
        )
        self.events = EventBus(registry.state)
        self.broadcaster = Broadcaster(registry, heartbeat_s=heartbeat_s)
        self.metrics = metrics
        self._guarded = guarded
        self._document: dict[str, Any] | None = None

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made once."""
        if self._document is None:
            self._document = self._describe()
        return self._document

    def _describe(self) -> dict[str, Any]:
        document = get_openapi(title=self.title, version=self.version, description=self.description, routes=self.routes)
        components = document.setdefault("components", {})
        components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
        if self._guarded:
            components["securitySchemes"] = {"token": dict(SECURITY_SCHEME)}
            document["security"] = [{"token": []}]
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if path in OPEN_PATHS:
                    operation["security"] = []
                    continue
                operation["x-rfork-role"] = role_needed(method.upper(), path) or "operator"
        return document


def make_store(settings: PlannerSettings, clock: Clock) -> PlannerStore:
    """The store that the settings name; not started."""
    if settings.store == "memory":
        return MemoryStore(clock, keep_forks=settings.max_finished_forks)
    from planner.store.redis import RedisStore

    return RedisStore(settings.store, clock, keep_forks=settings.max_finished_forks, timeout_s=settings.store_timeout_s)


@contextlib.asynccontextmanager
async def lifespan(registry: Registry) -> AsyncIterator[None]:
    """Connect the store, and look after what falls silent while nobody asks."""
    try:
        await registry.store.start()
    except StoreUnavailable as error:  # it goes on trying; until then /readyz says so
        logger("planner.app").error("the planner waits for its store", reason=str(error))
    sweeper = asyncio.create_task(_sweep(registry), name="rfork-sweep")
    try:
        yield
    finally:
        sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeper
        await registry.store.stop()


async def _sweep(registry: Registry) -> None:
    log = logger("planner.app")
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        try:
            await registry.sweep()
        except Exception:  # the task's outermost edge: one sweep that fails must not be the last
            log.exception("sweep failed")


def create_app(
    settings: PlannerSettings,
    clock: Clock | None = None,
    store: PlannerStore | None = None,
    tracer: Tracer | None = None,
    hosts: KnownHosts | None = None,
) -> PlannerApp:
    """Build the application; `clock`, `store` and `tracer` default to this machine's clocks, memory, and what
    the settings of tracing say. `hosts`: those under which it is reached while it has no token; None: any.
    """
    metrics, clock, tracer = Metrics(), clock or Clock(), tracer or process_tracer(PLANNER)
    registry = Registry(settings, store or make_store(settings, clock), clock, metrics, tracer)
    auth = Auth(settings, clock.monotonic)
    app = PlannerApp(registry, metrics, guarded=auth.guarded, heartbeat_s=settings.heartbeat_interval_s)
    http_errors.register_handlers(app, metrics.store_unavailable)
    # The one added last is met first: the log sees every request, the limit only those let in.
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, on_refused=metrics.request_refused)
    if tracer.enabled:
        app.add_middleware(TracingMiddleware, tracer=tracer)
    rate = RateLimit(settings.max_requests_per_s, clock.monotonic) if settings.max_requests_per_s else None
    if auth.guarded or rate is not None:
        app.add_middleware(AuthMiddleware, auth=auth, rate=rate, on_refused=metrics.request_refused)
    if hosts is not None and not auth.guarded:
        app.add_middleware(OriginGuard, hosts=hosts, on_refused=metrics.request_refused)
    app.add_middleware(RequestLog)
    for router in (
        instances_router(registry),
        forks_router(registry),
        models_router(registry),
        scaleups_router(registry),
        previews_router(registry),
        events_router(registry, app.events),
        health_router(registry, metrics),
        ascend_router(registry),
        sse_router(app.broadcaster),
    ):
        app.include_router(router)
    app.router.routes.extend(page_routes())
    return app
