"""Health and metrics: for Kubernetes and Prometheus."""

from __future__ import annotations

from typing import Final, Literal

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from planner.api.openapi import REQUEST_ID, ProblemDoc, problems, success
from planner.core.problems import ProblemError
from planner.metrics import Metrics
from planner.plan_service import PlanService
from rfork.schema import WireModel

SAMPLE: Final = 'rfork_planner_instances{state="serving"} 3.0'


class Health(WireModel):
    """The planner is alive."""

    status: Literal["ok"] = Field("ok", description="always `ok`")


def health_router(service: PlanService, metrics: Metrics) -> APIRouter:
    """Return the routes /healthz and /readyz, which need no token, and /metrics."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="Liveness", responses=success(Health()))
    async def healthz() -> Health:
        """Answer while the process serves requests. Needs no token."""
        return Health()

    @router.get(
        "/readyz",
        summary="Readiness",
        responses=success(Health()) | problems(ProblemDoc(503, "not-ready", "the store is unavailable")),
    )
    async def readyz() -> Health:
        """Answer 503 while the store cannot be read or written. Needs no token."""
        if not service.store.ready:
            raise ProblemError(503, "not-ready", "the store is unavailable")
        return Health()

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=Response,
        responses=problems(401, 403, 429)
        | {200: {"headers": REQUEST_ID, "content": {"text/plain": {"example": SAMPLE}}}},
    )
    async def exposition() -> Response:
        """Return instances, forks, fallbacks and their reasons, bytes by source, plan latency, active leases."""
        await service.sweep()
        state = service.state
        orphaned = sum(group.orphaned for group in state.groups())
        mixed = len(state.models_with_several_versions())
        scaleups = state.scaleups.live(service.now())
        text = metrics.exposition(state.instances(), state.live_forks(), orphaned, mixed, scaleups, state.holders.all())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router
