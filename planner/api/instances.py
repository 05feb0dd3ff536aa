"""Instance routes: register and heartbeat, drain, exit check, remove, list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request

from planner.api import examples
from planner.api.json_route import JsonRoute
from planner.api.openapi import ALWAYS, WITH_BODY, ProblemDoc, openapi_examples, problems, success
from planner.api.pagination import DEFAULT_PAGE_SIZE, After, Limit, paginate
from planner.api.validation import reject_reserved_names
from planner.auth import require_role
from planner.core.problems import invalid_field
from planner.ownership import NOT_OWNER, OWNER_HEADER_DOCS, Claimant
from planner.plan_service import PlanService
from rfork.schema import ExitCheck, Identifier, InstanceAck, InstanceInfo, InstancePage, InstanceReport, InstanceState

InstanceId = Annotated[Identifier, Path(description="chosen by the instance", examples=["seed-1"])]

UNKNOWN_INSTANCE = ProblemDoc(404, "unknown-instance", "unknown instance seed-1")
OTHER_OWNER = ProblemDoc(403, NOT_OWNER, "instance seed-1 belongs to another owner: X-Rfork-Owner does not match")
LAST_SEED = ProblemDoc(
    409,
    "last-seed",
    "instance seed-1 is the last seed of version files:3fa2c1d0 of these weights: "
    "start another first, or force the drain (`rfork drain --force`)",
)


def instances_router(service: PlanService) -> APIRouter:
    """Return the routes under /v1/instances."""
    router = APIRouter(prefix="/v1/instances", tags=["instances"], responses=problems(*ALWAYS), route_class=JsonRoute)

    @router.put(
        "/{instance_id}",
        summary="Register, or send a heartbeat",
        responses=success(examples.ACK) | problems(*WITH_BODY, OTHER_OWNER, 503),
        openapi_extra=OWNER_HEADER_DOCS,
    )
    async def report(
        instance_id: InstanceId,
        request: Request,
        report: Annotated[InstanceReport, Body(openapi_examples=openapi_examples({"seed": examples.SEED}))],
    ) -> InstanceAck:
        """Report the complete state of one rank of an instance.

        The first report registers it, each later one is its heartbeat; every report is complete, so that a
        restarted planner knows everything again after one heartbeat. Send the next one within `heartbeat_s`.

        `X-Rfork-Owner` is a secret chosen by the caller. The first report binds the instance to it; each
        later report, and every call for the instance's forks, must send the same one (problem `not-owner`,
        403). The lease keys in the response are derived from it too.
        """
        if report.instance_id != instance_id:
            raise invalid_field("instance_id", f"the path has {instance_id}, the body {report.instance_id}")
        return await service.report(reject_reserved_names(report), Claimant.of(request.scope))

    @router.post(
        "/{instance_id}/drain",
        summary="Stop assigning new readers",
        responses=success(examples.DRAINING) | problems(OTHER_OWNER, UNKNOWN_INSTANCE, LAST_SEED, 503),
        openapi_extra=OWNER_HEADER_DOCS,
    )
    async def drain(
        instance_id: InstanceId,
        request: Request,
        force: Annotated[
            bool,
            Query(description="drain even the last seed of its weights (operators only)"),
        ] = False,
    ) -> InstanceInfo:
        """Assign the instance no new readers until it is removed; current readers continue.

        Problem `last-seed` (409) if no other instance has its complete weights; `force` drains it anyway, and
        requires an operator: an instance's own preStop hook must not cause a cold start for the next one.
        With a token of the role `instance`, the owner's secret is required.
        """
        if force:
            require_role(request.scope, "operator")
        record = await service.drain(instance_id, Claimant.of(request.scope), force=force)
        return record.view(service.now())

    @router.get(
        "/{instance_id}/exit",
        summary="Check whether an instance may exit",
        responses=success(examples.EXIT_CHECK),
    )
    async def can_exit(instance_id: InstanceId) -> ExitCheck:
        """Return True if any fork reads from the instance, or will need it. The status is always 200: poll until it
        may exit.

        For a preStop hook, after draining: `rfork drain INSTANCE --wait 60`, or without rfork
        `for try in $(seq 30); do curl -fsS -m 1 -H "Authorization: Bearer $RFORK_TOKEN"
        $RFORK_PLANNER/v1/instances/$INSTANCE/exit | grep -q '"can_exit":true' && break; sleep 1; done`.
        An unknown instance may exit.
        """
        return await service.can_exit(instance_id)

    @router.delete(
        "/{instance_id}",
        status_code=204,
        summary="Remove an instance",
        responses=success(status=204) | problems(OTHER_OWNER, 503),
        openapi_extra=OWNER_HEADER_DOCS,
    )
    async def remove(instance_id: InstanceId, request: Request) -> None:
        """Forget the instance and end its fork. An unknown instance is not an error.

        With a token of the role `instance`, the owner's secret is required.
        """
        await service.remove(instance_id, Claimant.of(request.scope))

    @router.get("", summary="List instances", responses=success(examples.INSTANCES))
    async def list_instances(
        model: Annotated[str | None, Query(description="only instances of this model")] = None,
        state: Annotated[InstanceState | None, Query(description="only instances in this state")] = None,
        host: Annotated[str | None, Query(description="only instances on this host")] = None,
        replica: Annotated[
            Identifier | None,
            Query(
                description="only the ranks of this replica (its `RFORK_REPLICA`): ids that start with "
                "`REPLICA-main-` or `REPLICA-speculative-`",
                examples=["llama-7c9f"],
            ),
        ] = None,
        after: After = None,
        limit: Limit = DEFAULT_PAGE_SIZE,
    ) -> InstancePage:
        """List the registered instances, ordered by id.

        The filter `replica` is an index lookup: a server that shuts down finds its own ranks cheaply.
        """
        await service.sweep()
        now = service.now()
        matching_ids = (
            record.source.instance_id
            for record in service.state.instances_after(after, replica)
            if (model is None or model == record.report.model)
            and (host is None or host == record.source.location.host)
            and (state is None or state == record.source.state)
        )
        page_ids, next_page = paginate(matching_ids, limit)
        records = [record for instance_id in page_ids if (record := service.state.instance(instance_id))]
        return InstancePage(items=tuple(record.view(now) for record in records), next=next_page)

    @router.get(
        "/{instance_id}",
        summary="Get an instance",
        responses=success(examples.INSTANCE) | problems(UNKNOWN_INSTANCE),
    )
    async def show(instance_id: InstanceId) -> InstanceInfo:
        """Return the instance's last report, its age, and the reason for its quarantine, if any."""
        return service.instance(instance_id).view(service.now())

    return router
