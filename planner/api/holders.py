"""Holder routes: register and heartbeat, remove, list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request

from planner.api import examples
from planner.api.json_route import JsonRoute
from planner.api.openapi import ALWAYS, WITH_BODY, ProblemDoc, openapi_examples, problems, success
from planner.api.pagination import DEFAULT_PAGE_SIZE, After, Limit, paginate
from planner.core.problems import invalid_field
from planner.ownership import NOT_OWNER, OWNER_HEADER_DOCS, Claimant
from planner.plan_service import PlanService
from rfork.schema import HolderAck, HolderInfo, HolderPage, HolderReport, Identifier

HolderId = Annotated[Identifier, Path(description="chosen by the holder", examples=["holder-1"])]

UNKNOWN_HOLDER = ProblemDoc(404, "unknown-holder", "unknown holder holder-1")
OTHER_OWNER = ProblemDoc(403, NOT_OWNER, "holder holder-1 belongs to another owner: X-Rfork-Owner does not match")


def holders_router(service: PlanService) -> APIRouter:
    """Return the routes under /v1/holders."""
    router = APIRouter(prefix="/v1/holders", tags=["holders"], responses=problems(*ALWAYS), route_class=JsonRoute)

    @router.put(
        "/{holder_id}",
        summary="Register, or send a heartbeat",
        responses=success(examples.HOLDER_ACK) | problems(*WITH_BODY, OTHER_OWNER, 503),
        openapi_extra=OWNER_HEADER_DOCS,
    )
    async def report(
        holder_id: HolderId,
        request: Request,
        report: Annotated[HolderReport, Body(openapi_examples=openapi_examples({"holder": examples.HOLDER}))],
    ) -> HolderAck:
        """Report the complete state of a holder, and get the images that it should keep, most urgent first.

        Images announced for its host (`hosts` of a scale-up) come first, in the ranks and layouts that most replicas
        of the model have; then those of the engines on its host, then its own selection. Only images that an instance
        can serve, or that the holder has, are wanted. A holder that does not follow its host is started for one
        engine, and gets the images that this engine will need.

        Each image that it keeps is also an instance, with its own reports and forks. `X-Rfork-Owner` is as for
        instances.
        """
        if report.holder_id != holder_id:
            raise invalid_field("holder_id", f"the path has {holder_id}, the body {report.holder_id}")
        return await service.report_holder(report, Claimant.of(request.scope))

    @router.delete(
        "/{holder_id}",
        status_code=204,
        summary="Remove a holder",
        responses=success(status=204) | problems(OTHER_OWNER, 503),
        openapi_extra=OWNER_HEADER_DOCS,
    )
    async def remove(holder_id: HolderId, request: Request) -> None:
        """Forget the holder; its images are removed like other instances. An unknown holder is not an error.

        With a token of the role `instance`, the owner's secret is required.
        """
        await service.remove_holder(holder_id, Claimant.of(request.scope))

    @router.get("", summary="List holders", responses=success(examples.HOLDERS))
    async def list_holders(
        host: Annotated[str | None, Query(description="only holders on this host")] = None,
        after: After = None,
        limit: Limit = DEFAULT_PAGE_SIZE,
    ) -> HolderPage:
        """List the registered holders, ordered by id, with their last reports and the images they should keep now."""
        await service.sweep()
        holders = service.state.holders
        found = holders.all() if host is None else holders.on_host(host)
        page_ids, next_page = paginate((each.holder_id for each in found if each.holder_id > (after or "")), limit)
        records = [record for holder_id in page_ids if (record := holders.get(holder_id))]
        return HolderPage(items=tuple(map(service.holder_info, records)), next=next_page)

    @router.get(
        "/{holder_id}",
        summary="Get a holder",
        responses=success(examples.HOLDER_INFO) | problems(UNKNOWN_HOLDER),
    )
    async def show(holder_id: HolderId) -> HolderInfo:
        """Return the holder's last report, its age, and the images that it should keep now."""
        return service.holder_info(service.holder(holder_id))

    return router
