"""Fork routes: request a plan, report progress, finish, list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request

from planner.api import examples
from planner.api.json_route import JsonRoute
from planner.api.openapi import ALWAYS, WITH_BODY, ProblemDoc, openapi_examples, problems, success
from planner.api.pagination import DEFAULT_PAGE_SIZE, After, Limit, paginate
from planner.api.validation import reject_reserved_names
from planner.ownership import NOT_OWNER, OWNER_HEADER_DOCS, Claimant
from planner.plan_service import PlanService
from rfork.schema import (
    ForkInfo,
    ForkPage,
    ForkProgress,
    ForkRequest,
    ForkResult,
    ForkState,
    Identifier,
    Plan,
    ProgressAck,
)

ForkId = Annotated[Identifier, Path(description="chosen by the target", examples=["fork-1"])]

UNKNOWN_FORK = ProblemDoc(404, "unknown-fork", "unknown fork fork-1")
OTHER_OWNER = ProblemDoc(403, NOT_OWNER, "fork fork-1 belongs to another owner: X-Rfork-Owner does not match")
FORK_ENDED = ProblemDoc(409, "fork-ended", "fork fork-1 has ended: request a plan under another id")
GROUP_BUSY = ProblemDoc(503, "busy", "other planner replicas kept changing this group: retry")


def forks_router(service: PlanService) -> APIRouter:
    """Return the routes under /v1/forks."""
    router = APIRouter(prefix="/v1/forks", tags=["forks"], responses=problems(*ALWAYS), route_class=JsonRoute)

    @router.post(
        "",
        summary="Request a plan, or a new one",
        responses=success({"read from a seed": examples.PLAN, "cold start: read storage": examples.COLD_PLAN})
        | problems(*WITH_BODY, OTHER_OWNER, FORK_ENDED, GROUP_BUSY),
        openapi_extra=OWNER_HEADER_DOCS,
    )
    async def create_fork(
        call: Request,
        request: Annotated[
            ForkRequest,
            Body(
                openapi_examples=openapi_examples(
                    {
                        "first": examples.FORK_REQUEST,
                        "replan, half way": examples.REPLAN_REQUEST,
                        "cold start": examples.COLD_FORK_REQUEST,
                    }
                )
            ),
        ],
    ) -> Plan:
        """Return which chunks to read from which source, with a lease for each source.

        The call also registers the target, so that others can read from it immediately. If a source dies,
        stalls or sends wrong bytes, call again with the same `fork_id`, the chunks verified so far, and
        `faults`: the new plan covers the rest. If no instance has the image, one target is elected to read
        its `storage` (several targets, for a snapshot: each reads a share), and the others read from it. If a
        plan has neither `routes` nor `storage`, `reason` explains why.
        """
        reject_reserved_names(request.instance)
        return await service.plan(request, Claimant.of(call.scope))

    @router.post(
        "/{fork_id}/progress",
        summary="Report progress, renew leases",
        responses=success(examples.PROGRESS_ACK) | problems(*WITH_BODY, OTHER_OWNER, UNKNOWN_FORK, FORK_ENDED, 503),
        openapi_extra=OWNER_HEADER_DOCS,
    )
    async def progress(
        fork_id: ForkId,
        request: Request,
        progress: Annotated[
            ForkProgress,
            Body(openapi_examples=openapi_examples({"half way": examples.PROGRESS})),
        ],
    ) -> ProgressAck:
        """Report the verified chunks, about once a second; the response renews the leases of the current
        routes.

        A source missing from the response was removed or has new weights. `replan_suggested` means that a
        better plan is available. Problem `unknown-fork` (404) means that the planner restarted, or received
        no progress for too long: request a plan again.
        """
        return await service.progress(fork_id, progress, Claimant.of(request.scope))

    @router.post(
        "/{fork_id}/finish",
        status_code=204,
        summary="Finish a fork",
        responses=success(status=204) | problems(*WITH_BODY, OTHER_OWNER, 503),
        openapi_extra=OWNER_HEADER_DOCS,
    )
    async def finish(
        fork_id: ForkId,
        request: Request,
        finish: Annotated[ForkResult, Body(openapi_examples=openapi_examples({"forked": examples.FINISH}))],
    ) -> None:
        """Record the result of a fork and release its leases. An unknown or finished fork is not an error."""
        await service.finish(fork_id, finish, Claimant.of(request.scope))

    @router.get("", summary="List forks", responses=success(examples.FORKS))
    async def list_forks(
        model: Annotated[str | None, Query(description="only forks of this model")] = None,
        state: Annotated[ForkState | None, Query(description="only forks in this state")] = None,
        host: Annotated[str | None, Query(description="only forks of targets on this host")] = None,
        after: After = None,
        limit: Limit = DEFAULT_PAGE_SIZE,
    ) -> ForkPage:
        """List the running and the most recently finished forks, ordered by id.

        The host filter applies only while the fork's target is known.
        """
        await service.sweep()
        now, known = service.now(), service.state

        def host_of(instance_id: str) -> str | None:
            target = known.instance(instance_id)
            return target.report.placement.host if target is not None else None

        matching_ids = (
            record.fork_id
            for record in known.forks_after(after)
            if (model is None or model == record.model)
            and (state is None or state == record.state)
            and (host is None or host == host_of(record.instance_id))
        )
        page_ids, next_page = paginate(matching_ids, limit)
        records = [record for fork_id in page_ids if (record := known.fork(fork_id))]
        return ForkPage(items=tuple(record.view(now) for record in records), next=next_page)

    @router.get("/{fork_id}", summary="Get a fork", responses=success(examples.FORK) | problems(UNKNOWN_FORK))
    async def show(fork_id: ForkId) -> ForkInfo:
        """Return the fork's plan, its progress and, once finished, its result."""
        return service.fork(fork_id).view(service.now())

    return router
