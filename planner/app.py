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
from planner.api.holders import holders_router
from planner.api.instances import instances_router
from planner.api.models import models_router
from planner.api.previews import previews_router
from planner.api.scaleups import scaleups_router
from planner.auth import OPEN_PATHS, SECURITY_SCHEME, Auth, role_needed
from planner.clock import Clock
from planner.core.state import MAX_FINISHED_FORKS
from planner.event_bus import EventBus
from planner.integrations.vllm_ascend.router import ascend_router
from planner.metrics import Metrics
from planner.middleware import MAX_BODY_BYTES, AuthMiddleware, BodyLimit, RateLimit, RequestLog, TracingMiddleware
from planner.origins import KnownHosts, OriginGuard
from planner.plan_service import SWEEP_INTERVAL_S, PlanService
from planner.store.base import PlannerStore, StoreUnavailable
from planner.store.memory import MemoryStore
from planner.ui.broadcaster import Broadcaster
from planner.ui.feed import feed_router
from planner.ui.files import page_routes
from rfork.errors import MissingExtra
from rfork.logs import logger
from rfork.schema import Problem
from rfork.settings import PlannerSettings
from rfork.tracing import PLANNER, Tracer
from rfork.tracing import get_tracer as process_tracer

DESCRIPTION: Final = """
Plans which inference instance reads which chunks of a model's weights from which other instance.

* An instance registers with `PUT /v1/instances/{id}`; repeating that call is its heartbeat.
* A new instance requests a plan with `POST /v1/forks`, reads along the plan's routes, reports progress, and finishes.
* A holder, which keeps images without an engine, reports with `PUT /v1/holders/{id}` and learns what to keep.
* Registration is soft state: a planner that restarts recovers everything within one heartbeat.

Times are in seconds, sizes in bytes, chunk ranges half-open. Errors are RFC 9457 problem documents.
"""


class PlannerApp(FastAPI):
    """FastAPI application that adds the problem schema and the token scheme to the OpenAPI document."""

    def __init__(self, service: PlanService, metrics: Metrics, *, guarded: bool, heartbeat_s: float) -> None:
        super().__init__(
            title="rfork planner",
            version=rfork.__version__,
            description=DESCRIPTION,
            lifespan=lambda _: lifespan(service),
            docs_url=None,  # `page_routes` serves it without internet access
            redoc_url=None,
            telemetry={"tracing": False, "metrics": False, "logs": False},  # the planner has its own
        )
        self.events = EventBus(service.state)
        self.broadcaster = Broadcaster(service, heartbeat_s=heartbeat_s)
        self.metrics = metrics
        self._guarded = guarded
        self._document: dict[str, Any] | None = None

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, built once."""
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
    """Return the store that the settings name, not started. Raises MissingExtra without the `redis` package."""
    if settings.store == "memory":
        return MemoryStore(clock, max_finished_forks=MAX_FINISHED_FORKS)
    try:
        from planner.store.redis import RedisStore
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "redis":
            raise
        raise MissingExtra("the redis package", extra="redis") from None
    return RedisStore(settings.store, clock, max_finished_forks=MAX_FINISHED_FORKS, timeout_s=settings.store_timeout_s)


@contextlib.asynccontextmanager
async def lifespan(service: PlanService) -> AsyncIterator[None]:
    """Connect the store, and sweep silent instances and forks while no requests arrive."""
    try:
        await service.store.start()
    except StoreUnavailable as error:  # retried in the background; until then /readyz reports it
        logger("planner.app").error("waiting for the store, no instance can register yet", reason=str(error))
    sweeper = asyncio.create_task(_sweep(service), name="rfork-sweep")
    try:
        yield
    finally:
        sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeper
        await service.store.stop()


async def _sweep(service: PlanService) -> None:
    log = logger("planner.app")
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        try:
            await service.sweep()
        except Exception:  # outermost level of the task: one failed sweep must not be the last
            log.exception("failed to remove silent instances and forks, retrying")


def create_app(
    settings: PlannerSettings,
    clock: Clock | None = None,
    store: PlannerStore | None = None,
    tracer: Tracer | None = None,
    hosts: KnownHosts | None = None,
) -> PlannerApp:
    """Build the application. `clock`, `store` and `tracer` default to this machine's clocks, memory, and the
    tracing settings. `hosts`: host names accepted while no token is set; None accepts any.
    """
    metrics, clock, tracer = Metrics(), clock or Clock(), tracer or process_tracer(PLANNER)
    service = PlanService(settings, store or make_store(settings, clock), clock, metrics, tracer)
    auth = Auth(settings, clock.monotonic)
    app = PlannerApp(service, metrics, guarded=auth.guarded, heartbeat_s=settings.heartbeat_interval_s)
    http_errors.register_handlers(app, metrics.store_unavailable)
    # The middleware added last runs first: the log sees every request, the body limit only authorized ones.
    app.add_middleware(BodyLimit, limit=MAX_BODY_BYTES, on_refused=metrics.request_refused)
    if tracer.enabled:
        app.add_middleware(TracingMiddleware, tracer=tracer)
    rate = RateLimit(settings.max_requests_per_s, clock.monotonic) if settings.max_requests_per_s else None
    if auth.guarded or rate is not None:
        app.add_middleware(AuthMiddleware, auth=auth, rate=rate, on_refused=metrics.request_refused)
    if hosts is not None and not auth.guarded:
        app.add_middleware(OriginGuard, hosts=hosts, on_refused=metrics.request_refused)
    app.add_middleware(RequestLog)
    routers = (
        instances_router(service),
        forks_router(service),
        models_router(service),
        scaleups_router(service),
        holders_router(service),
        previews_router(service),
        events_router(service, app.events),
        health_router(service, metrics),
        ascend_router(service),
        feed_router(app.broadcaster),
    )
    # Not `include_router`: FastAPI searches an included router twice for each request. Routes are searched in order:
    # those with a body come first, because instances call them all the time.
    routes = [route for router in routers for route in router.routes]
    app.router.routes.extend(sorted(routes, key=lambda route: getattr(route, "body_field", None) is None))
    app.router.routes.extend(page_routes())
    return app
