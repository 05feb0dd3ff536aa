"""Forks: ask for a plan, report progress, finish, list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request

from planner.api import examples
from planner.api.openapi import ALWAYS, WITH_BODY, ProblemDoc, openapi_examples, problems, success
from planner.api.pagination import PAGE, After, Limit, paginate
from planner.api.validation import reject_reserved_names
from planner.ownership import NOT_OWNER, PARAMETER, Claimant
from planner.registry import Registry
from rfork.schema import ForkInfo, ForkPage, ForkProgress, ForkRequest, ForkResult, Plan, ProgressAck
from rfork.schema.types import ForkState, Identifier

ForkId = Annotated[Identifier, Path(description="chosen by the target", examples=["fork-1"])]

UNKNOWN = ProblemDoc(404, "unknown-fork", "no fork fork-1 is known")
FOREIGN = ProblemDoc(403, NOT_OWNER, "fork fork-1 belongs to another caller: X-Rfork-Owner does not match")
ENDED = ProblemDoc(409, "fork-ended", "fork fork-1 has ended: ask under another id")
BUSY = ProblemDoc(503, "busy", "other planners changed this group at each attempt: ask again")


def forks_router(registry: Registry) -> APIRouter:
    """The routes under /v1/forks."""
    router = APIRouter(prefix="/v1/forks", tags=["forks"], responses=problems(*ALWAYS))

    @router.post(
        "",
        summary="Ask for a plan, or for a new one",
        responses=success({"read from a seed": examples.PLAN, "cold start: read storage": examples.COLD_PLAN})
        | problems(*WITH_BODY, FOREIGN, ENDED, BUSY),
        openapi_extra=PARAMETER,
    )
    async def create_fork(
        call: Request,
        request: Annotated[
            ForkRequest,
            Body(
                openapi_examples=openapi_examples(
                    {
                        "first": examples.FORK_REQUEST,
                        "again, half way": examples.REPLAN_REQUEST,
                        "cold start": examples.COLD_FORK_REQUEST,
                    }
                )
            ),
        ],
    ) -> Plan:
        """Say who reads which chunks from whom, with a lease on each source.

        The call registers the target too, so that others can chain behind it at once. A target whose source
        died, stalled or lied calls again with the same `fork_id`, what it has verified by then, and `faults`:
        the new plan covers the rest. Where nobody holds the image, one target is elected to read its
        `storage` (several, where it is a snapshot: each reads a share), and the others read from it. A plan
        with neither `routes` nor `storage` says in `reason` what there is instead.
        """
        reject_reserved_names(request.instance)
        return await registry.request_plan(request, Claimant.of(call.scope))

    @router.post(
        "/{fork_id}/progress",
        summary="Report progress, renew leases",
        responses=success(examples.PROGRESS_ACK) | problems(*WITH_BODY, FOREIGN, UNKNOWN, ENDED, 503),
        openapi_extra=PARAMETER,
    )
    async def progress(
        fork_id: ForkId,
        request: Request,
        progress: Annotated[
            ForkProgress,
            Body(openapi_examples=openapi_examples({"half way": examples.PROGRESS})),
        ],
    ) -> ProgressAck:
        """Tell what is verified, about once a second; the answer renews the leases of the current routes.

        A source that the answer lacks is gone or has new weights. `replan_suggested` says that a better plan can be
        had. Problem `unknown-fork` (404) means that the planner restarted, or heard nothing for too long: ask
        for a plan again.
        """
        return await registry.progress(fork_id, progress, Claimant.of(request.scope))

    @router.post(
        "/{fork_id}/finish",
        status_code=204,
        summary="Say how it ended",
        responses=success(status=204) | problems(*WITH_BODY, FOREIGN, 503),
        openapi_extra=PARAMETER,
    )
    async def finish(
        fork_id: ForkId,
        request: Request,
        finish: Annotated[ForkResult, Body(openapi_examples=openapi_examples({"forked": examples.FINISH}))],
    ) -> None:
        """End the fork and release its leases. A fork that is not known, or has ended, is no error."""
        await registry.finish(fork_id, finish, Claimant.of(request.scope))

    @router.get("", summary="List forks", responses=success(examples.FORKS))
    async def list_forks(
        model: Annotated[str | None, Query(description="only of this model")] = None,
        state: Annotated[ForkState | None, Query(description="only in this state")] = None,
        host: Annotated[str | None, Query(description="only of targets on this host")] = None,
        after: After = None,
        limit: Limit = PAGE,
    ) -> ForkPage:
        """The forks under way and the last ones that ended, in the order of their ids.

        A fork's host is known as long as its target is.
        """
        await registry.sweep()
        now, known = registry.now(), registry.state

        def host_of(instance_id: str) -> str | None:
            target = known.instance(instance_id)
            return target.report.placement.host if target is not None else None

        filters = (
            record.fork_id
            for record in known.forks_after(after)
            if (model is None or model == record.model)
            and (state is None or state == record.state)
            and (host is None or host == host_of(record.instance_id))
        )
        found, following = paginate(filters, limit)
        records = [record for each in found if (record := known.fork(each))]
        return ForkPage(items=tuple(record.view(now) for record in records), next=following)

    @router.get("/{fork_id}", summary="Show one fork", responses=success(examples.FORK) | problems(UNKNOWN))
    async def show(fork_id: ForkId) -> ForkInfo:
        """The fork's plan, its progress and, once it has ended, how."""
        return registry.fork(fork_id).view(registry.now())

    return router
