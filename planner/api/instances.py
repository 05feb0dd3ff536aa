"""Instances: register and heartbeat, drain, ask whether to exit, remove, list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request

from planner.api import examples
from planner.api.openapi import ALWAYS, WITH_BODY, ProblemDoc, openapi_examples, problems, success
from planner.api.pagination import PAGE, After, Limit, paginate
from planner.api.validation import reject_reserved_names
from planner.auth import require_role
from planner.http_errors import invalid_field
from planner.ownership import NOT_OWNER, PARAMETER, Claimant
from planner.registry import Registry
from rfork.schema import ExitCheck, InstanceAck, InstanceInfo, InstancePage, InstanceReport
from rfork.schema.types import Identifier, InstanceState

InstanceId = Annotated[Identifier, Path(description="chosen by the instance", examples=["seed-1"])]

UNKNOWN = ProblemDoc(404, "unknown-instance", "no instance seed-1 is known")
FOREIGN = ProblemDoc(403, NOT_OWNER, "instance seed-1 belongs to another caller: X-Rfork-Owner does not match")
LAST_SEED = ProblemDoc(
    409,
    "last-seed",
    "instance seed-1 is the last that holds version files:3fa2c1d0 of these weights: "
    "start another, or drain it with force",
)


def instances_router(registry: Registry) -> APIRouter:
    """The routes under /v1/instances."""
    router = APIRouter(prefix="/v1/instances", tags=["instances"], responses=problems(*ALWAYS))

    @router.put(
        "/{instance_id}",
        summary="Register, or send a heartbeat",
        responses=success(examples.ACK) | problems(*WITH_BODY, FOREIGN, 503),
        openapi_extra=PARAMETER,
    )
    async def report(
        instance_id: InstanceId,
        request: Request,
        report: Annotated[InstanceReport, Body(openapi_examples=openapi_examples({"seed": examples.SEED}))],
    ) -> InstanceAck:
        """Tell the planner all about one rank of an instance.

        The first report registers it, each further one is its heartbeat; every report carries everything,
        so that a planner that restarted knows it all again after one. Send the next one within `heartbeat_s`.

        `X-Rfork-Owner` is a secret of the caller's choice. The first report binds the instance to it; each
        later report, and every call on the instance's forks, must show the same one (problem `not-owner`,
        403). The lease keys in the answer are derived from it too.
        """
        if report.instance_id != instance_id:
            raise invalid_field("instance_id", f"the path says {instance_id}, the body {report.instance_id}")
        return await registry.report(reject_reserved_names(report), Claimant.of(request.scope))

    @router.post(
        "/{instance_id}/drain",
        summary="Give it no new readers",
        responses=success(examples.DRAINING) | problems(FOREIGN, UNKNOWN, LAST_SEED, 503),
        openapi_extra=PARAMETER,
    )
    async def drain(
        instance_id: InstanceId,
        request: Request,
        force: Annotated[
            bool,
            Query(description="drain it even if it is the last that holds its weights (operators only)"),
        ] = False,
    ) -> InstanceInfo:
        """Send no new forks to the instance; those that read from it go on. Lasts until it is removed.

        Problem `last-seed` (409) where nobody else holds its weights whole; `force` drains it all the same,
        and takes an operator: an instance's own hook must not leave the next one a cold start. A token with
        the role `instance` must show the owner's secret.
        """
        if force:
            require_role(request.scope, "operator")
        record = await registry.drain(instance_id, Claimant.of(request.scope), force=force)
        return record.view(registry.now())

    @router.get(
        "/{instance_id}/exit",
        summary="May it end now?",
        responses=success(examples.EXIT_CHECK),
    )
    async def can_exit(instance_id: InstanceId) -> ExitCheck:
        """Whether anybody reads from the instance, or will have to. Answers 200 always: ask until it may.

        For a preStop hook, once it is drained: `rfork drain INSTANCE --wait 60`, or without rfork
        `for try in $(seq 30); do curl -fsS -m 1 -H "Authorization: Bearer $RFORK_TOKEN"
        $RFORK_PLANNER/v1/instances/$INSTANCE/exit | grep -q '"can_exit":true' && break; sleep 1; done`.
        An instance that the planner does not know may end.
        """
        return await registry.can_exit(instance_id)

    @router.delete(
        "/{instance_id}",
        status_code=204,
        summary="Forget an instance",
        responses=success(status=204) | problems(FOREIGN, 503),
        openapi_extra=PARAMETER,
    )
    async def remove(instance_id: InstanceId, request: Request) -> None:
        """Forget the instance and end its fork. One that is not known is no error.

        A token with the role `instance` must show the owner's secret.
        """
        await registry.remove(instance_id, Claimant.of(request.scope))

    @router.get("", summary="List instances", responses=success(examples.INSTANCES))
    async def list_instances(
        model: Annotated[str | None, Query(description="only of this model")] = None,
        state: Annotated[InstanceState | None, Query(description="only in this state")] = None,
        host: Annotated[str | None, Query(description="only on this host")] = None,
        replica: Annotated[
            Identifier | None,
            Query(
                description="only the ranks of this server (its `RFORK_REPLICA`): those whose ids begin with "
                "`REPLICA-target-` or `REPLICA-draft-`",
                examples=["llama-7c9f"],
            ),
        ] = None,
        after: After = None,
        limit: Limit = PAGE,
    ) -> InstancePage:
        """The instances that reported lately, in the order of their ids.

        Asked by `replica`, it costs nothing for the others: so a server that ends finds its own.
        """
        await registry.sweep()
        now = registry.now()
        filters = (
            record.source.instance_id
            for record in registry.state.instances_after(after, replica)
            if (model is None or model == record.report.model)
            and (host is None or host == record.source.location.host)
            and (state is None or state == record.source.state)
        )
        found, following = paginate(filters, limit)
        records = [record for each in found if (record := registry.state.instance(each))]
        return InstancePage(items=tuple(record.view(now) for record in records), next=following)

    @router.get(
        "/{instance_id}",
        summary="Show one instance",
        responses=success(examples.INSTANCE) | problems(UNKNOWN),
    )
    async def show(instance_id: InstanceId) -> InstanceInfo:
        """What the instance last reported, how long ago, and why it is in quarantine, if it is."""
        return registry.instance(instance_id).view(registry.now())

    return router
