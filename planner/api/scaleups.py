"""Scale-ups: announce that replicas are about to start, look at them, withdraw them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path

from planner.api import examples
from planner.api.openapi import ALWAYS, WITH_BODY, ProblemDoc, openapi_examples, problems, success
from planner.registry import Registry
from rfork.schema import ScaleUp, ScaleUpInfo
from rfork.schema.types import Identifier

ScaleUpId = Annotated[Identifier, Path(description="chosen by the caller", examples=["default.llama"])]

UNKNOWN = ProblemDoc(404, "unknown-scaleup", "no scale-up default.llama is known")


def scaleups_router(registry: Registry) -> APIRouter:
    """The routes under /v1/scaleups."""
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
                openapi_examples=openapi_examples(
                    {"three": examples.SCALEUP, "none any more": examples.FINISHED_SCALEUP}
                )
            ),
        ],
    ) -> ScaleUpInfo:
        """Have those that start together share one plan: call it before they start.

        The first fork of each rank then waits until as many have asked as are expected, for
        RFORK_PLANNER_SCALEUP_WAIT_S at most. Said again with the same `scaleup_id` it replaces what was said:
        `replicas` are those that have not asked *by then*; 0 withdraws it. While replicas are expected the
        last instance that holds the weights is told that it may not exit. Of more than 10,000 scale-ups that
        is forgotten which would expire first.
        """
        await registry.sweep()
        return await registry.scaleups.announce(scaleup)

    @router.get("", summary="List scale-ups", responses=success(examples.SCALEUPS))
    async def list_scaleups() -> list[ScaleUpInfo]:
        """Those under way, in the order of their ids. One that expired, or was withdrawn, is forgotten."""
        await registry.sweep()
        return registry.scaleups.views()

    @router.get(
        "/{scaleup_id}",
        summary="Show one scale-up",
        responses=success(examples.SCALEUP_VIEW) | problems(UNKNOWN),
    )
    async def show(scaleup_id: ScaleUpId) -> ScaleUpInfo:
        """How many have come since it was last announced, and what awaits the others."""
        return registry.scaleups.view(scaleup_id)

    @router.delete(
        "/{scaleup_id}",
        status_code=204,
        summary="Withdraw a scale-up",
        responses=success(status=204) | problems(503),
    )
    async def withdraw(scaleup_id: ScaleUpId) -> None:
        """Those that wait are planned at once. One that is not known is no error."""
        await registry.scaleups.withdraw(scaleup_id)

    return router
