"""Scale-up routes: announce that replicas are about to start, list, withdraw."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path

from planner.api import examples
from planner.api.openapi import ALWAYS, WITH_BODY, ProblemDoc, openapi_examples, problems, success
from planner.plan_service import PlanService
from rfork.schema import Identifier, ScaleUp, ScaleUpInfo

ScaleUpId = Annotated[Identifier, Path(description="chosen by the caller", examples=["default.llama"])]

UNKNOWN_SCALEUP = ProblemDoc(404, "unknown-scaleup", "unknown scale-up default.llama")


def scaleups_router(service: PlanService) -> APIRouter:
    """Return the routes under /v1/scaleups."""
    router = APIRouter(prefix="/v1/scaleups", tags=["scale-ups"], responses=problems(*ALWAYS))

    @router.post(
        "",
        summary="Announce replicas that are about to start",
        responses=success(examples.SCALEUP_VIEW) | problems(*WITH_BODY, 503),
    )
    async def announce(
        scaleup: Annotated[
            ScaleUp,
            Body(
                openapi_examples=openapi_examples({"three": examples.SCALEUP, "withdrawn": examples.FINISHED_SCALEUP})
            ),
        ],
    ) -> ScaleUpInfo:
        """Make replicas that start together share one plan: announce them before they start.

        The first fork of each rank then waits until as many requests have arrived as are expected, for
        RFORK_PLANNER_SCALEUP_WAIT_S at most. A repeated announcement with the same `scaleup_id` replaces the
        previous one: `replicas` are those that have not sent a request *by then*; 0 withdraws the scale-up.
        While replicas are expected, the exit check of the last seed of the weights denies its exit. Of more
        than 10,000 scale-ups, the one that expires first is dropped.
        """
        return await service.announce(scaleup)

    @router.get("", summary="List scale-ups", responses=success(examples.SCALEUPS))
    async def list_scaleups() -> list[ScaleUpInfo]:
        """List the scale-ups in progress, ordered by id. Expired and withdrawn ones are not listed."""
        await service.sweep()
        return service.scaleups()

    @router.get(
        "/{scaleup_id}",
        summary="Get a scale-up",
        responses=success(examples.SCALEUP_VIEW) | problems(UNKNOWN_SCALEUP),
    )
    async def show(scaleup_id: ScaleUpId) -> ScaleUpInfo:
        """Return how many replicas have arrived since the last announcement, and the forecast for the others."""
        return service.scaleup(scaleup_id)

    @router.delete(
        "/{scaleup_id}",
        status_code=204,
        summary="Withdraw a scale-up",
        responses=success(status=204) | problems(503),
    )
    async def withdraw(scaleup_id: ScaleUpId) -> None:
        """Plan the waiting forks immediately. An unknown scale-up is not an error."""
        await service.withdraw(scaleup_id)

    return router
